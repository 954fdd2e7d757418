"""The clock shared by several Titanics."""

import time


class Clock:
    """The clock of the database's host, on which all its Titanics agree."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        """Return seconds since 1970."""
        return time.time() + self._ahead

    def set(self, ahead: float) -> None:
        """Set how many seconds the database's clock is ahead of this host's."""
        self._ahead = ahead

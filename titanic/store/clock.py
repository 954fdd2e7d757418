"""The time on which several Titanics agree."""

import time


class Clock:
    """The time, as all Titanics on one database have it: that of the database's host."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time() + self._ahead

    def set(self, ahead: float) -> None:
        """The database's clock is so many seconds ahead of this host's."""
        self._ahead = ahead

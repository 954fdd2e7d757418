"""The clock shared by several Titanics."""

import time


class Clock:
    """The clock of the database's host, on which all its Titanics agree."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        """How many seconds the database's clock is ahead of this host's monotonic clock."""

    def now(self) -> float:
        """Return seconds since 1970: by this host's clock until `set` is called."""
        # This host's clock may be stepped; until it is compared again, keys would seem to have expired.
        return time.time() if self._ahead is None else time.monotonic() + self._ahead

    def set(self, now: float) -> None:
        """Set it to what the database's clock says."""
        self._ahead = now - time.monotonic()

"""The requests in the database that have not ended: about how many there are, and when to look for them."""

import asyncio

from .metrics import Metrics


class Backlog:
    """Counts requests as they are stored, retried and ended.

    Args:
        metrics: Counts them too.
        max_waiting: Maximum number of requests that have not ended.
    """

    def __init__(self, metrics: Metrics, max_waiting: int) -> None:
        self._metrics = metrics
        self.max_waiting = max_waiting
        self.waiting = 0
        """Requests that have not ended: the last count, and this Titanic's changes since."""
        self._refused = False
        self.look = asyncio.Event()
        """Set when maintenance should look for requests to execute before its interval ends."""

    def has_room(self) -> bool:
        """Return whether one more request may be accepted."""
        if self.waiting < self.max_waiting:
            return True
        self._refused = True
        return False

    def take_refused(self) -> bool:
        """Return whether requests were refused since the last call: perhaps there is room again."""
        refused, self._refused = self._refused, False
        return refused

    def counted(self, waiting: int) -> None:
        """Record how many requests in the database have not ended."""
        self.waiting = waiting

    def accepted(self, new: int, repeated: int) -> None:
        """Record that requests were stored, and that others had a key that was known."""
        self.waiting += new
        self._metrics.stored(new, repeated)

    def retried(self) -> None:
        """Record that a request waits for another attempt."""
        self._metrics.retried()
        self.look.set()

    def ended(self, code: int | None) -> None:
        """Record that a request ended: with a reply, or with a failure of this code."""
        self.waiting -= 1
        self._metrics.ended(code)

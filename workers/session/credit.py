"""A worker's credit, the number of requests that it asks for; that of threads depends on how long handlers take."""

from typing import Final

PREFETCH_SECONDS: Final = 0.001
"""Maximum amount of work, by measured duration, that a worker with blocking handlers prefetches."""
MAX_PREFETCH: Final = 256
"""Maximum number of requests that it prefetches."""
SHORT_HANDLER_SECONDS: Final = 0.0001
"""Mean duration of handlers below which several threads are no faster than one."""


class CreditController:
    """The credit of a worker that runs up to `concurrency` handlers at a time.

    With `prefetch`, threads find their next request without waiting for the broker.  But prefetched requests are stuck
    behind a handler that turns out to be slow.  So prefetching starts at zero, doubles while handlers are fast, and
    stops at the first slow one.  The credit never falls below `concurrency`: a measured duration may be that of a
    handler that waited for a processor, so it may cost speed, but never a handler its thread.
    """

    def __init__(self, concurrency: int, *, prefetch: bool = False) -> None:
        self.concurrency = concurrency
        """Maximum number of handlers running at the same time."""
        self.credit = concurrency
        """Requests to hold, running and prefetched."""
        self._prefetch = prefetch
        self._mean = 2 * PREFETCH_SECONDS
        """Moving average of the handlers' durations, in seconds."""
        self._streak = 0
        """Handlers since the credit last changed."""

    @property
    def handlers_are_short(self) -> bool:
        """Whether handlers are so short that running one thread at a time is best."""
        return self.credit > self.concurrency and self._mean < SHORT_HANDLER_SECONDS

    def finished(self, seconds: float) -> bool:
        """Record how long a handler took.  Return whether the credit changed."""
        if not self._prefetch:
            return False
        self._mean += (min(seconds, 2 * PREFETCH_SECONDS) - self._mean) / 8
        ahead = self.credit - self.concurrency
        allowed = min(int(PREFETCH_SECONDS / max(self._mean, 1e-9)), MAX_PREFETCH)
        self._streak += 1
        if 2 * allowed < ahead or not allowed:
            wanted = allowed
        elif self._streak >= self.credit:
            wanted = max(ahead, min(max(1, 2 * ahead), allowed))
        else:
            return False
        self._streak = 0
        self.credit = self.concurrency + wanted
        return wanted != ahead

    def requests_may_wait(self, waiting: int, busy: int) -> bool:
        """Return whether requests wait, or may soon wait, behind a handler that might be slow."""
        return self._prefetch and (self.credit > self.concurrency or waiting > max(0, self.concurrency - busy))

    def slow(self) -> None:
        """Stop prefetching until handlers are fast again: one has been running for too long."""
        self.credit = self.concurrency
        self._mean = 2 * PREFETCH_SECONDS
        self._streak = 0

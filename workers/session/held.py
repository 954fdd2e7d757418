"""The requests that a worker's connection holds, and its credit: the number of requests that it asks for.

A request waits for a handler, has one, or was given up.  The credit of threads depends on how long handlers take.
"""

import math
from collections import deque
from typing import Final

from ...mdp.wire import Address
from .request import Request

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


SLOW_CHECK_SECONDS: Final = PREFETCH_SECONDS / 2
"""Time after which a handler that seems slow is looked at again."""


class HeldRequests:
    """The requests of one connection, and the handlers of lost connections that have not ended.

    A request is *unbegun*, then *running*, then finished.  A running request may be *abandoned*, because another worker
    is to handle it; its handler need not have ended.  When the connection is lost, so are its requests; a handler
    without a request, an *orphan*, takes credit until it ends.

    `controller` decides how many requests to hold.  A handler that has neither ended nor sent a PARTIAL for
    `handler_timeout` seconds is stuck.
    """

    def __init__(self, controller: CreditController, handler_timeout: float | None) -> None:
        self.by_address: dict[Address, Request] = {}
        """All requests that have not ended, by address."""
        self.credit = controller.credit
        """How many to hold: as many as the controller says, minus the orphans."""
        self.unbegun: deque[Request] = deque()
        """Requests that have not begun, in order.  Some may have ended: they were cancelled."""
        self.abandoned: set[Address] = set()
        self._controller = controller
        self._handler_timeout = math.inf if handler_timeout is None else handler_timeout
        self._running: dict[Address, float] = {}  # when they began, oldest first
        self._active_at: dict[Address, float] = {}  # when they last sent anything; only with a `handler_timeout`
        self._orphans: dict[int, Request] = {}  # by id(), because other connections may use the same addresses
        self._slow_suspect: tuple[Address, float] | None = None  # the request whose handler seemed slow, and when

    def add(self, request: Request) -> None:
        """Add a request that has arrived."""
        self.by_address[request.address] = request
        self.unbegun.append(request)

    def begin(self, now: float) -> Request | None:
        """Return the next request for a handler, or None if there is none or enough handlers are running."""
        unbegun, running = self.unbegun, self._running
        while unbegun and len(running) + len(self._orphans) < self._controller.concurrency:
            request = unbegun.popleft()
            address = request.address
            if self.by_address.get(address) is request:  # else it was cancelled
                running[address] = now
                if self._handler_timeout != math.inf:
                    self._active_at[address] = now
                return request
        return None

    def has_begun(self, request: Request) -> bool:
        """Return whether a handler has `request`, which is held."""
        return request.address in self._running

    def active(self, request: Request, now: float) -> bool:
        """Record that the handler of `request` has sent something.  Return False if the request was lost."""
        address = request.address
        if self.by_address.get(address) is not request:
            return False
        if self._active_at.pop(address, None) is not None:
            self._active_at[address] = now
        return True

    def finish(self, request: Request, now: float) -> bool:
        """Remove a request, or an orphan.  Return False if its connection was lost."""
        address = request.address
        if self.by_address.get(address) is not request:
            if self._orphans.pop(id(request), None) is not None:
                self._count_credit()
            return False
        del self.by_address[address]
        began = self._running.pop(address, None)
        if self._active_at:
            self._active_at.pop(address, None)
        if self.abandoned:
            self.abandoned.discard(address)
        if began is not None and self._controller.finished(now - began):
            self._count_credit()
        return True

    def abandon(self, request: Request, *, ended: bool) -> bool:
        """Leave a request to another worker; `ended` tells whether its handler has ended.  Return False if the request
        was lost."""
        address = request.address
        if self.by_address.get(address) is not request:
            return False
        self.abandoned.add(address)
        self._active_at.pop(address, None)
        if ended:
            self._running.pop(address, None)
        return True

    def release(self, keep: int) -> list[Address]:
        """Remove the requests that have not begun, except the first `keep`; return their addresses, the last first."""
        addresses = []
        while len(self.unbegun) > keep:
            request = self.unbegun.pop()
            address = request.address
            if self.by_address.get(address) is request:
                del self.by_address[address]
                addresses.append(address)
        return addresses

    def lose(self) -> list[Request]:
        """Cancel and remove all requests.  Return those whose handlers are running, which become orphans."""
        for request in self.by_address.values():
            request.cancelled = True
        orphans = [request for address, request in self.by_address.items() if address in self._running]
        self._orphans.update((id(request), request) for request in orphans)
        self.by_address.clear()
        self.unbegun.clear()
        self.abandoned.clear()
        self._running.clear()
        self._active_at.clear()
        self._count_credit()
        return orphans

    @property
    def finished(self) -> bool:
        """Whether no handler is running that is to finish its request."""
        return not self._running.keys() - self.abandoned

    # ── handlers that take too long ──────────────────────────────────────────────────────────────────────────────────

    def stuck(self, now: float) -> Request | None:
        """Return a request whose handler has exceeded its time, and that is not abandoned yet."""
        if not self._active_at:
            return None
        address, active_at = next(iter(self._active_at.items()))
        return self.by_address[address] if now >= active_at + self._handler_timeout else None

    def slow(self, now: float) -> bool:
        """Return whether a handler keeps other requests waiting for too long, and lower the credit then."""
        if now < self._slow_at():
            return False
        oldest = next(iter(self._running))
        suspect = self._slow_suspect
        if suspect is None or oldest != suspect[0]:  # this process may have been suspended: check again
            self._slow_suspect = (oldest, now)
            return False
        self._controller.slow()
        self._count_credit()
        return True

    @property
    def room(self) -> int:
        """Number of requests that have not begun and for which a handler is free."""
        return max(0, self._controller.concurrency - len(self._running) - len(self._orphans))

    def deadline(self) -> float:
        """Return the time at which a handler will have taken too long."""
        if not self._running:
            return math.inf
        due = self._slow_at()
        if self._active_at:
            due = min(due, next(iter(self._active_at.values())) + self._handler_timeout)
        return due

    def _slow_at(self) -> float:
        """Return when the oldest handler will have kept other requests waiting for too long."""
        busy = len(self._running) + len(self._orphans)
        if self._running and self._controller.requests_may_wait(len(self.unbegun), busy):
            oldest, began = next(iter(self._running.items()))
            suspect = self._slow_suspect
            if suspect is None or suspect[0] != oldest:
                return began + PREFETCH_SECONDS
            return suspect[1] + SLOW_CHECK_SECONDS
        return math.inf

    def _count_credit(self) -> None:
        self.credit = max(0, self._controller.credit - len(self._orphans))

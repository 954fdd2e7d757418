"""The dispatch policy of a service: which request goes to which worker.

- Clients take turns; the requests of each stay in order (C20).  If requests name groups, or the service has limits,
  groups take turns first (`groups`).
- A request goes to the worker with the fewest outstanding requests.  Among those, the warm ones come first, the most
  recently used before the others: an X1 worker is warm if the last request that it ended was answered with a FINAL.
  Then come those that have failed, have done nothing yet, or speak another protocol: the least recently used first
  (C21).
- A request whose worker died is a *suspect*.  Suspects go first, and a worker holds at most one: if a request kills its
  workers, other requests are not blamed with it again and again (C17).

No frames, no clock.  Every operation takes constant time, whatever the number of workers, clients and requests.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Final, Generic, TypeVar

from ....service_limits import NO_LIMITS, ServiceLimits
from ....timers import LinkedList, TimerNode
from .fair_queue import MAX_CLIENTS, FairQueue, QueuedRequest, R, Tally
from .groups import PINNED, QUEUED, SUSPECT, Groups, Throttling

GROUP_BITS: Final = 8
"""A group of loads has this power of two of them: its bit mask is a short integer, however many requests a worker may
hold."""
GROUP_MASK: Final = (1 << GROUP_BITS) - 1
"""Selects the bits of a load that are its place in its group."""


class ScheduledWorker(TimerNode):
    """A worker, as far as it matters for which requests it gets."""

    __slots__ = ("credit", "free", "leaving", "pool", "pooled", "pooled_load", "suspects", "warm")

    def __init__(self, credit: int) -> None:
        super().__init__()
        self.credit = credit
        """Maximum number of requests that it holds."""
        self.suspects = 0
        """Number of suspects that it holds."""
        self.leaving = False
        """Whether it has sent DISCONNECT, and finishes what it holds (X1)."""
        self.warm = False
        """Whether it speaks X1 and the last request that it ended was answered with a FINAL: then it goes before others
        that hold as many (C21)."""
        self.pool: Pool[Any] | None = None
        """The pool that it is in.  The schedule keeps this and the next three."""
        self.pooled_load = 0
        """Its load when it was added to the pool."""
        self.pooled = 0
        """Grows with each worker that is added, so it tells the order."""
        self.free = 0
        """Its share of the schedule's capacity."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Number of requests that it holds."""


W = TypeVar("W", bound=ScheduledWorker)


class Pool(Generic[W]):
    """Workers with free credit, by the number of requests that they hold."""

    __slots__ = ("_groups", "_lists", "_loads", "size")

    def __init__(self) -> None:
        self.size = 0
        self._lists: list[LinkedList[W]] = []
        self._loads: list[int] = []
        """Bit masks of the loads at which there are workers, one for each group of loads."""
        self._groups = 0
        """Bit mask of the groups in which there are workers."""

    def add(self, worker: W, load: int) -> None:
        """Add a worker that holds `load` requests: before all others that hold as many if it is warm, else after."""
        if len(self._lists) <= load:
            self._grow(load)
        if worker.warm:
            self._lists[load].prepend(worker)
        else:
            self._lists[load].append(worker)
        group = load >> GROUP_BITS
        self._loads[group] |= 1 << (load & GROUP_MASK)
        self._groups |= 1 << group
        self.size += 1

    def _grow(self, load: int) -> None:
        """Make room for loads up to this one, and for the others of its group."""
        size = ((load >> GROUP_BITS) + 1) << GROUP_BITS
        self._lists += [LinkedList() for _ in range(size - len(self._lists))]
        self._loads += [0] * ((size >> GROUP_BITS) - len(self._loads))

    def remove(self, worker: W, load: int) -> None:
        """Remove a worker that was added when it held `load` requests."""
        workers = self._lists[load]
        workers.remove(worker)
        if workers.first is None:
            group = load >> GROUP_BITS
            mask = self._loads[group] = self._loads[group] & ~(1 << (load & GROUP_MASK))
            self._groups = self._groups & ~(1 << group) | ((mask != 0) << group)
        self.size -= 1

    def least(self) -> W | None:
        """Return the first of the workers that hold the fewest requests."""
        if not self._groups:
            return None
        group = _lowest(self._groups)
        return self._lists[(group << GROUP_BITS) + _lowest(self._loads[group])].first


def _kind(request: QueuedRequest) -> int:
    """Return in which of a service's queues `request` waits."""
    if request.pinned:
        return PINNED
    return SUSPECT if request.attempts else QUEUED


def _lowest(mask: int) -> int:
    """Return the number of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1


class Schedule(Generic[R, W]):
    """The requests that wait for one service, and the workers that can take them."""

    __slots__ = (
        "_pinned_next", "_pooled", "_tally", "_with_suspect", "_without_suspect", "capacity", "groups",
        "pinned", "queue", "suspects",
    )  # fmt: skip

    def __init__(self) -> None:
        self._tally = Tally()
        self.queue: FairQueue[R] = FairQueue(self._tally)
        self.suspects: FairQueue[R] = FairQueue(self._tally)
        self.pinned: FairQueue[R] = FairQueue(self._tally)
        """Requests that must not be passed on to another broker."""
        self.groups: Groups[R] | None = None
        """The groups of the requests, and the limits of the service; None if there are neither."""
        self.capacity = 0
        """Free credit of all local workers together."""
        self._pinned_next = True
        self._without_suspect: Pool[W] = Pool()
        self._with_suspect: Pool[W] = Pool()
        self._pooled = 0
        """Counts how often a worker was added to a pool, to tell which of two was used more recently."""

    @property
    def limits(self) -> ServiceLimits:
        """The limits of the service."""
        return NO_LIMITS if self.groups is None else self.groups.limits

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._tally.waiting

    @property
    def free(self) -> int:
        """Number of workers with free credit."""
        return self._without_suspect.size + self._with_suspect.size

    def oldest(self) -> float:
        """Return since when the oldest request has waited; inf if none does."""
        heads = chain.from_iterable(queue.heads() for queue in self._queues())
        return min((request.since for request in islice(heads, MAX_CLIENTS)), default=math.inf)

    def oldest_requests(self, most: int) -> Iterator[R]:
        """Yield about `most` of the requests that wait, of each client the oldest."""
        for queue in islice(self._queues(), most):
            yield from queue.oldest_requests(most)

    def first(self) -> R | None:
        """Return a request that waits, or None."""
        for queue in self._queues():
            request = queue.first()
            if request is not None:
                return request
        return None

    def _queues(self) -> Iterator[FairQueue[R]]:
        """Yield the queues, some of which may be empty."""
        if self.groups is None:
            yield from (self.suspects, self.pinned, self.queue)
        else:
            yield from self.groups.waiting_queues()

    def append(self, request: R) -> None:
        """Add `request` after the others of its client."""
        kind = _kind(request)
        if self.groups is None:
            self._own(kind).append(request)
        else:
            self.groups.append(request, kind)

    def prepend(self, request: R) -> None:
        """Add `request`, which came back, before all others (C17)."""
        kind = _kind(request)
        if self.groups is None:
            self._own(kind).prepend(request)
        else:
            self.groups.prepend(request, kind)

    def remove(self, request: R) -> None:
        """Remove `request`, which waits."""
        kind = _kind(request)
        if self.groups is None:
            self._own(kind).remove(request)
        else:
            self.groups.remove(request, kind)

    def _own(self, kind: int) -> FairQueue[R]:
        if kind == QUEUED:
            return self.queue
        return self.suspects if kind == SUSPECT else self.pinned

    def form_groups(self, service: bytes, throttling: Throttling) -> Groups[R]:
        """Let groups take turns from now on; return them.  `service` is the name of the service."""
        own = (self.suspects, self.queue, self.pinned)
        self.groups = Groups(service, own, self._tally, throttling)
        return self.groups

    def update(self, worker: W) -> None:
        """Record that the credit, load or suspects of a worker have changed, or that it is leaving."""
        if worker.pool is not None:
            worker.pool.remove(worker, worker.pooled_load)
            worker.pool = None
        load = worker.load
        free = 0 if worker.leaving else worker.credit - load
        free = max(free, 0)
        self.capacity += free - worker.free
        worker.free = free
        if free:
            pool = self._with_suspect if worker.suspects else self._without_suspect
            worker.pool = pool
            worker.pooled_load = load
            self._pooled += 1
            worker.pooled = self._pooled
            pool.add(worker, load)

    def take_for(self, may_take: Callable[[R], bool], now: float) -> R | None:
        """Remove and return the next request that another broker may take; None if there is none.

        Requests that a limit holds back wait for the local workers.
        """
        if self.groups is not None and self.free and not self.groups.is_open(now):
            return None
        for kind in (SUSPECT, QUEUED):
            request = (
                self._own(kind).take_for(may_take) if self.groups is None else self.groups.take_for(may_take, kind)
            )
            if request is not None:
                return request
        return None

    def next_worker(self) -> W | None:
        """Return the worker for the next request that is not a suspect, or None."""
        without = self._without_suspect.least()
        if not self._with_suspect.size:
            return without
        other = self._with_suspect.least()
        if without is None or other is None:
            return other if without is None else without
        if without.load != other.load:
            return without if without.load < other.load else other
        if without.warm != other.warm:
            return without if without.warm else other
        return without if (without.pooled > other.pooled) is without.warm else other  # C21

    def idle_worker(self) -> W | None:
        """Return a worker with free credit that holds no request, or None."""
        worker = self._without_suspect.least()
        return worker if worker is not None and not worker.load else None

    def next_pair(self, now: float) -> tuple[R, W] | None:
        """Remove the next request from its queue; return it with its worker, or None if none can be dispatched."""
        if self.groups is not None:
            return self._next_in_turn(self.groups, now)
        if self.suspects.size:
            worker = self._without_suspect.least()  # if it dies, only one of the two suspects may be to blame
            if worker is not None:
                return self.suspects.take(), worker
        if self.queue.size or self.pinned.size:
            worker = self.next_worker()
            if worker is not None:
                return self._next_queue().take(), worker
        return None

    def _next_queue(self) -> FairQueue[R]:
        """Return the one of `queue` and `pinned` from which the next request is taken; they take turns."""
        if not self.pinned.size:
            return self.queue
        self._pinned_next = not self._pinned_next
        return self.queue if self.queue.size and self._pinned_next else self.pinned

    def _next_in_turn(self, groups: Groups[R], now: float) -> tuple[R, W] | None:
        """Do what `next_pair` does if groups take turns."""
        groups.arrived = 0
        worker, clean = self.next_worker(), self._without_suspect.least()
        if worker is None or not groups.is_open(now):
            return None
        if clean is not None and (request := groups.take(SUSPECT, now)) is not None:
            return request, clean
        self._pinned_next = not self._pinned_next
        first, second = (PINNED, QUEUED) if self._pinned_next else (QUEUED, PINNED)
        request = groups.take(first, now) or groups.take(second, now)
        return None if request is None else (request, worker)

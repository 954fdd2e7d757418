"""The limits of a service, and the groups of its requests.

A request may name a *group*, such as a tenant.  Groups take turns, and in each of them clients do (C20).  A group of
which nothing runs takes its first turn before those that had one: its one call need not wait for theirs.  A request
that may not start, because of the limit of its service or of its group, waits in its queue and costs nothing until it
may: its group is *parked*, and a timer or the end of a running request brings it back.

A rate is a generic cell rate algorithm (GCRA), which needs one number: the time at which the next request would start
if all came at the rate.  A request starts when it is sent to a worker of this broker, and has used its start even if it
comes back (C17).

No frames, no clock.  Every operation takes constant time, whatever the number of groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import nlargest
from itertools import chain, islice
from typing import Any, Final, Generic

from ....service_limits import NO_LIMITS, Limit, ServiceLimits
from ....timers import NEVER, LinkedList, Node, TimerNode, Timers
from .fair_queue import MAX_CLIENTS, FairQueue, R, Tally

MAX_GROUPS: Final = 1_000_000
"""Maximum number of groups in a broker, of all services together."""
UNLIMITED: Final = 1 << 60
MAX_FRESH: Final = 8
"""How many groups in a row may take their first turn before the others."""
RESOLUTION: Final = 0.001
"""Maximum delay of a start, in seconds."""
SUSPECT: Final = 0
QUEUED: Final = 1
PINNED: Final = 2
KINDS: Final = 3
"""The kinds of requests that wait, each in a queue of its own: see `Schedule`."""

ROUNDING: Final = 1e-6
"""Seconds by which a request may start early: sums of intervals are not exact, and a burst starts as a whole."""


class Throttling:
    """State of the groups of all services: when requests of them may start, and how many groups there are."""

    __slots__ = ("groups", "wakes")

    def __init__(self) -> None:
        self.groups = 0
        self.wakes: Timers[Gate] = Timers(RESOLUTION)


class Gate(TimerNode):
    """Lets requests start within a limit."""

    __slots__ = ("_at_once", "_interval", "_tolerance", "running", "tat")

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.tat = -math.inf
        """The theoretical arrival time of the next request: when it would start if all came at the rate."""
        self._at_once = UNLIMITED
        self._interval = 0.0
        self._tolerance = 0.0

    def keep(self, limit: Limit, now: float) -> None:
        """Let requests start within `limit` from now on."""
        self._at_once = UNLIMITED if limit.concurrency is None else limit.concurrency
        self._interval = limit.interval
        self._tolerance = (limit.at_once - 1) * self._interval + ROUNDING
        self.tat = min(self.tat, now + self._tolerance + self._interval) if self._interval else -math.inf

    def opens(self) -> float:
        """Return when the next request may start; `NEVER` if one that runs must end first."""
        return NEVER if self.running >= self._at_once else self.tat - self._tolerance

    def opens_after(self, count: int, now: float) -> float:
        """Return in how many seconds a request may start behind `count` others; 0 if that is unknown."""
        if not self._interval:
            return 0.0
        return max(max(self.tat, now) - self._tolerance + count * self._interval - now, 0.0)

    def blocks(self, ahead: int, now: float) -> bool:
        """Return whether a request must wait once `ahead` others have started."""
        return self.running + ahead >= self._at_once or self.opens_after(ahead, now) > 0

    def start(self, now: float) -> None:
        """Count a request that starts."""
        self.running += 1
        if self._interval:
            self.tat = max(self.tat, now) + self._interval

    @property
    def rested(self) -> bool:
        """Whether it is as if nothing had ever started."""
        return not self.running and self.tat == -math.inf


class Lane(Node, Generic[R]):
    """The requests of one kind in one group."""

    __slots__ = ("group", "queue", "turns")

    def __init__(self, group: Group[R], queue: FairQueue[R]) -> None:
        super().__init__()
        self.group = group
        self.queue = queue
        self.turns: LinkedList[Lane[R]] | None = None
        """Where it takes its turns: None if it has no requests, or its group is parked."""


def _unlist(lane: Lane[Any]) -> None:
    if lane.turns is not None:
        lane.turns.remove(lane)
        lane.turns = None


class Group(Gate, Generic[R]):
    """The requests of one group that wait, and how many of them run."""

    __slots__ = ("groups", "lanes", "name", "parked")

    def __init__(self, groups: Groups[R], name: str) -> None:
        super().__init__()
        self.groups = groups
        self.name = name
        self.lanes: list[Lane[R] | None] = [None] * KINDS
        self.parked = False
        """Whether its requests wait until one may start."""

    @property
    def waiting(self) -> int:
        """Number of its requests that wait."""
        return sum([lane.queue.size for lane in self.lanes if lane is not None])

    @property
    def empty(self) -> bool:
        """Whether no request of it is in a queue, not even of a client that is gone."""
        return sum([lane.queue.total for lane in self.lanes if lane is not None]) == 0


class Groups(Gate, Generic[R]):
    """The groups of a service, whose limit it keeps as well.

    The requests without a group are in one, which has no name and the queues in `own`.
    """

    __slots__ = (
        "_fresh",
        "_fresh_in_a_row",
        "_own",
        "_parked",
        "_tally",
        "_throttling",
        "_turns",
        "arrived",
        "by_name",
        "limits",
        "service",
    )

    def __init__(self, service: bytes, own: tuple[FairQueue[R], ...], tally: Tally, throttling: Throttling) -> None:
        super().__init__()
        self.service = service
        """The name of the service."""
        self.limits = NO_LIMITS
        self.by_name: dict[str, Group[R]] = {}
        """The groups of which anything is to be known: one that waits, one that runs, or when the next may start."""
        self.arrived = 0
        """How many requests were accepted in this turn that need not wait, but have not started yet."""
        self._own = own
        self._tally = tally
        self._throttling = throttling
        self._turns: list[LinkedList[Lane[R]]] = [LinkedList() for _ in range(KINDS)]
        self._fresh: list[LinkedList[Lane[R]]] = [LinkedList() for _ in range(KINDS)]
        """Those of which nothing runs, for their first turn."""
        self._fresh_in_a_row = 0
        self._parked: dict[Group[R], None] = {}
        for kind, queue in enumerate(own):
            if queue.total:
                self._list(self._lane("", kind), kind)

    # ── the queues ───────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, request: R, kind: int) -> None:
        """Add `request` after the others of its client and group."""
        lane = self._lane(request.options.group, kind)
        lane.queue.append(request)
        self._list(lane, kind)

    def prepend(self, request: R, kind: int) -> None:
        """Add `request` before all others (C17)."""
        lane = self._lane(request.options.group, kind)
        lane.queue.prepend(request)
        self._unpark(lane.group)
        _unlist(lane)
        lane.turns = self._fresh[kind]
        lane.turns.prepend(lane)

    def _lane(self, name: str, kind: int) -> Lane[R]:
        """Return where a request goes that is about to be added."""
        group = self.group(name)
        if not group.parked:
            self._throttling.wakes.clear(group)
        lane = group.lanes[kind]
        if lane is None:
            lane = group.lanes[kind] = Lane(group, FairQueue(self._tally) if name else self._own[kind])
        return lane

    def group(self, name: str) -> Group[R]:
        """Return the group of that name, which is known from now on."""
        group = self.by_name.get(name)
        if group is None:
            group = self.by_name[name] = Group(self, name)
            group.keep(self.limits.group, -math.inf)
            self._throttling.groups += 1
        return group

    def _list(self, lane: Lane[R], kind: int) -> None:
        if lane.turns is None and not lane.group.parked:
            lane.turns = self._turns[kind] if lane.group.running else self._fresh[kind]
            lane.turns.append(lane)

    def remove(self, request: R, kind: int) -> None:
        """Remove `request`, which waits."""
        group = self.by_name[request.options.group]
        lane = group.lanes[kind]
        assert lane is not None  # noqa: S101 - the request is in it
        lane.queue.remove(request)
        self._removed(lane)

    def _removed(self, lane: Lane[R]) -> None:
        if not lane.queue.size:
            _unlist(lane)
        if lane.group.empty:
            self._rest(lane.group)

    def take(self, kind: int, now: float) -> R | None:
        """Remove and return the next request of that kind that may start; None if there is none.

        Its group takes its next turn after all others.
        """
        while (lane := self._next(kind)) is not None:
            if not lane.queue.size:  # its client is gone
                _unlist(lane)
                continue
            opens = lane.group.opens()
            if opens > now:
                self._park(lane.group, opens)
                continue
            self._fresh_in_a_row = 0 if lane.turns is self._turns[kind] else self._fresh_in_a_row + 1
            _unlist(lane)
            lane.turns = self._turns[kind]
            lane.turns.append(lane)
            request = lane.queue.take()
            self._removed(lane)
            return request
        return None

    def _next(self, kind: int) -> Lane[R] | None:
        """Return the lane whose turn it is."""
        fresh, other = self._fresh[kind].first, self._turns[kind].first
        if fresh is None or (other is not None and self._fresh_in_a_row >= MAX_FRESH):
            return other
        return fresh

    def take_for(self, may_take: Callable[[R], bool], kind: int) -> R | None:
        """Remove and return the next request of that kind that another broker may take; None if there is none."""
        for lane in islice(chain(self._fresh[kind], self._turns[kind]), MAX_CLIENTS):
            request = lane.queue.take_for(may_take)
            if request is not None:
                self._removed(lane)
                return request
        return None

    def waiting_queues(self) -> Iterator[FairQueue[R]]:
        """Yield the queues in which requests wait: suspects first, and parked groups last."""
        for kind in (SUSPECT, PINNED, QUEUED):
            for turns in (self._fresh[kind], self._turns[kind]):
                for lane in turns:
                    yield lane.queue
        for group in self._parked:
            for parked in group.lanes:
                if parked is not None:
                    yield parked.queue

    # ── the limits ───────────────────────────────────────────────────────────────────────────────────────────────────

    def limit(self, limits: ServiceLimits, now: float) -> None:
        """Let requests start within `limits` from now on."""
        self.limits = limits
        self.keep(limits.service, now)
        for group in list(self.by_name.values()):
            group.keep(limits.group, now)
            self._unpark(group)

    def is_open(self, now: float) -> bool:
        """Return whether the service's own limit lets a request start; if not, it is looked at again in time."""
        opens = self.opens()
        if opens <= now:
            return True
        self._throttling.wakes.clear(self)
        if opens < NEVER:
            self._throttling.wakes.set(self, opens)
        return False

    def holds_back(self, name: str, now: float) -> bool:
        """Return whether a limit keeps another request of that group from starting now."""
        group = self.by_name.get(name)
        if group is not None and group.blocks(min(group.waiting, self.arrived), now):
            return True
        return self.blocks(self.arrived, now)

    def waits(self, name: str) -> bool:
        """Return whether requests of that group wait."""
        group = self.by_name.get(name)
        return group is not None and group.waiting > 0

    def starts_after(self, name: str, now: float) -> float:
        """Return in how many seconds another request of that group could start; 0 if that is unknown."""
        group = self.by_name.get(name)
        own = 0.0 if group is None else group.opens_after(group.waiting, now)
        return max(self.opens_after(self._tally.waiting, now), own)

    def held_back(self, now: float) -> int:
        """Return how many requests wait because of a limit.  With very many groups, only some of them count."""
        if self.opens() > now:
            return self._tally.waiting
        return sum(group.waiting for group in islice(self._parked, MAX_CLIENTS))

    def most_waiting(self, most: int) -> list[Group[R]]:
        """Return the groups with the most requests that wait.  With very many groups, only some of them count."""
        return nlargest(most, islice(self.by_name.values(), MAX_CLIENTS), key=lambda group: group.waiting)

    def started(self, name: str, now: float) -> Group[R]:
        """Count a request of that group that starts; return the group."""
        group = self.group(name)
        self._throttling.wakes.clear(group)
        group.start(now)
        self.start(now)
        return group

    def ended(self, group: Group[R]) -> None:
        """Take in that a request of `group` runs no longer."""
        self.running -= 1
        group.running -= 1
        if group.parked:
            self._unpark(group)
        elif group.empty:
            self._rest(group)

    def wake(self, gate: Gate, now: float) -> None:
        """Take in that `gate`, which is one of these groups or the service's own, was to be looked at again."""
        if isinstance(gate, Group):
            if gate.parked:
                self._unpark(gate)
            else:
                gate.tat = -math.inf
                self._rest(gate)
        elif gate.tat <= now:
            gate.tat = -math.inf

    def may_be_forgotten(self) -> bool:
        """Return whether nothing would be lost with the service, which has neither workers nor requests."""
        if self.tat > -math.inf and self.bucket is None:
            self._throttling.wakes.set(self, self.tat)
        return self.rested and not self.by_name

    def _park(self, group: Group[R], opens: float) -> None:
        for lane in group.lanes:
            if lane is not None:
                _unlist(lane)
        group.parked = True
        self._parked[group] = None
        if opens < NEVER:
            self._throttling.wakes.set(group, opens)

    def _unpark(self, group: Group[R]) -> None:
        if group.parked:
            self._throttling.wakes.clear(group)
            group.parked = False
            del self._parked[group]
            for kind, lane in enumerate(group.lanes):
                if lane is not None and lane.queue.size:
                    self._list(lane, kind)

    def _rest(self, group: Group[R]) -> None:
        """Forget a group of which nothing waits, or see to it that it is forgotten in time."""
        if group.parked:
            group.parked = False
            del self._parked[group]
        self._throttling.wakes.clear(group)
        if group.rested:
            del self.by_name[group.name]
            self._throttling.groups -= 1
        elif not group.running:
            self._throttling.wakes.set(group, group.tat)

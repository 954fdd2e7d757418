"""Lists and timers of nodes, each of which can be removed in constant time; and alarms.

The nodes of a `LinkedList` are the listed objects themselves.

`Timers` set and clear a node in constant time, and find what is due without a scan.  Nodes that are due within the same
interval of `resolution` seconds share a bucket, and only buckets are ordered.  A node comes up at the end of its
bucket: at most `resolution` late, and never early.

`Alarms`, of a machine or a loop, know what is due next without asking: whatever has something to do sets its own
`Alarm`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar, cast

NEVER: Final = 1e300
"""Seconds; later than any clock reading, and finite, so that it can be reckoned with."""
MAX_STALE_NUMBERS: Final = 64
"""Minimum number of stale bucket numbers in the heap before it is rebuilt, so that rebuilding costs little."""


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Node:
    """An object that can be in one `LinkedList` at a time."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Node | None = None
        self.after: Node | None = None


N = TypeVar("N", bound=Node)


class LinkedList(Generic[N]):
    """Nodes in order.  Every operation takes constant time."""

    __slots__ = ("first", "last", "size")

    def __init__(self) -> None:
        self.first: N | None = None
        self.last: N | None = None
        self.size = 0

    def append(self, node: N) -> None:
        """Add `node`, which is in no list, at the end."""
        last = self.last
        if last is None:
            self.first = node
        else:
            last.after = node
            node.before = last
        self.last = node
        self.size += 1

    def prepend(self, node: N) -> None:
        """Add `node`, which is in no list, at the front."""
        first = self.first
        if first is None:
            self.last = node
        else:
            first.before = node
            node.after = first
        self.first = node
        self.size += 1

    def remove(self, node: N) -> None:
        """Remove `node`, which is in this list."""
        before, after = node.before, node.after
        if before is None:
            self.first = cast("N | None", after)
        else:
            before.after = after
            node.before = None
        if after is None:
            self.last = cast("N | None", before)
        else:
            after.before = before
            node.after = None
        self.size -= 1

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[N]:
        node = self.first
        while node is not None:
            after = node.after  # read first, since the caller may remove `node`
            yield node
            node = cast("N | None", after)


# ── timers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class TimerNode(Node):
    """A node that can be in one `Timers` at a time, and in one `LinkedList`."""

    __slots__ = ("bucket", "later", "sooner")

    def __init__(self) -> None:
        self.before = None
        self.after = None
        self.bucket: Bucket | None = None
        """The bucket that it is in; None if it is in no `Timers`."""
        self.sooner: TimerNode | None = None
        self.later: TimerNode | None = None


class Bucket:
    """The nodes that are due in the same interval, in the order in which they were set."""

    __slots__ = ("first", "last", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.first: TimerNode | None = None
        self.last: TimerNode | None = None


T = TypeVar("T", bound=TimerNode)


class Timers(Generic[T]):
    """The due times of nodes of one type."""

    __slots__ = ("_buckets", "_order", "_resolution", "alarm")

    def __init__(self, resolution: float) -> None:
        self.alarm: Alarm | None = None
        """Set to the due time of the first node, or of one that was cleared, until `pop_due` corrects it."""
        self._resolution = resolution
        self._buckets: dict[int, Bucket] = {}
        # A heap of the numbers of the buckets, and of some that no longer exist.
        self._order: list[int] = []

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._buckets)

    def set(self, node: T, due: float) -> None:
        """Set the due time of `node`, which has none."""
        number = int(due / self._resolution) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket(number)
            heapq.heappush(self._order, number)
            if self._order[0] == number and self.alarm is not None:
                self.alarm.set(number * self._resolution)
        last = bucket.last
        if last is None:
            bucket.first = node
        else:
            last.later = node
            node.sooner = last
        bucket.last = node
        node.bucket = bucket

    def clear(self, node: T) -> None:
        """Clear the due time of `node`, if it has one."""
        bucket = node.bucket
        if bucket is None:
            return
        sooner, later = node.sooner, node.later
        if sooner is None:
            bucket.first = later
        else:
            sooner.later = later
            node.sooner = None
        if later is None:
            bucket.last = sooner
        else:
            later.sooner = sooner
            node.later = None
        node.bucket = None
        if bucket.first is None and self._buckets.get(bucket.number) is bucket:
            # Its time may be years ahead, so nothing of it is kept.
            del self._buckets[bucket.number]
            if not self._buckets:
                self._order.clear()
                if self.alarm is not None:
                    self.alarm.set(math.inf)
            if len(self._order) > 2 * len(self._buckets) + MAX_STALE_NUMBERS:
                self._order = list(self._buckets)
                heapq.heapify(self._order)

    def pop_due(self, now: float) -> Iterator[T]:
        """Yield each node that is due, cleared.  The caller may set and clear others in the meantime."""
        while self._order and self._order[0] * self._resolution <= now:
            bucket = self._buckets.get(self._order[0])
            if bucket is None or bucket.first is None:
                heapq.heappop(self._order)
            else:  # one at a time, so that the others stay if the caller does not go on
                node = bucket.first
                self.clear(node)  # type: ignore[arg-type]  # only such things are put in
                yield node  # type: ignore[misc]
        if self.alarm is not None:
            due = self.next_due()
            self.alarm.set(math.inf if due is None else due)

    def next_due(self) -> float | None:
        """Return the next time at which `pop_due` yields a node, or None."""
        while self._order and self._order[0] not in self._buckets:
            heapq.heappop(self._order)
        return self._order[0] * self._resolution if self._order else None


# ── alarms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Alarm:
    """The time at which one `action` is due.

    It stays due until it is set to another time: the action sets it again.
    """

    __slots__ = ("_alarms", "action", "due")

    def __init__(self, alarms: Alarms, action: Callable[[float], object] | None) -> None:
        self._alarms = alarms
        self.action = action
        """Called with the time."""
        self.due = math.inf
        """When it is due; inf for never.  Read it, and call `set`."""

    def set(self, due: float) -> None:
        """Make it due at that time instead of another."""
        before, self.due, alarms = self.due, due, self._alarms
        if due <= alarms.due:
            alarms.due = due
        elif before <= alarms.due:
            alarms.find()


class Alarms:
    """All alarms of one machine, or of one loop.  There are few, and they seldom move."""

    __slots__ = ("_all", "due")

    def __init__(self) -> None:
        self.due = math.inf
        """When the next one is due; inf if none is."""
        self._all: list[Alarm] = []

    def add(self, action: Callable[[float], object] | None = None) -> Alarm:
        """Return one more alarm, which is not due yet.  Without an action, it only tells that something is due."""
        alarm = Alarm(self, action)
        self._all.append(alarm)
        return alarm

    def find(self) -> None:
        """Find out which is next, since the next one has moved to a later time."""
        self.due = min([alarm.due for alarm in self._all])

    def run(self, now: float) -> None:
        """Do what is due, in the order in which the alarms were added."""
        for alarm in self._all:
            if alarm.due <= now and alarm.action is not None:
                alarm.action(now)

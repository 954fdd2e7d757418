"""Due times for any number of things: O(1) to set and to clear, and what is due comes without a scan.

Things due within the same `grain` of time share a bucket; only buckets are ordered.  A thing comes up at the end of its
bucket, so at most one grain late and never early.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from .linked_lists import Node

SLACK: Final = 64
"""Numbers of buckets that are gone: at most so many more of them than of buckets, so that tidying up costs little."""


class TimerNode(Node):
    """A thing that can be in one `Timers` at a time, and in a `LinkedList` besides.

    (`registry.Request` sets these attributes itself: one is made for each request.)
    """

    __slots__ = ("bucket", "later", "sooner")

    def __init__(self) -> None:
        self.before = None
        self.after = None
        self.bucket: Bucket | None = None
        """What is due when it is; None if it is in no `Timers`."""
        self.sooner: TimerNode | None = None
        self.later: TimerNode | None = None


class Bucket:
    """What is due in the same grain of time, in the order in which it was set."""

    __slots__ = ("first", "last", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.first: TimerNode | None = None
        self.last: TimerNode | None = None


T = TypeVar("T", bound=TimerNode)


class Timers(Generic[T]):
    """The due times of things of one sort."""

    __slots__ = ("_buckets", "_grain", "_order")

    def __init__(self, grain: float) -> None:
        self._grain = grain
        self._buckets: dict[int, Bucket] = {}
        # A heap of their numbers, and some of buckets that are gone.
        self._order: list[int] = []

    def __len__(self) -> int:
        """How many buckets there are."""
        return len(self._buckets)

    def set(self, thing: T, due: float) -> None:
        """Have `thing`, which has no due time now, come up at `due`."""
        number = int(due / self._grain) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket(number)
            heapq.heappush(self._order, number)
        last = bucket.last
        if last is None:
            bucket.first = thing
        else:
            last.later = thing
            thing.sooner = last
        bucket.last = thing
        thing.bucket = bucket

    def clear(self, thing: T) -> None:
        """Forget `thing`'s due time, if it has one."""
        bucket = thing.bucket
        if bucket is None:
            return
        sooner, later = thing.sooner, thing.later
        if sooner is None:
            bucket.first = later
        else:
            sooner.later = later
            thing.sooner = None
        if later is None:
            bucket.last = sooner
        else:
            later.sooner = sooner
            thing.later = None
        thing.bucket = None
        if bucket.first is None and self._buckets.get(bucket.number) is bucket:
            # Its time may be years off: nothing of it is kept until then.
            del self._buckets[bucket.number]
            if len(self._order) > 2 * len(self._buckets) + SLACK:
                self._order = list(self._buckets)
                heapq.heapify(self._order)

    def pop_due(self, now: float) -> Iterator[T]:
        """Each thing whose time has come, taken out.  The caller may set and clear others meanwhile."""
        while self._order and self._order[0] * self._grain <= now:
            bucket = self._buckets.get(self._order[0])
            if bucket is None or bucket.first is None:
                heapq.heappop(self._order)
            else:  # one at a time, so that the others stay if the caller does not go on
                thing = bucket.first
                self.clear(thing)  # type: ignore[arg-type]  # only such things are put in
                yield thing  # type: ignore[misc]

    def next_due(self) -> float | None:
        """When `pop_due` next has something to do, or None."""
        while self._order and self._order[0] not in self._buckets:
            heapq.heappop(self._order)
        return self._order[0] * self._grain if self._order else None

"""Due times for any number of things: O(1) to set and to clear, and what is due comes without a scan.

Things due within the same `grain` of time share a bucket; only buckets are ordered.  A thing comes up at the end of its
bucket, so at most one grain late and never early.
"""

import heapq
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

SLACK: Final = 64
"""Numbers of buckets that are gone: at most so many more of them than of buckets, so that tidying up costs little."""


class Timed(Protocol):
    """A thing that can be in one `Timers` at a time; 0 in `bucket` means it is in none."""

    bucket: int


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """The due times of things of one sort."""

    __slots__ = ("_buckets", "_grain", "_latest", "_order")

    def __init__(self, grain: float) -> None:
        self._grain = grain
        self._latest = 0
        # A dict is used as a set that keeps its order: the same run gives the same order again.
        self._buckets: dict[int, dict[T, None]] = {}
        # A heap of their numbers, and some of buckets that are gone.
        self._order: list[int] = []

    def set(self, thing: T, due: float) -> None:
        """Have `thing`, which has no due time now, come up at `due`."""
        number = int(due / self._grain) + 1
        if number == self._latest:
            number = self._latest  # one copy of the number for all: many may wait
        self._latest = number
        thing.bucket = number
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = {thing: None}
            heapq.heappush(self._order, number)
        else:
            bucket[thing] = None

    def clear(self, thing: T) -> None:
        """Forget `thing`'s due time, if it has one."""
        bucket = self._buckets.get(thing.bucket)
        if bucket is not None:
            bucket.pop(thing, None)
            if not bucket:
                # Its time may be years off: nothing of it is kept until then.
                del self._buckets[thing.bucket]
                if len(self._order) > 2 * len(self._buckets) + SLACK:
                    self._order = list(self._buckets)
                    heapq.heapify(self._order)
        thing.bucket = 0

    def pop_due(self, now: float) -> Iterator[T]:
        """Each thing whose time has come, taken out.  The caller may set and clear others meanwhile."""
        while self._order and self._order[0] * self._grain <= now:
            number = heapq.heappop(self._order)
            for thing in self._buckets.pop(number, ()):
                if thing.bucket == number:  # else it was cleared while the ones before it were dealt with
                    thing.bucket = 0
                    yield thing

    def next_due(self) -> float | None:
        """When `pop_due` next has something to do, or None."""
        while self._order and self._order[0] not in self._buckets:
            heapq.heappop(self._order)
        return self._order[0] * self._grain if self._order else None

"""Counts of each service: requests, times, bytes (`mmi.metrics`, docs/how-to/operations.md).

The counts of a service outlive it, so that the totals never decrease: those of the services that were forgotten last
are kept by name, those of all others in `Metrics.others`.
"""

from bisect import bisect_right
from collections import Counter
from typing import Any, Final

from ...histogram import Histogram

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BOUNDS: list[float] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
]  # fmt: skip
"""Upper bounds of the buckets of a histogram, in seconds, themselves not included.  The last bucket has none."""
TICKS_PER_SECOND: Final = 2000
"""Resolution of `BUCKETS`: all bounds are multiples of half a millisecond."""
BUCKETS: Final[bytes] = bytes(bisect_right(BOUNDS, tick / TICKS_PER_SECOND) for tick in range(TICKS_PER_SECOND))
"""The bucket of each time below a second, in ticks: compiled, one look-up, where a search calls Python."""
MAX_FORGOTTEN: Final = 1000
"""Services that are gone and whose counts are still kept by name."""
MAX_CODES: Final = 32
"""Different codes that are counted for one service.  Those of handlers beyond that count as `OTHER_CODE`."""
OTHER_CODE: Final = "other"
OK: Final = "ok"


def bucket_of(seconds: float) -> int:
    """Return the bucket of a time."""
    ticks = int(seconds * TICKS_PER_SECOND)
    return BUCKETS[ticks] if ticks < TICKS_PER_SECOND else bisect_right(BOUNDS, seconds)


def no_times() -> Histogram:
    """Return a histogram of times, with nothing in it yet."""
    return Histogram([0] * (len(BOUNDS) + 1))


def _told(times: Histogram) -> dict[str, Any]:
    return {"buckets": times.trimmed(), "seconds": round(times.total, 6)}


class ServiceMetrics:
    """The counts of one service since the broker started."""

    __slots__ = (
        "at_worker", "in_queue", "name", "other", "redispatched", "reply_bytes", "request_bytes", "served", "throttled",
    )  # fmt: skip

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.other: Counter[str] = Counter()
        """Requests that ended otherwise: by code, or by reason if there is none."""
        self.in_queue = no_times()
        """Times from when a request was accepted, or came back, until it was sent to a worker, if that was not in the
        same turn of the broker."""
        self.at_worker = no_times()
        """Times from then until the FINAL, of the requests that were answered with one."""
        self.redispatched = 0
        """Requests that came back from a worker and were queued again."""
        self.throttled = 0
        """Requests that could not start at once, because of a limit."""
        self.request_bytes = 0
        """Bytes of the bodies that were sent to workers."""
        self.reply_bytes = 0
        """Bytes of the bodies that were sent to clients."""
        self.served = False
        """Whether the service has had a worker.  Until then, nothing is counted here, but in `Metrics.others`."""

    def ended(self, outcome: str) -> None:
        """Count a request that was not answered with a FINAL."""
        if outcome not in self.other and len(self.other) >= MAX_CODES:
            outcome = OTHER_CODE
        self.other[outcome] += 1

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        return not (self.other or self.request_bytes or self.in_queue.count or self.at_worker.count)

    def add_all(self, other: "ServiceMetrics") -> None:
        """Add the counts of another service."""
        for outcome, count in other.other.items():
            if outcome not in self.other and len(self.other) >= MAX_CODES:
                outcome = OTHER_CODE  # noqa: PLW2901 - as in `ended`
            self.other[outcome] += count
        self.in_queue.add_all(other.in_queue)
        self.at_worker.add_all(other.at_worker)
        self.redispatched += other.redispatched
        self.throttled += other.throttled
        self.request_bytes += other.request_bytes
        self.reply_bytes += other.reply_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name, ready for JSON."""
        ok = self.at_worker.count
        return {
            "outcomes": {OK: ok, **self.other} if ok else dict(self.other),
            "queue_seconds": _told(self.in_queue),
            "worker_seconds": _told(self.at_worker),
            "redispatched": self.redispatched,
            "throttled": self.throttled,
            "request_bytes": self.request_bytes,
            "reply_bytes": self.reply_bytes,
            "served": self.served,
        }


UNCOUNTED: Final = ServiceMetrics(b"")
"""The counts of requests that the broker itself answers; they are not shown."""


class Metrics:
    """The counts of all services."""

    def __init__(self) -> None:
        self.bounds = BOUNDS
        self.by_name: dict[bytes, ServiceMetrics] = {}
        """The counts of services that exist, and of the last `MAX_FORGOTTEN` that are gone."""
        self.others = ServiceMetrics(b"")
        """The counts of all other names: services that are long gone, and names that never had a worker."""
        self._forgotten: dict[bytes, None] = {}
        self._names: list[bytes] | None = None
        """The names in order, if they have not changed since they were asked for."""

    def of(self, name: bytes) -> ServiceMetrics:
        """Return the counts of a service that now exists."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = ServiceMetrics(name)
            self._names = None
        else:
            self._forgotten.pop(name, None)
        return found

    def forget(self, name: bytes) -> None:
        """Record that a service is gone."""
        gone = self.by_name.get(name)
        if gone is None:
            return
        if gone.empty:
            del self.by_name[name]
            self._names = None
            return
        self._forgotten[name] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            oldest = next(iter(self._forgotten))
            del self._forgotten[oldest]
            self._names = None
            self.others.add_all(self.by_name.pop(oldest))

    def page(self, after: bytes, count: int) -> list[ServiceMetrics]:
        """Return the counts of up to `count` services whose names are greater than `after`, in their order."""
        if self._names is None:
            self._names = sorted(self.by_name)
        first = bisect_right(self._names, after)
        return [self.by_name[name] for name in self._names[first : first + count]]

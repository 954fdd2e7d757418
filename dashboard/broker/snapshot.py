"""The state of a broker at one moment, and the change between two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from ...mdp.histogram import Histogram, sum_of, times_in

OK: Final = "ok"
NOTHING: Final[Mapping[str, Any]] = {
    "name": "", "workers": 0, "idle": 0, "credit": 0, "running": 0, "queued": 0, "limits": {}, "held_back": 0,
    "oldest_seconds": 0.0,
    "outcomes": {}, "queue_seconds": {"buckets": [], "seconds": 0.0}, "worker_seconds": {"buckets": [], "seconds": 0.0},
    "redispatched": 0, "throttled": 0, "request_bytes": 0, "reply_bytes": 0, "served": False,
}  # fmt: skip
"""The row of a service for which nothing has been counted."""


@dataclass(frozen=True)
class Snapshot:
    """The answers of a broker.  `at` is the monotonic time at which they arrived."""

    at: float
    broker: Mapping[str, Any]
    stats: Mapping[str, Any]
    brokers: Mapping[str, Any]
    bounds: Sequence[float]
    services: Mapping[str, Mapping[str, Any]]
    """The rows of `mmi.metrics`, by name."""
    others: Mapping[str, Any] = field(default_factory=lambda: dict(NOTHING))
    """The counts of services that the broker has forgotten."""
    roles: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def in_queue(self) -> Histogram:
        """The times of all requests in queues."""
        return self._total("queue_seconds")

    @cached_property
    def at_worker(self) -> Histogram:
        """The times of all requests at workers."""
        return self._total("worker_seconds")

    @cached_property
    def outcomes(self) -> Mapping[str, int]:
        """Number of ended requests by outcome, for all services together."""
        total: dict[str, int] = {}
        for row in (*self.services.values(), self.others):
            for outcome, count in row["outcomes"].items():
                total[outcome] = total.get(outcome, 0) + count
        return total

    @property
    def connections(self) -> int:
        """Number of open connections."""
        counts = self.stats["connections"]
        return int(counts.get("accepted", 0) - counts.get("ended", 0))

    def _total(self, name: str) -> Histogram:
        return sum_of(times_in(row[name]) for row in (*self.services.values(), self.others))


@dataclass(frozen=True)
class Change:
    """The change between two snapshots, of one service or of all."""

    seconds: float
    outcomes: Mapping[str, int]
    at_worker: Histogram
    in_queue: Histogram

    @property
    def done(self) -> int:
        """Number of requests that ended."""
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        """Number of requests that ended without a FINAL."""
        return self.done - self.outcomes.get(OK, 0)

    @property
    def rate(self) -> float:
        """Requests that ended per second."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def error_rate(self) -> float:
        """Requests that failed per second."""
        return self.failed / self.seconds if self.seconds else 0.0


def change(before: Snapshot, after: Snapshot) -> Change:
    """Return the change of all services together."""
    return Change(
        after.at - before.at,
        _more(before.outcomes, after.outcomes),
        after.at_worker.since(before.at_worker),
        after.in_queue.since(before.in_queue),
    )


def change_of(before: Snapshot, after: Snapshot, name: str) -> Change:
    """Return the change of one service."""
    first, last = before.services.get(name, NOTHING), after.services.get(name, NOTHING)
    return Change(
        after.at - before.at,
        _more(first["outcomes"], last["outcomes"]),
        times_in(last["worker_seconds"]).since(times_in(first["worker_seconds"])),
        times_in(last["queue_seconds"]).since(times_in(first["queue_seconds"])),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the charts.  Times are in seconds, and None if no request was answered."""

    at: float
    rate: float
    errors: float
    queued: int
    running: int
    p50: float | None
    p99: float | None


def levels_of(snapshot: Snapshot) -> Mapping[str, int]:
    """Return how many requests were waiting, and how many were held by workers."""
    return {"queued": snapshot.stats["queued"], "running": snapshot.stats["running"]}


def point_between(before: Snapshot, after: Snapshot, highest: Mapping[str, int]) -> Point:
    """Return the point between two snapshots, with the highest levels that were seen in between."""
    done, bounds = change(before, after), after.bounds
    p50, p99 = (done.at_worker.quantile(share, bounds) for share in (0.5, 0.99))
    return Point(after.at, done.rate, done.error_rate, highest["queued"], highest["running"], p50, p99)


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    found = {outcome: max(count - before.get(outcome, 0), 0) for outcome, count in after.items()}
    return {outcome: count for outcome, count in found.items() if count}

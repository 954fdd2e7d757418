"""Rates and latencies of a service, from a broker's counters at two moments (`mmi.metrics`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....mdp.histogram import times_in

OK: Final = "ok"


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two moments."""

    seconds: float

    def rate(self, now: float, then: float = 0, *, digits: int = 1) -> float:
        """Return how much a count has grown per second; 0 if it is smaller, as after a restart."""
        return round(max(0, now - then) / self.seconds, digits) if self.seconds > 0 else 0.0


def service_rates(
    now: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None,
    bounds: Sequence[float],
    sent: int,
    interval: Interval,
) -> dict[str, Any]:
    """Return rates by outcome, and latencies of the interval, ready for JSON.

    Args:
        now: The row of the service in `mmi.metrics`; None if there is none: then all is None.
        before: The row at the beginning of the interval; None if there was none: then it counts from 0.
        bounds: The upper bounds of the buckets.
        sent: How many requests workers got in the interval.
        interval: Its length.
    """
    if now is None:
        names = ("outcomes_per_second", "errors_per_second", "worker_p50_seconds", "worker_p99_seconds")
        return dict.fromkeys((*names, "queue_p99_seconds"))
    old = before["outcomes"] if before is not None else {}
    grown = {outcome: max(0, count - old.get(outcome, 0)) for outcome, count in now["outcomes"].items()}
    at_worker, in_queue = (times_in(now[key]) for key in ("worker_seconds", "queue_seconds"))
    if before is not None:
        at_worker = at_worker.since(times_in(before["worker_seconds"]))
        in_queue = in_queue.since(times_in(before["queue_seconds"]))
    at_once = max(0, sent - in_queue.count)  # the broker does not count the requests that have not waited
    return {
        "outcomes_per_second": {outcome: interval.rate(count) for outcome, count in grown.items() if count},
        "errors_per_second": interval.rate(sum(count for outcome, count in grown.items() if outcome != OK)),
        "worker_p50_seconds": at_worker.quantile(0.5, bounds),
        "worker_p99_seconds": at_worker.quantile(0.99, bounds),
        "queue_p99_seconds": in_queue.quantile(0.99, bounds, at_once),
    }

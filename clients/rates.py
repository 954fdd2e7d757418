"""Rates and latencies of a service, from what a broker has counted at two moments (`mmi.metrics`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

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
    at_worker, in_queue = (_grown(now, before, key) for key in ("worker_seconds", "queue_seconds"))
    at_once = max(0, sent - sum(in_queue))  # the broker does not count the requests that have not waited
    return {
        "outcomes_per_second": {outcome: interval.rate(count) for outcome, count in grown.items() if count},
        "errors_per_second": interval.rate(sum(count for outcome, count in grown.items() if outcome != OK)),
        "worker_p50_seconds": quantile(0.5, at_worker, bounds),
        "worker_p99_seconds": quantile(0.99, at_worker, bounds),
        "queue_p99_seconds": quantile(0.99, in_queue, bounds, zeros=at_once),
    }


def quantile(share: float, buckets: Sequence[int], bounds: Sequence[float], *, zeros: int = 0) -> float | None:
    """Return the time that this share of all times does not exceed; None if there are none.

    Within a bucket it is interpolated, as Prometheus does; in the last one it is that bucket's lower bound.

    Args:
        share: From 0 to 1.
        buckets: How many times are in each bucket.
        bounds: Upper bounds of all buckets but the last.
        zeros: Further times, of 0.
    """
    total = zeros + sum(buckets)
    if not total:
        return None
    wanted, seen = share * total, zeros
    if wanted <= seen:
        return 0.0
    for index, count in enumerate(buckets):
        if count and seen + count >= wanted:
            lower = bounds[index - 1] if index else 0.0
            if index == len(bounds):
                return lower
            return round(lower + (bounds[index] - lower) * (wanted - seen) / count, 6)
        seen += count
    return bounds[-1]  # only if rounding is to blame


def _grown(now: Mapping[str, Any], before: Mapping[str, Any] | None, key: str) -> list[int]:
    """Return by how much each bucket has grown."""
    old = before[key]["buckets"] if before is not None else []
    return [max(0, count - then) for count, then in zip_longest(now[key]["buckets"], old, fillvalue=0)]

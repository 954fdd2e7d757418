"""Histograms: the number of values in each of several buckets with fixed bounds.

The owner of a histogram has its bounds.  Histograms can be sent as JSON, added up, compared with earlier ones, and
shown as quantiles.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Histogram:
    """The number of values in each bucket, and the sum of all values.

    Args:
        buckets: The number of values in each bucket.  There is one bucket more than there are bounds, for larger
            values; empty buckets at the end may be missing, unless values are added.
        total: The sum of all values.
    """

    __slots__ = ("buckets", "total")

    def __init__(self, buckets: list[int], total: float = 0.0) -> None:
        self.buckets = buckets
        self.total = total

    def add(self, bucket: int, value: float) -> None:
        """Count a value that belongs to a bucket."""
        self.buckets[bucket] += 1
        self.total += value

    def add_all(self, other: "Histogram") -> None:
        """Count all values of another histogram with the same bounds."""
        self.buckets.extend([0] * (len(other.buckets) - len(self.buckets)))
        for index, count in enumerate(other.buckets):
            self.buckets[index] += count
        self.total += other.total

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.buckets)

    def trimmed(self) -> list[int]:
        """Return the buckets without the empty ones at the end."""
        used = len(self.buckets)
        while used and not self.buckets[used - 1]:
            used -= 1
        return self.buckets[:used]

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return a histogram of the values since `earlier`; an empty one if the counts began anew."""
        size = max(len(self.buckets), len(earlier.buckets))
        more = [now - then for now, then in zip(_padded(self, size), _padded(earlier, size), strict=True)]
        if any(count < 0 for count in more):
            return Histogram([])
        return Histogram(more, max(self.total - earlier.total, 0.0))

    def quantile(self, share: float, bounds: Sequence[float], zeros: int = 0) -> float | None:
        """Return the value that this share of all values does not exceed; None if there are none.

        Within a bucket it is interpolated, as Prometheus does; in the last one it is that bucket's lower bound.

        Args:
            share: From 0 to 1.
            bounds: Upper bounds of all buckets but the last.
            zeros: Further values, of 0.
        """
        total = zeros + self.count
        if not total:
            return None
        wanted, seen = share * total, zeros
        if wanted <= seen:
            return 0.0
        for index, count in enumerate(self.buckets):
            if count and seen + count >= wanted:
                lower = bounds[index - 1] if index else 0.0
                if index == len(bounds):
                    return lower
                return round(lower + (bounds[index] - lower) * (wanted - seen) / count, 6)
            seen += count
        return bounds[-1]  # reached only through rounding

    def cumulative(self, bounds: Sequence[float]) -> list[tuple[str, float]]:
        """Return the buckets as Prometheus has them: each contains all smaller values too."""
        below, found = 0, []
        for bound, count in zip([*map(repr, map(float, bounds)), "+Inf"], _padded(self, len(bounds) + 1), strict=True):
            below += count
            found.append((bound, float(below)))
        return found


def times_in(told: Mapping[str, Any]) -> Histogram:
    """Return the histogram of times that a broker tells in `mmi.metrics`."""
    return Histogram(list(told["buckets"]), told["seconds"])


def sum_of(histograms: Iterable[Histogram]) -> Histogram:
    """Return one histogram of the values of all."""
    found = Histogram([])
    for each in histograms:
        found.add_all(each)
    return found


def _padded(histogram: Histogram, size: int) -> list[int]:
    return [*histogram.buckets, *([0] * (size - len(histogram.buckets)))]

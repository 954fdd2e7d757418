"""Histograms as `mmi.metrics` has them: their differences and quantiles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ..rates import quantile


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many times were how long.  `buckets` may lack empty ones at the end."""

    buckets: Sequence[int] = ()
    seconds: float = 0.0
    count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", sum(self.buckets))

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """Return the histogram that the broker told."""
        return cls(told["buckets"], told["seconds"])

    @classmethod
    def total(cls, histograms: Iterable["Histogram"]) -> Self:
        """Return the sum of histograms."""
        buckets: list[int] = []
        seconds = 0.0
        for each in histograms:
            buckets.extend([0] * (len(each.buckets) - len(buckets)))
            for index, count in enumerate(each.buckets):
                buckets[index] += count
            seconds += each.seconds
        return cls(buckets, seconds)

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return what was counted after `earlier`; nothing if the counts began anew."""
        before = [*earlier.buckets, *([0] * (len(self.buckets) - len(earlier.buckets)))]
        if len(earlier.buckets) > len(self.buckets) or any(b > a for a, b in zip(self.buckets, before, strict=True)):
            return Histogram()
        differences = [after - b for after, b in zip(self.buckets, before, strict=True)]
        return Histogram(differences, max(self.seconds - earlier.seconds, 0.0))

    def quantile(self, share: float, bounds: Sequence[float]) -> float | None:
        """Return the time that this share of all times does not exceed; None if there are none."""
        return quantile(share, self.buckets, bounds)

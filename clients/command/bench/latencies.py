"""Latency histograms like HDR's: any number of values in little memory, each accurate to one part in 128."""

from collections import Counter
from typing import Final

PRECISION_BITS: Final = 8
"""The leading bits of a value that are kept."""
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)


class Latencies:
    """Counts of durations in seconds, by value."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def record(self, seconds: float) -> None:
        """Add a value."""
        microseconds = max(0, round(seconds * 1e6))
        dropped = max(0, microseconds.bit_length() - PRECISION_BITS)
        self._counts[microseconds >> dropped << dropped] += 1
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)

    def percentile(self, percent: float) -> float:
        """Return the value, in seconds, that `percent` of all values do not exceed; 0 if there are none."""
        wanted, seen = self.count * percent / 100, 0
        for microseconds, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return microseconds / 1e6
        return 0.0

    @property
    def mean(self) -> float:
        """The mean, in seconds; 0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    def summary(self) -> dict[str, float]:
        """Return the mean, the percentiles and the maximum, in milliseconds, by name."""
        found = {"mean": self.mean, **{f"p{p:g}": self.percentile(p) for p in PERCENTILES}, "max": self.largest}
        return {name: round(seconds * 1000, 3) for name, seconds in found.items()}

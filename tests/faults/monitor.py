"""Samples what the processes of a soak use, and how long calls take."""

import resource
import statistics
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import children

from .programs import Program

PAGE_BYTES = resource.getpagesize()

SETTLED_SECONDS = 600.0
"""A process's memory is judged from this age on: until then, it fills its caches."""
JUDGED_SECONDS = 900.0
"""For how long it must have been watched since."""
MAX_SLOPE_PERCENT = 1.0
"""Per hour."""
STEP_BYTES = 1.25 * 2**20
"""Memory may be higher by one step of the allocators, however little is allocated: Python takes arenas of 1 MiB, and
malloc 128 KiB and more.  In an hour, this is 3 % of a process of 40 MB."""


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    at: float
    rss: int
    descriptors: int
    threads: int


@dataclass
class Series:
    """The samples of a process."""

    name: str
    usage: list[Usage] = field(default_factory=list)

    def growth(self, settled: float) -> float | None:
        """Return by how many bytes memory has grown after so many seconds, or None if there are too few samples.

        From the median of the first quarter of the samples to that of the last, so that peaks do not count.
        """
        used = self._settled(settled)
        quarter = len(used) // 4
        if not quarter:
            return None
        first, last = (statistics.median(each.rss for each in part) for part in (used[:quarter], used[-quarter:]))
        return last - first

    def slope(self, settled: float) -> float | None:
        """Return the same in percent per hour."""
        growth, used = self.growth(settled), self._settled(settled)
        if growth is None:
            return None
        between = 0.75 * (used[-1].at - used[0].at)
        return 100 * 3600 * growth / between / statistics.fmean(each.rss for each in used)

    def leaks(self) -> bool:
        """Return whether memory grows faster than is allowed, and by more than a step of the allocators."""
        growth, slope = self.growth(SETTLED_SECONDS), self.slope(SETTLED_SECONDS)
        if growth is None or slope is None or self.seconds < SETTLED_SECONDS + JUDGED_SECONDS:
            return False
        return growth > STEP_BYTES and slope > MAX_SLOPE_PERCENT

    def _settled(self, settled: float) -> list[Usage]:
        return [each for each in self.usage if each.at >= self.usage[0].at + settled]

    @property
    def seconds(self) -> float:
        """For how long it was watched."""
        return self.usage[-1].at - self.usage[0].at


@dataclass(frozen=True)
class Latency:
    """The durations of the calls of one kind that were answered between two samples."""

    at: float
    kind: str
    count: int
    p50: float
    p99: float


class Monitor:
    """Collects samples."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, int], Series] = {}
        """By name and process id: a program that is started again is another process."""
        self.latencies: list[Latency] = []
        self.database: list[tuple[float, int]] = []
        """The size of the database in bytes, by time."""

    def sample(self, now: float, programs: Iterable[Program]) -> None:
        """Measure each process, and its children by the name of their parent."""
        for program in programs:
            self._measure(now, program.name, program.pid)
            for child in children(program.pid):
                self._measure(now, f"{program.name}, process", child)

    def _measure(self, now: float, name: str, pid: int) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            process = Path(f"/proc/{pid}")
            pages = int((process / "statm").read_text().split()[1])
            counts = [len(list((process / folder).iterdir())) for folder in ("fd", "task")]
            self.series.setdefault((name, pid), Series(name)).usage.append(Usage(now, PAGE_BYTES * pages, *counts))

    def note_calls(self, now: float, took: Iterable[tuple[str, float]]) -> None:
        """Note how long calls took."""
        by_kind: dict[str, list[float]] = defaultdict(list)
        for kind, seconds in took:
            by_kind[kind].append(seconds)
        for kind, all_seconds in by_kind.items():
            ordered = sorted(all_seconds)
            p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
            self.latencies.append(Latency(now, kind, len(ordered), p50, p99))

    def leaks(self) -> list[str]:
        """Return the processes whose memory grows faster than is allowed."""
        return [
            f"{each.name} grows by {each.slope(SETTLED_SECONDS):.2f} % per hour"
            for each in self.series.values()
            if each.leaks()
        ]

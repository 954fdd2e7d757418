"""Charts as SVG: lines over the last hour, and histograms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ...mdp.histogram import Histogram
from .formats import number, seconds
from .timeline import SPAN_SECONDS, Moment

WIDTH: Final = 600
HEIGHT: Final = 120
SPANS: Final = ((300, "5 min"), (900, "15 min"), (1800, "30 min"), (SPAN_SECONDS, "1 h"))
"""The time axes to choose from: in seconds, and as text."""
GAP_STEPS: Final = 2.5
"""A line is interrupted where this many steps have no point."""


Point = TypeVar("Point", bound=Moment)


@dataclass(frozen=True)
class Line:
    """A line: the `d` of its path and of the area below it."""

    kind: str
    path: str
    area: str


@dataclass(frozen=True)
class Chart:
    """A chart of the last hour."""

    title: str
    current: str
    """The last value, as text."""
    top: str
    """The value at the upper edge."""
    lines: Sequence[Line]
    span: str
    """The length of the time axis, as text."""
    legend: Sequence[tuple[str, str]] = ()
    """The kind of each line, and its name."""

    @property
    def description(self) -> str:
        """The chart in words, for those who cannot see it."""
        return f"{self.title} in the last {self.span}: at most {self.top}, now {self.current}"


def chart(
    title: str,
    points: Sequence[Point],
    series: Sequence[tuple[str, str, Callable[[Point], float | None]]],
    *,
    now: float,
    step: float,
    show: Callable[[float | None], str] = number,
    current: str = "",
) -> Chart:
    """Return a chart of some series, each with its kind, its name and its value at a point."""
    values = [value for point in points for _, _, of in series if (value := of(point)) is not None]
    top = _round_up(max(values, default=0.0))
    age = now - points[0].at if points else 0.0
    span, called = next((each for each in SPANS if each[0] >= age), SPANS[-1])
    lines = [_line(kind, points, of, now, span, step, top) for kind, _, of in series]
    last = series[0][2](points[-1]) if points else None
    legend = [(kind, name) for kind, name, _ in series] if len(series) > 1 else []
    return Chart(title, current or show(last), show(top), lines, called, legend)


def _line(
    kind: str,
    points: Sequence[Point],
    of: Callable[[Point], float | None],
    now: float,
    span: float,
    step: float,
    top: float,
) -> Line:
    runs: list[list[tuple[float, float]]] = [[]]
    last_at = None
    for point in points:
        value = of(point)
        if value is None or (last_at is not None and point.at - last_at > GAP_STEPS * step):
            runs.append([])
        last_at = point.at
        if value is not None:
            x = WIDTH * (1 - (now - point.at) / span)
            runs[-1].append((max(x, 0.0), HEIGHT - (HEIGHT - 2) * min(value / top, 1.0)))
    paths, areas = [], []
    for run in runs:
        if not run:
            continue
        if len(run) == 1:
            run = [(max(run[0][0] - 2, 0), run[0][1]), run[0]]  # noqa: PLW2901 - a dot would not be seen
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
        paths.append(f"M{drawn}")
        areas.append(f"M{run[0][0]:.1f} {HEIGHT}L{drawn}L{run[-1][0]:.1f} {HEIGHT}Z")
    return Line(kind, "".join(paths), "".join(areas))


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 2.5, 5, 10, …"""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= value * (1 - 1e-9))


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram; `label` is its upper bound."""

    x: float
    y: float
    width: float
    height: float
    label: str
    title: str


def bars(histogram: Histogram, bounds: Sequence[float]) -> list[Bar]:
    """Return the bars of a histogram, from the first bucket that has a time to the last."""
    counts = list(histogram.buckets)
    used = [index for index, count in enumerate(counts) if count]
    if not used:
        return []
    first, last = max(used[0] - 1, 0), min(max(used[-1] + 1, used[0] + 5), len(bounds))
    counts += [0] * (last + 1 - len(counts))
    width, most = WIDTH / (last + 1 - first), max(counts)
    found = []
    for place, index in enumerate(range(first, last + 1)):
        height = (HEIGHT - 4) * counts[index] / most
        if counts[index]:
            height = max(height, 1.5)
        lower = seconds(bounds[index - 1]) if index else "0"
        between = f"{lower} to {seconds(bounds[index])}" if index < len(bounds) else f"more than {lower}"
        label = seconds(bounds[index]) if index < len(bounds) else f"> {lower}"
        share = counts[index] / histogram.count
        title = f"{between}: {number(counts[index])} requests ({100 * share:.1f} %)"
        found.append(Bar(place * width + 1, HEIGHT - height, width - 2, height, label, title))
    return found

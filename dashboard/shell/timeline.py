"""The points of the last hour, in bounded memory."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Generic, Protocol, TypeVar

SPAN_SECONDS: Final = 3600
STEP_SECONDS: Final = 10


class Moment(Protocol):
    """A sample, or a point of a chart."""

    @property
    def at(self) -> float:
        """The monotonic time."""
        ...


SampleT = TypeVar("SampleT", bound=Moment)
PointT = TypeVar("PointT")


class Timeline(Generic[SampleT, PointT]):
    """Points for the last hour, one for each step.

    Args:
        point: Returns the point of a step: from its first and its last sample, and the highest levels within it.
        levels: Returns the levels in a sample, such as the length of a queue.  Of each, the highest within a step is
            kept: short queues would be missed otherwise.
        span: How many seconds to keep.
        step: How many seconds a point stands for.
    """

    def __init__(
        self,
        point: Callable[[SampleT, SampleT, Mapping[str, int]], PointT],
        levels: Callable[[SampleT], Mapping[str, int]],
        *,
        span: float = SPAN_SECONDS,
        step: float = STEP_SECONDS,
    ) -> None:
        self.points: deque[PointT] = deque(maxlen=round(span / step))
        self.step = step
        self._point = point
        self._levels = levels
        self._last: SampleT | None = None
        self._highest: dict[str, int] = {}

    def add(self, sample: SampleT) -> None:
        """Take the next sample."""
        for name, level in self._levels(sample).items():
            self._highest[name] = max(self._highest.get(name, level), level)
        if self._last is None:
            self._last = sample
        elif sample.at - self._last.at >= self.step:
            self.points.append(self._point(self._last, sample, self._highest))
            self._last, self._highest = sample, {}

    def forget(self) -> None:
        """Start again: the counts have begun at 0 again."""
        self.points.clear()
        self._last = None

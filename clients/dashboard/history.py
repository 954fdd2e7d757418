"""The last hour of a broker, in bounded memory: what its charts show."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from .snapshot import Snapshot, change

SPAN_SECONDS: Final = 3600
STEP_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class Point:
    """What happened within a step.  Times are in seconds, and None if no request was answered."""

    at: float
    rate: float
    errors: float
    queued: int
    running: int
    p50: float | None
    p99: float | None


class History:
    """Points for the last hour, one for each step."""

    def __init__(self, span: float = SPAN_SECONDS, step: float = STEP_SECONDS) -> None:
        self.points: deque[Point] = deque(maxlen=round(span / step))
        self.step = step
        self._last: Snapshot | None = None
        self._queued = self._running = 0

    def add(self, snapshot: Snapshot) -> None:
        """Take the next snapshot."""
        before = self._last
        # The highest numbers within a step: short queues would be missed otherwise.
        self._queued = max(self._queued, snapshot.stats["queued"])
        self._running = max(self._running, snapshot.stats["running"])
        if before is None:
            self._last = snapshot
        elif snapshot.at - before.at >= self.step:
            done = change(before, snapshot)
            self.points.append(
                Point(
                    snapshot.at, done.rate, done.error_rate, self._queued, self._running,
                    done.at_worker.quantile(0.5, snapshot.bounds), done.at_worker.quantile(0.99, snapshot.bounds),
                )
            )  # fmt: skip
            self._last = snapshot
            self._queued = self._running = 0

    def forget(self) -> None:
        """Begin anew: another broker answers."""
        self.points.clear()
        self._last = None

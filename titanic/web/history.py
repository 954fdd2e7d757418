"""The last hour of a Titanic, in bounded memory: what its charts show."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...clients.dashboard.charts import Chart, chart
from ...clients.dashboard.formats import number, seconds
from ...clients.dashboard.histogram import Histogram
from ...clients.dashboard.history import SPAN_SECONDS, STEP_SECONDS
from .. import store
from ..metrics import OK

STATES: Final = ("pending", "running", "delayed")
"""The states that are shown: how many are done or failed says little about an hour."""


@dataclass(frozen=True, slots=True)
class Point:
    """What happened within a step.  Times are in seconds, and None if nothing was committed."""

    at: float
    states: Mapping[str, int]
    """The highest numbers within the step; empty if the database could not be read."""
    accepted: float
    """Requests per second, as are the next two."""
    ended: float
    failed: float
    """Requests that ended without a reply, and attempts after which a request waits for another."""
    p50: float | None
    """Duration of a commit, as is the next."""
    p99: float | None


class History:
    """Points for the last hour, one for each step."""

    def __init__(self, span: float = SPAN_SECONDS, step: float = STEP_SECONDS) -> None:
        self.points: deque[Point] = deque(maxlen=round(span / step))
        self.step = step
        self._last: tuple[float, Mapping[str, Any]] | None = None
        self._states: dict[str, int] = {}

    def add(self, at: float, counted: Mapping[str, Any], summary: store.Summary | None) -> None:
        """Take what a Titanic has counted, and what is in its database unless that cannot be read."""
        if summary is not None:
            self._states = {state: max(self._states.get(state, 0), summary.requests[state]) for state in STATES}
        if self._last is None:
            self._last = at, counted
        elif at - self._last[0] >= self.step:
            self.points.append(_point(*self._last, at, counted, self._states))
            self._last, self._states = (at, counted), {}

    def charts(
        self,
        earlier: tuple[float, Mapping[str, Any]],
        latest: tuple[float, Mapping[str, Any]],
        summary: store.Summary | None,
    ) -> Sequence[Chart]:
        """Return the charts, up to now: the last rates are those between the two times that are given."""
        points, (at, counted) = list(self.points), latest
        if at > earlier[0]:
            now = {} if summary is None else {state: summary.requests[state] for state in STATES}
            points.append(_point(*earlier, at, counted, now))
        p99 = points[-1].p99 if points else None
        return [
            chart(
                "Requests that have not ended", points,
                [(state, state, _number_in(state)) for state in STATES],
                now=at, step=self.step,
                current=number(sum(points[-1].states.values())) if points and points[-1].states else "–",
            ),
            chart(
                "Requests per second", points,
                [("ended", "ended", lambda each: each.ended), ("accepted", "accepted", lambda each: each.accepted)],
                now=at, step=self.step,
            ),
            chart(
                "Duration of a commit", points,
                [("p99", "p99", lambda each: each.p99), ("p50", "p50", lambda each: each.p50)],
                now=at, step=self.step, show=seconds, current=f"p99 {seconds(p99)}",
            ),
            chart(
                "Failures and retries per second", points, [("errors", "", lambda each: each.failed)],
                now=at, step=self.step,
            ),
        ]  # fmt: skip


def _number_in(state: str) -> Callable[[Point], float | None]:
    return lambda point: point.states.get(state)


def _point(
    began: float, before: Mapping[str, Any], at: float, counted: Mapping[str, Any], states: Mapping[str, int]
) -> Point:
    spent = at - began

    def rate(of: Mapping[str, Any], earlier: Mapping[str, Any], *keys: str) -> float:
        more: int = sum(of[key] - earlier.get(key, 0) for key in keys)
        return max(more, 0) / spent

    finished, earlier = counted["finished"], before["finished"]
    bad = [code for code in finished if code != OK]
    commits = _commits(counted).since(_commits(before))
    bounds = counted["commits"]["writer"]["seconds"]["bounds"]
    return Point(
        at, states, rate(counted, before, "accepted"), rate(finished, earlier, *finished),
        rate(finished, earlier, *bad) + rate(counted, before, "retries"),
        commits.quantile(0.5, bounds), commits.quantile(0.99, bounds),
    )  # fmt: skip


def _commits(counted: Mapping[str, Any]) -> Histogram:
    """Return the durations of the commits of what was accepted and of what happened to it."""
    found = counted["commits"]["writer"]["seconds"]
    return Histogram(found["buckets"], found["sum"])

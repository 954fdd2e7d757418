"""What the charts of a Titanic show: its last hour."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....dashboard.shell.charts import Chart, chart
from ....dashboard.shell.formats import number, seconds
from ....dashboard.shell.timeline import SPAN_SECONDS, STEP_SECONDS, Timeline
from ....mdp.histogram import Histogram
from ...db.metrics import OK

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


@dataclass(frozen=True, slots=True)
class Look:
    """What a Titanic had counted at a moment, and what was in its database unless that could not be read."""

    at: float
    counted: Mapping[str, Any]
    stats: Mapping[str, Any] | None = None


def new_history(span: float = SPAN_SECONDS, step: float = STEP_SECONDS) -> Timeline[Look, Point]:
    """Return the history of a Titanic."""
    return Timeline(_point, _states, span=span, step=step)


def charts(history: Timeline[Look, Point], earlier: Look, latest: Look) -> Sequence[Chart]:
    """Return the charts, up to now: the last rates are those between the two looks that are given."""
    points, at, step = list(history.points), latest.at, history.step
    if at > earlier.at:
        points.append(_point(earlier, latest, _states(latest)))
    p99 = points[-1].p99 if points else None
    return [
        chart(
            "Requests that have not ended", points,
            [(state, state, _number_in(state)) for state in STATES],
            now=at, step=step,
            current=number(sum(points[-1].states.values())) if points and points[-1].states else "–",
        ),
        chart(
            "Requests per second", points,
            [("ended", "ended", lambda each: each.ended), ("accepted", "accepted", lambda each: each.accepted)],
            now=at, step=step,
        ),
        chart(
            "Duration of a commit", points,
            [("p99", "p99", lambda each: each.p99), ("p50", "p50", lambda each: each.p50)],
            now=at, step=step, show=seconds, current=f"p99 {seconds(p99)}",
        ),
        chart(
            "Failures and retries per second", points, [("errors", "", lambda each: each.failed)],
            now=at, step=step,
        ),
    ]  # fmt: skip


def _states(look: Look) -> Mapping[str, int]:
    return {} if look.stats is None else {state: look.stats["total"][state] for state in STATES}


def _number_in(state: str) -> Callable[[Point], float | None]:
    return lambda point: point.states.get(state)


def _point(earlier: Look, latest: Look, states: Mapping[str, int]) -> Point:
    spent, counted, before = latest.at - earlier.at, latest.counted, earlier.counted

    def rate(now: Mapping[str, Any], then: Mapping[str, Any], *keys: str) -> float:
        more: int = sum(now[key] - then.get(key, 0) for key in keys)
        return max(more, 0) / spent

    finished, finished_before = counted["finished"], before["finished"]
    bad = [code for code in finished if code != OK]
    commits = _commits(counted).since(_commits(before))
    bounds = counted["commits"]["writer"]["seconds"]["bounds"]
    return Point(
        latest.at, states, rate(counted, before, "accepted"), rate(finished, finished_before, *finished),
        rate(finished, finished_before, *bad) + rate(counted, before, "retries"),
        commits.quantile(0.5, bounds), commits.quantile(0.99, bounds),
    )  # fmt: skip


def _commits(counted: Mapping[str, Any]) -> Histogram:
    """Return the durations of the commits of what was accepted and of what happened to it."""
    found = counted["commits"]["writer"]["seconds"]
    return Histogram(found["buckets"], found["sum"])

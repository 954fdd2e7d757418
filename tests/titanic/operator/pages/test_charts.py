"""The charts of a Titanic."""

import asyncio

import pytest

from zmdp.titanic.operator.pages import section
from zmdp.titanic.operator.pages.charts import Look, charts, new_history
from zmdp.titanic.server.counters import Metrics


def stats(**states):
    return {"total": {"delayed": 0, "pending": 0, "running": 0, "done": 0, "failed": 0, **states}}


def test_a_step_has_the_rates_between_its_ends_and_the_highest_numbers():
    history, metrics = new_history(span=30, step=10), Metrics()
    history.add(Look(0, metrics.as_dict(), stats(pending=1)))
    history.add(Look(4, metrics.as_dict(), stats(pending=9, running=2)))
    metrics.accepted += 50
    metrics.retries += 3
    for code in (None, None, 500):
        metrics.ended(code)
    for _ in range(100):
        metrics.commits["writer"].committed(0.002, 1)
    history.add(Look(10, metrics.as_dict(), stats(delayed=4, failed=7)))
    (point,) = history.points
    assert point.states == {"pending": 9, "running": 2, "delayed": 4}
    assert (point.accepted, point.ended, point.failed) == (5.0, 0.3, 0.4)
    assert 0.001 < point.p50 < point.p99 <= 0.0025
    history.add(Look(20, metrics.as_dict(), None))
    assert history.points[-1].states == {}
    assert (history.points[-1].accepted, history.points[-1].p99) == (0.0, None)


def test_history_is_bounded():
    history, counted = new_history(span=30, step=10), Metrics().as_dict()
    for at in range(0, 1000, 5):
        history.add(Look(at, counted, stats()))
    assert [point.at for point in history.points] == [970, 980, 990]


def test_the_charts_end_with_the_present():
    history, metrics = new_history(span=30, step=10), Metrics()
    before = metrics.as_dict()
    first = {each.title: each for each in charts(history, Look(0, before), Look(0, before))}
    assert first["Requests that have not ended"].current == "–"
    metrics.accepted += 20
    metrics.ended(None)
    found = {
        each.title: each
        for each in charts(history, Look(0, before), Look(10, metrics.as_dict(), stats(pending=3, running=2)))
    }
    states = found["Requests that have not ended"]
    assert states.current == "5"
    assert [kind for kind, _ in states.legend] == ["pending", "running", "delayed"]
    assert all(line.path for line in states.lines)
    assert found["Requests per second"].current == "0.10"
    assert found["Failures and retries per second"].current == "0"


@pytest.mark.parametrize("turns", [True, False])
def test_a_web_server_that_was_held_up_lets_titanic_turn_before_it_says_that_it_is_dead(turns, monkeypatch):
    async def turn():
        if not turns:
            await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(section, "TURN_SECONDS", 0.05)
    made = section.TitanicSection(dict, turn, None)
    made._turned_at -= section.DEAD_SECONDS
    assert asyncio.run(made.section().is_alive()) == turns

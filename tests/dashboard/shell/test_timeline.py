from zmdp.dashboard.broker.snapshot import Point, Snapshot, levels_of, point_between
from zmdp.dashboard.shell.charts import HEIGHT, WIDTH, bars, chart
from zmdp.dashboard.shell.timeline import Timeline
from zmdp.mdp.histogram import Histogram

BOUNDS = [1.0, 2.0, 4.0]


def snapshot(at, *, ok=0, failed=0, queued=0, times=()):
    row = {
        "outcomes": {"ok": ok, "500": failed}, "queue_seconds": {"buckets": [], "seconds": 0.0},
        "worker_seconds": {"buckets": list(times), "seconds": 0.0},
    }  # fmt: skip
    stats = {"queued": queued, "running": 2, "connections": {}}
    return Snapshot(at=at, broker={}, stats=stats, brokers={}, bounds=BOUNDS, services={"a": row})


def points(*values):
    return [Point(10 * n, value, 0.0, 0, 0, None, None) for n, value in enumerate(values)]


def lines_of(found):
    (line,) = chart("Rate", found, [("rate", "", lambda each: each.rate)], now=found[-1].at, step=10).lines
    return line.path


def test_a_step_has_the_rates_between_its_ends_and_the_longest_queue():
    history = Timeline(point_between, levels_of, span=30, step=10)
    history.add(snapshot(0))
    history.add(snapshot(4, ok=10, queued=7, times=[10]))
    history.add(snapshot(10, ok=90, failed=10, queued=1, times=[10, 80]))
    (point,) = history.points
    assert (point.at, point.rate, point.errors, point.queued, point.running) == (10, 10.0, 1.0, 7, 2)
    assert point.p50 == 1.0 + 35 / 80
    assert 1.9 < point.p99 < 2.0


def test_history_is_bounded():
    history = Timeline(point_between, levels_of, span=30, step=10)
    for number in range(100):
        history.add(snapshot(10 * number))
    assert [point.at for point in history.points] == [970, 980, 990]
    assert history.points[0].p50 is None
    history.forget()
    history.add(snapshot(2000))
    assert not history.points


def test_a_line_ends_where_points_are_missing():
    assert lines_of(points(1, 1, 1)).count("M") == 1
    assert lines_of([*points(1, 1), Point(60, 1, 0, 0, 0, None, None)]).count("M") == 2


def test_a_chart_shows_as_much_as_there_is():
    def span_of(seconds):
        return chart("Rate", points(1, 1), [("rate", "", lambda each: each.rate)], now=seconds, step=10).span

    assert [span_of(seconds) for seconds in (20, 301, 1000, 1801, 9999)] == ["5 min", "15 min", "30 min", "1 h", "1 h"]


def test_no_points_are_an_empty_chart():
    found = chart("Rate", [], [("rate", "", lambda each: each.rate)], now=5, step=10)
    assert (found.lines[0].path, found.top, found.current) == ("", "1", "–")
    assert found.description == "Rate in the last 5 min: at most 1, now –"


def test_bars_have_the_buckets_around_those_that_are_used():
    found = bars(Histogram([0, 3, 0, 6]), BOUNDS)
    assert [each.label for each in found] == ["1 s", "2 s", "4 s", "> 4 s"]
    assert found[1].title == "1 s to 2 s: 3 requests (33.3 %)"
    assert found[3].height == 2 * found[1].height == HEIGHT - 4
    assert found[3].x + found[3].width <= WIDTH
    assert bars(Histogram([]), BOUNDS) == []

"""The live view of a broker, as pure functions and of a real broker."""

import pytest

from zmdp.clients.command.monitoring.top import BrokerView, lines, with_rates

BOUNDS = [0.01, 0.1, 1.0]
UNCOUNTED = {
    "outcomes_per_second": None, "errors_per_second": None, "worker_p50_seconds": None, "worker_p99_seconds": None,
    "queue_p99_seconds": None,
}  # fmt: skip
"""What is shown of a service that is not in `mmi.metrics`."""


def service(name, *, workers=1, idle=1, queued=0, dispatched=0, credit=1, running=0):
    return {
        "name": name, "workers": workers, "idle": idle, "credit": credit, "running": running, "queued": queued,
        "dispatched": dispatched,
    }  # fmt: skip


def worker(number, name, *, credit=1, held=0, up=0.0, silent=0.0, protocol="X1", told=True):
    return {
        "id": f"{number:04}", "service": name, "protocol": protocol, "name": f"{name} here" if told else "",
        "host": "box" if told else "", "pid": 40 + number if told else 0, "version": "1.2" if told else "",
        "credit": credit, "held": held, "busy": held > 0, "suspects": 0, "up_seconds": up, "silent_seconds": silent,
    }  # fmt: skip


def stats(**counts):
    zero = {"up_seconds": 10.0, "workers": 0, "queued": 0, "request_bytes": 0, "running": 0}
    return {**zero, "requests": 0, "replies": 0, "errors": 0, "dropped": {}, "lost": {}, **counts}


def view(services=(), workers=(), moment=0.0, metrics=(), **counts):
    counted = {row["name"]: row for row in metrics}
    return BrokerView(list(services), list(workers), stats(**counts), moment, counted, BOUNDS if metrics else ())


def counts(name, *, queue=(), worker=(), **outcomes):
    """A row of `mmi.metrics`, as far as it matters here."""
    return {
        "name": name, "outcomes": outcomes, "queue_seconds": {"buckets": list(queue), "seconds": 0.0},
        "worker_seconds": {"buckets": list(worker), "seconds": 0.0},
    }  # fmt: skip


def test_the_first_update_shows_averages_since_the_start():
    shown = with_rates(view([service("echo", dispatched=50)], requests=100, replies=90, errors=5), None)
    assert shown["services"] == [{**service("echo", dispatched=50), "per_second": 5.0, **UNCOUNTED}]
    totals = shown["totals"]
    assert [totals[f"{each}_per_second"] for each in ("requests", "replies", "errors")] == [10.0, 9.0, 0.5]


def test_the_next_update_shows_what_has_changed():
    before = view([service("echo", dispatched=50), service("gone", dispatched=9)], moment=100.0, requests=100)
    after = view([service("echo", dispatched=150), service("new", dispatched=8)], moment=104.0, requests=160)
    shown = with_rates(after, before)
    assert {row["name"]: row["per_second"] for row in shown["services"]} == {"echo": 25.0, "new": 2.0}
    assert shown["totals"]["requests_per_second"] == 15.0


def test_rates_after_a_restart_are_not_negative():
    before = view([service("echo", dispatched=1000)], moment=1.0, requests=1000)
    after = view([service("echo", dispatched=10)], moment=2.0, requests=10)
    shown = with_rates(after, before)
    assert (shown["services"][0]["per_second"], shown["totals"]["requests_per_second"]) == (0.0, 0.0)


@pytest.mark.parametrize("up", [0.0, 10.0])
def test_no_time_has_passed(up):
    now = view([service("echo", dispatched=5)], moment=1.0, requests=5, up_seconds=up)
    assert with_rates(now, now)["totals"]["requests_per_second"] == 0.0
    assert with_rates(view(up_seconds=0.0, requests=5), None)["totals"]["requests_per_second"] == 0.0


def test_the_longest_queues_come_first():
    rows = [service("b"), service("a"), service("c", queued=5), service("d", queued=9)]
    assert [row["name"] for row in with_rates(view(rows), None)["services"]] == ["d", "c", "a", "b"]


def test_totals():
    counts = {"dropped": {"no-body": 2, "expired": 3}, "lost": {"silent": 4}, "running": 7, "queued": 8}
    totals = with_rates(view(request_bytes=9, **counts), None)["totals"]
    assert (totals["dropped"], totals["lost_workers"]) == (5, 4)
    assert [totals[name] for name in ("running", "queued", "request_bytes")] == [7, 8, 9]


def test_the_view_as_lines():
    shown = with_rates(
        view(
            [
                service("echo", workers=12, idle=3, credit=768, running=5, queued=1, dispatched=1234),
                service("a.longer.name"),
            ],
            [
                worker(2, "echo", credit=64, held=5, up=3725.0, silent=0.26),
                worker(1, "a.longer.name", protocol="0.2", told=False),
            ],
            up_seconds=90061.0, requests=90061 * 2000, running=1500,
        ),
        None,
    )  # fmt: skip
    assert list(lines(shown, "tcp://host:5555", 1000)) == [
        "tcp://host:5555   up 25:01:01",
        "2,000.0 requests/s   0.0 replies/s   0.0 errors/s   1,500 running   0 queued   0 dropped   0 workers lost",
        "",
        "SERVICE        WORKERS  IDLE  CREDIT  RUNNING  QUEUED  REQUESTS/S",
        "echo                12     3     768        5       1         0.0",
        "a.longer.name        1     1       1        0       0         0.0",
        "",
        "HOST  PID  NAME       VERSION  PROTOCOL  SERVICES       WORKERS  CREDIT  HELD  DONE/S  LOAD  UP       SILENT",
        "-       -  -          -        0.2       a.longer.name        1       1     0     0.0   0.0  0:00:00  0.0 s",
        "box    42  echo here  1.2      X1        echo                 1      64     5     0.0   0.0  1:02:05  0.3 s",
    ]


def test_errors_and_latency_since_the_last_update():
    before = view(
        [service("echo", dispatched=100)],
        metrics=[counts("echo", worker=[80, 10, 0, 10], queue=[5], ok=100, **{"500": 7})],
    )
    after = view(
        [service("echo", dispatched=300), service("new", dispatched=4)],
        moment=10.0,
        metrics=[
            counts("echo", worker=[80, 110, 0, 60], queue=[5, 50], ok=250, **{"500": 17, "408": 40}),
            counts("new", worker=[4], ok=4),
        ],
    )
    echo, new = with_rates(after, before)["services"]
    assert {key: echo[key] for key in UNCOUNTED} == {
        "outcomes_per_second": {"ok": 15.0, "500": 1.0, "408": 4.0},
        "errors_per_second": 5.0,
        "worker_p50_seconds": 0.0775,  # the 75th of 100 between 0.01 and 0.1
        "worker_p99_seconds": 1.0,  # or longer
        "queue_p99_seconds": 0.0964,  # 150 have not waited: the 48th of 50 between 0.01 and 0.1
    }
    assert (new["outcomes_per_second"], new["queue_p99_seconds"]) == ({"ok": 0.4}, 0.0)
    titles, row = list(lines(with_rates(after, before), "here", 1000))[3:5]
    assert titles.split()[6:] == ["REQUESTS/S", "ERRORS/S", "P50", "P99", "QUEUE", "P99"]
    assert row.split()[6:] == ["20.0", "5.0", "77.5", "ms", "1.0", "s", "96.4", "ms"]


def test_workers_are_grouped_by_process_and_name():
    here = {"host": "box", "pid": 7, "name": "both", "version": "1.2"}
    before = [
        {**worker(1, "a"), **here, "done": 10, "busy_seconds": 1.0},
        {**worker(2, "b"), **here, "done": 0, "busy_seconds": 0.0},
    ]
    after = [
        {**worker(1, "a", held=1, up=5.0), **here, "done": 30, "busy_seconds": 4.0},
        {**worker(2, "b", credit=3, up=9.0, silent=2.0), **here, "done": 5, "busy_seconds": 1.0, "leaving": True},
        {**worker(3, "a"), **here, "pid": 8, "done": 2, "busy_seconds": 0.0},
        worker(4, "a", protocol="0.2", told=False),
        worker(5, "a", protocol="0.2", told=False),
    ]
    processes = with_rates(view(workers=after, moment=10.0), view(workers=before))["processes"]
    assert [(row["pid"], row["services"], row["workers"]) for row in processes] == [
        (0, ["a"], 1), (0, ["a"], 1), (7, ["a", "b"], 2), (8, ["a"], 1),
    ]  # fmt: skip
    assert processes[2] == {
        **here, "protocol": "X1", "services": ["a", "b"], "workers": 2, "credit": 4, "held": 1, "done": 35,
        "per_second": 2.5, "load": 0.4, "leaving": True, "up_seconds": 9.0, "silent_seconds": 2.0,
    }  # fmt: skip


def test_an_empty_broker():
    told = list(lines(with_rates(view(), None), "tcp://host:5555", 24))
    assert told.count("none") == 2
    assert len(told) == 8


@pytest.mark.parametrize("height", [1, 7, 10, 24, 50])
@pytest.mark.parametrize("rows", [0, 1, 5, 100])
def test_the_view_fits_the_terminal(height, rows):
    shown = with_rates(
        view([service(f"s{n}") for n in range(rows)], [worker(n, f"s{n}") for n in range(rows)]), None
    )  # fmt: skip
    told = list(lines(shown, "tcp://host:5555", height))
    assert len(told) <= max(height, 11)
    if rows == 100:
        assert sum(line.startswith("… and ") and line.endswith(" more") for line in told) == 2

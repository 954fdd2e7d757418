"""The live view of a broker, as pure functions and of a real broker."""

import json
import os

import pytest

from zmdp.clients import Client
from zmdp.clients.top import View, lines, with_rates
from zmdp.mdp.testing import running_broker
from zmdp.workers import Worker


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


def view(services=(), workers=(), moment=0.0, **counts):
    return View(list(services), list(workers), stats(**counts), moment)


def test_the_first_update_shows_averages_since_the_start():
    shown = with_rates(view([service("echo", dispatched=50)], requests=100, replies=90, errors=5), None)
    assert shown["services"] == [{**service("echo", dispatched=50), "per_second": 5.0}]
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
        "WORKER  SERVICE        NAME       HOST  PID  VERSION  PROTOCOL  CREDIT  HELD  UP       SILENT",
        "0001    a.longer.name  -          -       -  -        0.2            1     0  0:00:00  0.0 s",
        "0002    echo           echo here  box    42  1.2      X1            64     5  1:02:05  0.3 s",
    ]


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


def test_the_view_of_a_real_broker():
    with running_broker() as server, Client(server.endpoints[0], timeout=20) as client:
        with Worker("echo", list, broker=server.endpoints[0], concurrency=2):
            for _ in range(10):
                client.request("echo")

            def look():
                asked = ("mmi.services", "mmi.workers", "mmi.stats")
                return View.from_answers(*(json.loads(client.request(question)[0]) for question in asked))

            before = look()
            for _ in range(10):
                client.request("echo")
            after = look()
            shown = with_rates(after, before)
            assert json.loads(json.dumps(shown)) == shown
            (echo,) = shown["services"]
            assert (echo["name"], echo["dispatched"]) == ("echo", 20)
            assert echo["per_second"] > 0
            assert shown["totals"]["requests_per_second"] > 0
            told = list(lines(shown, server.endpoints[0], 24))
            (row,) = shown["workers"]  # one line for each connection
            assert told[-2].split() == [
                "WORKER", "SERVICE", "NAME", "HOST", "PID", "VERSION", "PROTOCOL", "CREDIT", "HELD", "UP", "SILENT"
            ]  # fmt: skip
            assert told[-1].split()[:2] == [str(row["id"]), "echo"]
            assert {row["name"], row["host"], str(row["pid"]), row["version"]} <= set(told[-1].split())
            assert row["pid"] == os.getpid()

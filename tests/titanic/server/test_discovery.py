"""Which services have workers, and how many requests these take (C31)."""

import json
import threading
from contextlib import ExitStack

import pytest
from support.processes import TIMEOUT_SECONDS
from support.titanics import BEATS, LIMITS, answer, serving, stored

from zmdp.clients import Client
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.mmi import answers
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.titanic.server import discovery
from zmdp.workers import Worker

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
"""For tests that do not depend on the database."""


@on_sqlite
def test_c31_requests_without_workers_are_not_sent_to_the_broker(bench, titanic, url):
    for number in range(20):
        titanic.submit("later", b"%d" % number)
    worker = bench.x1_worker(b"now")
    ticket = titanic.submit("now", b"")
    answer(worker)
    ticket.result(timeout=TIMEOUT_SECONDS)
    known = {each["name"] for each in json.loads(bench.mmi(b"mmi.services", b""))["services"]}
    assert known == {"now", "titanic.request", "titanic.reply", "titanic.close", "titanic.schedule"}
    assert {each["state"] for each in stored(url)["requests"]} == {"pending", "done"}
    later = bench.x1_worker(b"later")
    assert [answer(later) for _ in range(20)] == [b"%d" % number for number in range(20)]


@on_sqlite
def test_what_the_workers_of_other_brokers_can_take_counts(url):
    together = threading.Barrier(5, timeout=TIMEOUT_SECONDS)

    def far(request):
        together.wait()  # with fewer than five at a time, it never returns
        return b"done"

    with running_broker(name="b", limits=LIMITS, drain_timeout=0.0) as b:
        link = LinkTo("peer", b.endpoints[0])
        with running_broker(name="a", limits=LIMITS, links=[link], drain_timeout=0.0) as a, ExitStack() as stack:
            stack.enter_context(serving(a.endpoints[0], url))
            client = stack.enter_context(Client(a.endpoints[0], timeout=TIMEOUT_SECONDS, retries=0))
            stack.enter_context(Worker("far", far, broker=b.endpoints[0], concurrency=5, **BEATS))
            tickets = [Titanic(client).submit("far", b"%d" % number) for number in range(20)]
            assert [ticket.result(timeout=TIMEOUT_SECONDS) for ticket in tickets] == [[b"done"]] * 20


@pytest.mark.parametrize(
    ("row", "capacity"),
    [
        ({"credit": 3, "running": 2}, 5),  # a broker without links
        ({"credit": 3, "running": 2, "remote_credit": 0, "remote_running": 0}, 5),
        ({"credit": 0, "running": 2, "remote_credit": 4, "remote_running": 2}, 4),
        ({"credit": 1, "running": 3, "remote_credit": 4, "remote_running": 1}, 7),
        ({"credit": 9, "running": 3, "limits": {"service": {"concurrency": 8}}}, 8),
        ({"credit": 9, "running": 3, "limits": {"service": {"concurrency": 8}}, "remote_credit": 4}, 12),
        ({"credit": 90, "running": 3, "limits": {"service": {"rate": "120/min", "burst": 20}}}, 25),
        ({"credit": 90, "running": 0, "limits": {"service": {"rate": "1/h"}}}, 1),
    ],
)
def test_the_capacity_of_a_service(row, capacity):
    assert discovery.capacity(row) == (capacity, None)


@pytest.mark.parametrize(
    ("limit", "per_group"), [({"concurrency": 2}, 2), ({"rate": "1/s", "burst": 5}, 20), ({"rate": "1/h"}, 1)]
)
def test_the_capacity_of_a_group(limit, per_group):
    assert discovery.capacity({"credit": 9, "running": 0, "limits": {"group": limit}}) == (9, per_group)


@on_sqlite
def test_all_requests_run_if_the_broker_cannot_list_all_services(bench, titanic, monkeypatch):
    monkeypatch.setattr(answers, "MAX_ROWS", 2)
    monkeypatch.setattr(discovery, "DISCOVERY_PAGE", 3)
    names = [f"service {number}" for number in range(12)]
    tickets = [titanic.submit(name, name.encode()) for name in names]
    with ExitStack() as stack:
        for name in names[::2]:
            stack.enter_context(Worker(name, list, broker=bench.endpoint, **BEATS))
        for ticket, name in list(zip(tickets, names, strict=True))[::2]:
            assert ticket.result(timeout=TIMEOUT_SECONDS) == [name.encode()]
    assert not any(ticket.ready() for ticket in tickets[1::2])

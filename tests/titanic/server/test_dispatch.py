"""Executing stored requests (C31): which, in which order, how often, and what happens to them meanwhile."""

import json
import os
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest
import sqlalchemy as sa
from support.processes import TIMEOUT_SECONDS, eventually, process
from support.titanics import (
    BEATS,
    QUICK,
    answer,
    connected,
    follow,
    given,
    lease,
    operate,
    row,
    running_bench,
    serving,
    state,
    stored,
)

from zmdp.clients import Client, ServiceError
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.titanic.db.store import replies
from zmdp.titanic.operator import admin
from zmdp.titanic.server import fetch as callers_module
from zmdp.titanic.server import outcome as retries
from zmdp.titanic.server import upkeep as maintenance
from zmdp.workers import Worker

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
"""For tests that do not depend on the database."""
on_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
"""For slow tests that hardly depend on the database."""


@pytest.fixture
def quick_retries(monkeypatch):
    """Make the pauses before further attempts short."""
    monkeypatch.setattr(retries, "BACKOFF_SECONDS", (0.01, 0.02))


def services(bench):
    """Return the number of requests that the broker has, by service."""
    return {each["name"]: each for each in json.loads(bench.mmi(b"mmi.services", b""))["services"]}


def failed(ticket):
    """Return the failure that a request ended with."""
    with pytest.raises(ServiceError) as told:
        ticket.result(timeout=TIMEOUT_SECONDS)
    return told.value


# ── when, and for whom ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_sent_in_its_group(bench, titanic):  # C48
    bench.mmi(b"mmi.limit", b"slow", json.dumps({"group": {"concurrency": 1}}).encode())
    for body, group in ((b"a1", "a"), (b"a2", "a"), (b"b1", "b")):
        titanic.submit("slow", body, group=group)
    worker = bench.x1_worker(b"slow", credit=5)
    begun = dict(reversed(given(worker)) for _ in range(2))
    assert set(begun) == {b"a1", b"b1"}
    for address in begun.values():
        worker.final(address, b"done")
    assert answer(worker) == b"a2"


def limit(bench, **limits):
    bench.mmi(b"mmi.limit", b"slow", json.dumps(limits).encode())


@on_sqlite
def test_only_what_may_start_soon_is_claimed(bench, titanic, url):
    limit(bench, service={"concurrency": 2})
    slow = bench.x1_worker(b"slow", credit=100)
    held = [titanic.submit("slow", b"%d" % number) for number in range(100)]
    begun = [given(slow)[0] for _ in range(2)]
    bench.until(lambda: services(bench)["slow"]["held_back"] == 2)
    ticket = titanic.submit("other", b"")
    answer(bench.x1_worker(b"other"))
    ticket.result(timeout=TIMEOUT_SECONDS)
    assert services(bench)["slow"]["queued"] == 2
    assert 4 <= Counter(each["state"] for each in stored(url)["requests"])["running"] <= 10
    for address in begun:
        slow.final(address, b"done")
    assert [answer(slow) for _ in range(98)] == [b"%d" % number for number in range(2, 100)]
    for each in held:
        each.result(timeout=TIMEOUT_SECONDS)


@on_sqlite
@pytest.mark.parametrize("limits", [{"service": {"concurrency": 1}}, {"group": {"concurrency": 1}}])
def test_a_group_with_many_requests_does_not_hold_up_another(bench, titanic, limits):
    limit(bench, **limits)
    for number in range(50):
        titanic.submit("slow", b"a%d" % number, group="a")
    titanic.submit("slow", b"a urgent", group="a", priority=9)
    worker = bench.x1_worker(b"slow", credit=5)
    address, body = given(worker)
    assert body == b"a urgent"
    titanic.submit("slow", b"b", group="b")
    begun = []
    while b"b" not in begun:
        worker.final(address, b"done")
        address, body = given(worker)
        begun.append(body)
    assert len(begun) < 10


@on_sqlite
def test_a_request_that_has_only_waited_for_a_limit_has_not_failed(url):
    with ExitStack() as stack:
        server = stack.enter_context(running_broker(limits=Limits(**BEATS, expiry=0.05), drain_timeout=0.1))
        at = server.endpoints[0]
        stack.enter_context(serving(at, url))
        client = stack.enter_context(Client(at, timeout=TIMEOUT_SECONDS))
        client.request("mmi.limit", b"slow", b'{"service": {"concurrency": 1}}')
        began, go_on = threading.Event(), threading.Event()

        def handler(request):
            began.set()
            assert go_on.wait(TIMEOUT_SECONDS)
            return request

        stack.callback(go_on.set)
        stack.enter_context(Worker("slow", handler, broker=at, concurrency=4, **BEATS))
        first = Titanic(client).submit("slow", b"first")
        assert began.wait(TIMEOUT_SECONDS)
        second = Titanic(client).submit("slow", b"second")
        eventually(lambda: timed_out(client) >= 3)
        assert state(url, second.uuid) == "running"
        go_on.set()
        for ticket in (first, second):
            ticket.result(timeout=TIMEOUT_SECONDS)
            told = row(url, ticket.uuid)
            assert (told["attempts"], told["failures"], told["error"]) == (1, 0, None)


def timed_out(client):
    """Return how many requests to the service have waited too long."""
    (answer,) = client.request("mmi.metrics", b"")
    (found,) = [each for each in json.loads(answer)["services"] if each["name"] == "slow"]
    return found["outcomes"].get("408", 0)


@on_sqlite
def test_the_broker_gets_twice_the_credit_of_a_worker(bench, titanic, url):
    for number in range(50):
        titanic.submit("slow", b"%d" % number)
    worker = bench.x1_worker(b"slow", credit=5)
    held = [given(worker)[0] for _ in range(5)]
    bench.until(lambda: services(bench)["slow"]["queued"] == 5)
    assert 10 <= Counter(each["state"] for each in stored(url)["requests"])["running"] <= 25
    worker.credit(0)
    for address in held:
        worker.final(address, b"done")
    bench.until(lambda: services(bench)["slow"]["running"] == 0)
    worker.credit(50)
    assert sorted(int(given(worker)[1]) for _ in range(45)) == list(range(5, 50))


@on_sqlite
def test_titanics_own_services_can_be_addressed_at_a_broker(titanic, client, bench, url):
    name = json.loads(client.request("mmi.broker")[0])["broker"]
    status, uuid = client.request("titanic.request", b"echo", b"body", options={"broker": name})
    assert status == b"200"
    answer(bench.x1_worker(b"echo"))
    while (status := client.request("titanic.reply", uuid, options={"broker": name}))[0] == b"300":
        pass
    assert status == [b"200", b"done"]
    assert "broker" not in json.dumps(stored(url), default=str)
    assert client.request("titanic.close", uuid, options={"broker": name}) == [b"200"]


@on_sqlite
def test_the_requests_in_flight_are_bounded_by_the_workers(bench, titanic, url):
    for number in range(50):
        titanic.submit("slow", b"%d" % number)
    workers = [bench.x1_worker(b"slow") for _ in range(2)]
    held = [given(worker) for worker in workers]
    bench.until(lambda: services(bench)["slow"]["queued"] == 2)
    ticket = titanic.submit("other", b"")
    answer(bench.x1_worker(b"other"))
    ticket.result(timeout=TIMEOUT_SECONDS)
    assert services(bench)["slow"]["queued"] == 2
    states = Counter(each["state"] for each in stored(url)["requests"])
    assert 4 <= states["running"] <= 10
    assert states["running"] + states["pending"] == 50
    for worker, (address, _) in zip(workers, held, strict=True):
        worker.final(address, b"done")
        given(worker)  # the next is there at once


def test_a_delayed_request_does_not_hold_up_others(bench, titanic, url):
    worker = bench.x1_worker(b"echo")
    never = titanic.submit("echo", b"never", delay=3600)
    delayed = titanic.submit("echo", b"delayed", delay=0.3)
    dated = titanic.submit("echo", b"dated", at=(moment := time.time() + 0.6))  # which may have passed
    titanic.submit("echo", b"at once")
    titanic.submit("echo", b"overdue", at=0)
    assert {answer(worker) for _ in range(4)} == {b"at once", b"overdue", b"delayed", b"dated"}
    for ticket in (delayed, dated):
        ticket.result(timeout=TIMEOUT_SECONDS)
        assert row(url, ticket.uuid)["started"] >= row(url, ticket.uuid)["due"]
    assert row(url, delayed.uuid)["due"] == pytest.approx(row(url, delayed.uuid)["created"] + 0.3)
    due = max(moment, row(url, dated.uuid)["created"])
    assert row(url, dated.uuid)["due"] == pytest.approx(due, abs=0.001)
    assert state(url, never.uuid) == "delayed"
    worker.nothing()


@on_sqlite
@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("limits", [{"max_queue": 1}, {"expiry": 0.1}, {"max_attempts": 1}])
def test_a_request_that_the_broker_drops_is_sent_again(url, limits):
    with ExitStack() as stack:
        server = stack.enter_context(running_broker(limits=Limits(**BEATS, **limits), drain_timeout=0.1))
        at = server.endpoints[0]
        stack.enter_context(serving(at, url))
        titanic = Titanic(stack.enter_context(Client(at, timeout=TIMEOUT_SECONDS)))
        tickets = [titanic.submit("slow", b"%d" % number) for number in range(20)]
        stack.enter_context(Worker("slow", slow, broker=at, concurrency=3, **BEATS))
        assert [ticket.result(timeout=TIMEOUT_SECONDS) for ticket in tickets] == [
            [b"%d" % number] for number in range(20)
        ]
        assert {each["failures"] for each in stored(url)["requests"]} == {0}


def slow(request):
    time.sleep(0.02)  # the time is what this is about
    return request[0]


@on_sqlite
def test_a_reply_that_could_not_be_fetched_is_a_failure(bench, titanic, monkeypatch):
    monkeypatch.setattr(retries, "MAX_REPLY_BYTES", 10)
    worker = bench.x1_worker(b"echo")
    fits, large = (titanic.submit("echo", b"") for _ in range(2))
    answer(worker, b"x" * 10)
    answer(worker, b"x" * 11)
    assert fits.result(timeout=TIMEOUT_SECONDS) == [b"x" * 10]
    assert failed(large).code == 413


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
def test_the_newest_of_the_requests_with_a_key_is_executed(bench, titanic):
    worker = bench.x1_worker(b"echo")
    newest = {"key": "k", "on_duplicate": "replace"}
    first = titanic.submit("echo", b"old", delay=3600, **newest)
    assert titanic.submit("echo", b"old, too", delay=1800, **newest).uuid == first.uuid
    assert titanic.submit("echo", b"new", **newest).uuid == first.uuid
    address, body = given(worker)
    assert body == b"new"
    later = titanic.submit("echo", b"later", **newest)
    assert later.uuid != first.uuid
    worker.final(address, b"done")
    assert answer(worker) == b"later"
    assert first.result(timeout=TIMEOUT_SECONDS) == later.result(timeout=TIMEOUT_SECONDS) == [b"done"]


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_handler_is_retried_as_often_as_requested(bench, titanic, url):
    worker = bench.x1_worker(b"records")
    ticket = titanic.submit("records", b"", retries=2, backoff=0.01)
    for number in range(3):  # whatever the code is
        address, _ = given(worker)
        assert not ticket.ready()
        worker.error(address, b"40%d" % number, b"not the %d." % number)
    assert (failed(ticket).code, failed(ticket).text) == (402, "not the 2.")
    told = row(url, ticket.uuid)
    assert (told["state"], told["attempts"], told["failures"]) == ("failed", 3, 2)
    worker.nothing()


@on_sqlite
def test_other_requests_run_during_a_backoff(bench, titanic, url):
    worker = bench.x1_worker(b"records")
    ticket = titanic.submit("records", b"fails", retries=1, backoff=3600)
    address, _ = given(worker)
    worker.error(address, b"500", b"not yet")
    eventually(lambda: state(url, ticket.uuid) == "delayed")
    assert row(url, ticket.uuid)["error"] == "not yet"
    other = titanic.submit("records", b"other")
    assert answer(worker) == b"other"
    other.result(timeout=TIMEOUT_SECONDS)
    told = row(url, ticket.uuid)
    assert 3600 <= told["due"] - told["started"] <= 4400
    with connected(url) as connection:
        connection.execute(sa.text("UPDATE titanic_requests SET due = 0 WHERE state = 'delayed'"))  # an hour later
    assert answer(worker) == b"fails"
    assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]


@on_sqlite
@pytest.mark.usefixtures("quick_retries")
def test_transient_failures_are_retried_without_limit(bench, titanic, url):
    worker = bench.x1_worker(b"echo")
    ticket = titanic.submit("echo", b"")
    for code in (b"408", b"429", b"503", *[b"502"] * 6):  # a handler's own 502 is no lost worker
        address, _ = given(worker)
        worker.error(address, code, b"not now")
        assert not ticket.ready()
    answer(worker)
    assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]
    told = row(url, ticket.uuid)
    assert (told["attempts"], told["failures"], told["deaths"], told["error"]) == (10, 0, 0, None)


@on_sqlite
@pytest.mark.usefixtures("quick_retries")
def test_a_request_that_kills_its_workers_fails(bench, titanic, url):
    ticket = titanic.submit("echo", b"poison")
    for _ in range(6):  # the broker gives it to three at a time, and five are the limit
        worker = bench.x1_worker(b"echo")
        given(worker)
        worker.close()
    told = failed(ticket)
    assert told.code == 502
    assert told.text.startswith("given up after 6 workers were lost while they handled it; the last error: its worker")
    found = row(url, ticket.uuid)
    assert (found["state"], found["attempts"], found["failures"], found["deaths"]) == ("failed", 2, 0, 6)
    worker = bench.x1_worker(b"echo")
    worker.nothing()
    assert operate(url, admin.retry, ticket.uuid) == [ticket.uuid]
    answer(worker)
    assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]


def test_an_interrupted_attempt_does_not_count_as_a_retry(bench, url, client):
    worker = bench.x1_worker(b"records")
    with serving(bench.endpoint, url):
        ticket = Titanic(client).submit("records", b"", retries=1, backoff=0.01)
        address, _ = given(worker)
        worker.error(address, b"500", b"the first failure")
        address, _ = given(worker)
    worker.cancelled(address)  # that Titanic has ended
    worker.error(address, b"499", b"cancelled")
    assert (row(url, ticket.uuid)["attempts"], row(url, ticket.uuid)["failures"]) == (2, 1)
    with serving(bench.endpoint, url):
        address, _ = given(worker)
        worker.error(address, b"500", b"the second failure")
        assert failed(ticket).text == "the second failure"
    assert (row(url, ticket.uuid)["attempts"], row(url, ticket.uuid)["failures"]) == (3, 1)


# ── PARTIALs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def parts(ticket, start=0):
    """Return the first frames of the PARTIALs."""
    return [part[0] for part in ticket.partials(start, timeout=TIMEOUT_SECONDS)]


def test_partials_can_be_followed_live(bench, titanic, monkeypatch):
    monkeypatch.setattr(callers_module, "MIN_WATCH_SECONDS", 3600)  # so that no poll finds it
    worker, early, late = bench.x1_worker(b"count"), bench.x1_client(), bench.x1_client()
    ticket = titanic.submit("count")
    follow(early, ticket)
    address, _ = given(worker)
    for number in range(3):
        worker.partial(address, b"%d" % number)
        early.partial(b"titanic.reply", b"%d" % number)
    follow(late, ticket, start=2)
    late.partial(b"titanic.reply", b"2")
    worker.partial(address, b"3", b"more")
    for client in (early, late):
        client.partial(b"titanic.reply", b"3", b"more")
    assert not ticket.ready()
    worker.final(address, b"end")
    for client in (early, late):
        client.final(b"titanic.reply", b"200", b"end")


@on_sqlite
def test_a_reader_that_stops_reading_does_not_block_others(bench, titanic, url):
    worker, idle = bench.x1_worker(b"count"), bench.x1_client()
    ticket = titanic.submit("count")
    follow(idle, ticket)
    address, _ = given(worker)
    large = bytes(10_000)
    for number in range(3000):
        worker.partial(address, b"%d" % number, large)
    worker.final(address, b"end")
    assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"end"]
    assert len(parts(ticket, 2990)) == 10
    for number in range(3000):
        idle.partial(b"titanic.reply", b"%d" % number, large)
    idle.final(b"titanic.reply", b"200", b"end")


@pytest.mark.parametrize("change", ["close", "retry"])
def test_a_reader_does_not_take_partials_that_went_away_for_the_end(bench, titanic, url, monkeypatch, change):
    worker, reader = bench.x1_worker(b"count"), bench.x1_client()
    ticket = titanic.submit("count")
    address, _ = given(worker)
    last = replies.MAX_PARTIALS  # the only one that is not fetched with the first
    for number in range(last + 1):
        worker.partial(address, b"%d" % number)
    worker.error(address, b"500", b"broken", b"")
    assert failed(ticket).text == "broken"
    fetch = replies._fetch_partials

    def fetch_and_change(connection, wanted):
        found = fetch(connection, wanted)
        if wanted.start == 0 and change == "close":
            ticket.close()
        elif wanted.start == 0:
            operate(url, admin.retry, ticket.uuid)
            eventually(lambda: row(url, ticket.uuid)["attempts"] == 2)
        return found

    monkeypatch.setattr(replies, "_fetch_partials", fetch_and_change)
    follow(reader, ticket)
    for number in range(last):
        reader.partial(b"titanic.reply", b"%d" % number)
    if change == "close":
        reader.final(b"titanic.reply", b"400 unknown uuid", b"unknown-uuid")
        return
    address, _ = given(worker)
    for number in range(last + 1):
        worker.partial(address, b"again %d" % number)
    reader.partial(b"titanic.reply", b"again %d" % last)
    worker.final(address, b"end")
    reader.final(b"titanic.reply", b"200", b"end")


@pytest.mark.usefixtures("quick_retries")
def test_an_interrupted_stream_is_run_again(bench, titanic, url):
    ticket = titanic.submit("count")
    live, behind = bench.x1_client(), bench.x1_client()
    first = bench.x1_worker(b"count")
    follow(live, ticket)
    address, _ = given(first)
    for number in range(3):
        first.partial(address, b"first %d" % number)
        live.partial(b"titanic.reply", b"first %d" % number)
    first.close()
    second = bench.x1_worker(b"count")
    address, _ = given(second)
    second.partial(address, b"second 0")
    follow(behind, ticket)
    behind.partial(b"titanic.reply", b"second 0")
    for number in (1, 2, 3):
        second.partial(address, b"second %d" % number)
        behind.partial(b"titanic.reply", b"second %d" % number)
    live.partial(b"titanic.reply", b"second 3")  # it has had three
    second.final(address, b"end")
    for client in (live, behind):
        client.final(b"titanic.reply", b"200", b"end")
    assert parts(ticket) == [b"second %d" % number for number in range(4)]
    assert len(stored(url)["parts"]) == 4


@on_postgresql
def test_partials_can_be_followed_at_another_titanic(bench, url):
    # The other Titanic and its callers have a broker of their own; only the database is shared.
    with running_bench() as elsewhere, ExitStack() as stack:
        stack.enter_context(serving(bench.endpoint, url))
        stack.enter_context(serving(elsewhere.endpoint, url))
        ticket = Titanic(stack.enter_context(Client(bench.endpoint, timeout=TIMEOUT_SECONDS))).submit("count")
        readers = [bench.x1_client(), elsewhere.x1_client(), elsewhere.x1_client()]
        for reader in readers:
            follow(reader, ticket)
        worker = bench.x1_worker(b"count")
        address, _ = given(worker)
        for number in range(3):
            worker.partial(address, b"%d" % number)
            for reader in readers:
                reader.partial(b"titanic.reply", b"%d" % number)
        worker.final(address, b"end")
        for reader in readers:
            reader.final(b"titanic.reply", b"200", b"end")


# ── closing and cancelling ───────────────────────────────────────────────────────────────────────────────────────────


def test_closing_a_running_request_cancels_it_at_the_worker(bench, url, client, monkeypatch):
    monkeypatch.setattr(maintenance, "MAINTENANCE_SECONDS", 3600)  # so that no maintenance finds it closed
    worker = bench.x1_worker(b"slow")
    with serving(bench.endpoint, url):
        titanic = Titanic(client)
        ticket = titanic.submit("slow")
        address, _ = given(worker)
        worker.partial(address, b"half")
        ticket.close()
        worker.cancelled(address)
        worker.final(address, b"too late")
        other = titanic.submit("slow", b"other")
        assert answer(worker) == b"other"
        assert other.result(timeout=TIMEOUT_SECONDS) == [b"done"]
        assert [each["state"] for each in stored(url)["requests"]] == ["done"]
        assert stored(url)["parts"] == []


def test_closing_a_running_request_at_another_titanic_cancels_it_at_the_worker(bench, url, monkeypatch):
    monkeypatch.setattr(maintenance, "MAINTENANCE_SECONDS", 0.1)
    with running_bench() as elsewhere, ExitStack() as stack:
        stack.enter_context(serving(bench.endpoint, url))
        stack.enter_context(serving(elsewhere.endpoint, url))
        here, there = (
            Titanic(stack.enter_context(Client(each.endpoint, timeout=TIMEOUT_SECONDS))) for each in (bench, elsewhere)
        )
        worker = bench.x1_worker(b"slow")
        ticket = here.submit("slow")
        address, _ = given(worker)
        there.ticket(ticket.uuid).close()
        worker.cancelled(address)
        worker.final(address, b"too late")
        assert stored(url)["requests"] == []


@on_postgresql
def test_an_operator_cancels_a_running_request_at_the_worker(bench, titanic, url):
    worker = bench.x1_worker(b"slow")
    ticket = titanic.submit("slow")
    address, _ = given(worker)
    assert operate(url, admin.cancel, ticket.uuid) == [ticket.uuid]
    assert failed(ticket).code == 499
    worker.cancelled(address)
    worker.final(address, b"too late")
    assert failed(ticket).code == 499
    assert operate(url, admin.retry, ticket.uuid) == [ticket.uuid]
    answer(worker)
    assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]


# ── several Titanics ─────────────────────────────────────────────────────────────────────────────────────────────────


@on_postgresql
def test_c31_a_service_slower_than_every_timeout_completes_once(bench, url, client):  # C31
    # Two Titanics: if the lease were not renewed, the other would take the request.
    with serving(bench.endpoint, url, lease=6), serving(bench.endpoint, url, lease=6):
        workers = [bench.x1_worker(b"slow") for _ in range(2)]
        ticket = Titanic(client).submit("slow")
        started = eventually(lambda: row(url, ticket.uuid)["started"])
        eventually(lambda: lease(url) > started + 6 + 1)  # it was renewed when the first had run out
        (worker,) = [each for each in workers if not only_heartbeats(each)]
        worker.final(given(worker)[0], b"done")
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]
        assert row(url, ticket.uuid)["attempts"] == 1
        for each in workers:
            each.nothing()


def only_heartbeats(worker):
    """Return whether nothing else has arrived; keep what has."""
    worker.sync()
    return all(worker._is_heartbeat(message) for message in worker._came)


@on_sqlite
def test_titanics_with_different_databases_are_reported(bench, url, tmp_path, caplog):
    with ExitStack() as stack:
        for db in (url, url, str(tmp_path / "other.db")):
            stack.enter_context(serving(bench.endpoint, db))
        eventually(lambda: "uses another database" in caplog.text)
    assert f"(process {os.getpid()} on " in caplog.text


# ── real deaths ──────────────────────────────────────────────────────────────────────────────────────────────────────


def titanic_process(endpoint, url, *options):
    command = ("titanic", "serve", "--broker", endpoint, "--db", url, *QUICK)
    return process(*command, *options)


def test_c31_requests_outlive_a_titanic_that_is_killed(bench, url, client):  # C31
    titanic, worker = Titanic(client), bench.x1_worker(b"slow")
    with titanic_process(bench.endpoint, url, "--lease", "5") as first:
        first.line("serving titanic.request")
        tickets = [titanic.submit("slow", b"%d" % number) for number in range(5)]
        delayed = titanic.submit("slow", b"delayed", delay=0.1)
        later = titanic.submit("later", b"later")
        address, body = given(worker)
        worker.partial(address, b"half")
        eventually(lambda: len(stored(url)["parts"]) == 1)
        first.kill()
    worker.final(address, b"to nobody")
    worker.disconnect()
    assert body == b"0"
    assert "done" not in {each["state"] for each in stored(url)["requests"]}
    with ExitStack() as stack:
        stack.enter_context(titanic_process(bench.endpoint, url, "--lease", "5"))
        for name in ("slow", "later"):
            stack.enter_context(Worker(name, list, broker=bench.endpoint, **BEATS))
        assert [ticket.result(timeout=TIMEOUT_SECONDS) for ticket in tickets] == [
            [b"%d" % number] for number in range(5)
        ]
        assert [delayed.result(timeout=TIMEOUT_SECONDS), later.result(timeout=TIMEOUT_SECONDS)] == [
            [b"delayed"],
            [b"later"],
        ]
        assert parts(tickets[0]) == []
        assert row(url, tickets[0].uuid)["attempts"] == 2

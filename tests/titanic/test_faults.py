"""Database failures: 200 always means stored, and Titanic recovers by itself."""

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import sqlalchemy as sa
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, connected, lease, row, running_bench, serving, state, stored

from zmdp.clients import Client, ServiceError, SettingError
from zmdp.testing import running_broker
from zmdp.titanic import Titanic, TitanicError
from zmdp.titanic.db import schema
from zmdp.titanic.db.schema import SchemaError
from zmdp.titanic.server import attempt
from zmdp.titanic.server.program import Server
from zmdp.workers import Worker

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shorten the timeouts of locks to five seconds; `impatient(seconds)` shortens them further."""

    def shorten(seconds):
        monkeypatch.setitem(schema.open_engine.__kwdefaults__, "lock_timeout", seconds)
        monkeypatch.setitem(schema.open_engine.__kwdefaults__, "busy_timeout", seconds)

    monkeypatch.setattr(schema, "BUSY_TIMEOUT_SECONDS", 5)
    shorten(5)
    return shorten


# ── SQLite ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
def test_a_running_request_outlives_an_outage_that_is_longer_than_its_lease(bench, own_url, client, impatient):
    impatient(0.05)
    with serving(bench.endpoint, own_url, lease=2):
        ticket = Titanic(client).submit("count", b"body")
        worker = bench.x1_worker(b"count")
        address, _ = worker.request(b"body")
        worker.partial(address, b"0")
        eventually(lambda: len(stored(own_url)["parts"]) == 1)
        until = lease(own_url)
        with locked(own_url):
            for number in range(1, 100):
                worker.partial(address, b"%d" % number)
            eventually(lambda: now(own_url) > until + 0.5)
            assert ticket.ready() is False
            worker.final(address, b"end")
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"end"]
        assert [part[0] for part in ticket.partials()] == [b"%d" % number for number in range(100)]
        assert row(own_url, ticket.uuid)["attempts"] == 1
        worker.nothing()


@on_sqlite
@pytest.mark.parametrize("retries", [0, 1])
def test_a_stream_that_arrives_faster_than_it_is_stored_fails(bench, own_url, client, monkeypatch, impatient, retries):
    impatient(TIMEOUT_SECONDS)
    monkeypatch.setattr(attempt, "MAX_UNSTORED_BYTES", 100_000)
    with serving(bench.endpoint, own_url):
        ticket = Titanic(client).submit("count", b"body", retries=retries, backoff=0.01)
        worker = bench.x1_worker(b"count")
        for _ in range(1 + retries):
            flood(own_url, worker)
        with pytest.raises(ServiceError, match=r"413: the stream arrives faster than the database stores it: 1\d{5} b"):
            ticket.result(timeout=TIMEOUT_SECONDS)
        assert row(own_url, ticket.uuid)["attempts"] == 1 + retries
        worker.nothing()


@on_sqlite
def test_a_stream_that_is_not_stored_because_the_database_fails_is_repeated(
    bench, own_url, client, monkeypatch, impatient
):
    impatient(0.05)
    monkeypatch.setattr(attempt, "MAX_UNSTORED_BYTES", 100_000)
    with serving(bench.endpoint, own_url) as server:
        commits = server.metrics.commits["writer"]
        ticket = Titanic(client).submit("count", b"body")
        worker = bench.x1_worker(b"count")
        # After so many failures, the event loop has learned that the PARTIAL was not stored.
        flood(own_url, worker, lambda: eventually(lambda: commits.failures >= 4))
        address, _ = worker.request(b"body")
        worker.final(address, b"end")
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"end"]


def flood(url, worker, wait=lambda: None):
    """Let the worker answer its next request with more than can be stored while another program writes."""
    address, _ = worker.request(b"body")
    with locked(url):
        worker.partial(address, bytes(20_000))
        wait()
        for _ in range(9):
            worker.partial(address, bytes(20_000))
        assert worker.command()[2] == worker.CANCEL
    worker.final(address, b"cancelled")


@contextmanager
def locked(url):
    """Let another program write."""
    connection = sqlite3.connect(sa.make_url(url).database, timeout=TIMEOUT_SECONDS, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


def now(url):
    with connected(url) as connection:
        return connection.scalar(sa.text("SELECT (julianday('now') - 2440587.5) * 86400.0"))


# ── PostgreSQL ───────────────────────────────────────────────────────────────────────────────────────────────────────


@on_postgresql
def test_callers_waiting_during_an_outage_get_an_error_or_the_reply(bench, own_url, cluster, client):
    with serving(bench.endpoint, own_url):
        ticket = Titanic(client).submit("echo", b"body")
        worker = bench.x1_worker(b"echo")
        address, _ = worker.request(b"body")
        cluster.stop()
        try:
            with pytest.raises(TitanicError) as told:
                ticket.result(timeout=TIMEOUT_SECONDS)
            assert told.value.code == 500
            worker.final(address, b"done")
        finally:
            cluster.start()
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]
        assert row(own_url, ticket.uuid)["attempts"] == 1


@on_postgresql
def test_shutting_down_during_an_outage_loses_nothing(bench, own_url, cluster, client):
    worker = bench.x1_worker(b"echo")
    with ExitStack() as stack:
        with serving(bench.endpoint, own_url, drain_timeout=0.1, lease=2):
            ticket = Titanic(client).submit("echo", b"body")
            address, _ = worker.request(b"body")
            cluster.stop()
            stack.callback(cluster.start)
            worker.final(address, b"cannot be stored")
            with pytest.raises(TitanicError):
                Titanic(client).submit("echo", b"refused")
    with serving(bench.endpoint, own_url):
        address, _ = worker.request(b"body")
        worker.final(address, b"done")
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]


@on_postgresql
def test_two_titanics_that_close_the_same_requests_at_once(bench, own_url):
    with running_bench() as elsewhere, ExitStack() as stack:
        both = []
        for each in (bench, elsewhere):
            stack.enter_context(serving(each.endpoint, own_url))
            both.append(Titanic(stack.enter_context(Client(each.endpoint, timeout=TIMEOUT_SECONDS))))
        uuids = [both[0].submit("later", b"").uuid for _ in range(100)]
        pool = stack.enter_context(ThreadPoolExecutor(64))
        closing = [pool.submit(both[0].ticket(uuid).close) for uuid in uuids]
        closing += [pool.submit(both[1].ticket(uuid).close) for uuid in reversed(uuids)]
        for each in closing:
            each.result()
    assert stored(own_url)["requests"] == []


# ── Titanic itself ───────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
@pytest.mark.parametrize(
    "wrong",
    [{"lease": 1.9}, {"max_waiting": 0}, {"ttl": 0}, {"heartbeat": 0}, {"liveness": 0}],
    ids=str,
)
def test_wrong_settings_leave_nothing_behind(own_url, wrong):
    with pytest.raises(SettingError, match=r"it (must be|takes)"):
        asyncio.run(Server(own_url, **wrong).run())
    assert [each.name for each in threading.enumerate() if "titanic" in each.name] == []


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_postgresql
def test_postgresql_without_tables_is_refused_with_the_command_to_run(empty_url):
    with pytest.raises(SchemaError) as told:
        Server(empty_url)
    assert "has no tables yet: run `titanic db upgrade --db 'postgresql://postgres@/test_" in str(told.value)


@pytest.mark.parametrize("name", ["titanic.db", "50 %41 ü?mode=memory#x&y=:memory.db"])
def test_a_missing_sqlite_file_is_created(bench, tmp_path, client, name):
    path = tmp_path / name
    with serving(bench.endpoint, str(path)):
        ticket = Titanic(client).submit("later")
    assert state(str(path), ticket.uuid) == "pending"
    assert {each.name.removesuffix("-wal").removesuffix("-shm") for each in tmp_path.iterdir()} == {name}


# ── the broker ───────────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
def test_titanic_can_start_before_the_broker(own_url, tmp_path):
    endpoint = f"ipc://{tmp_path}/broker"
    with ExitStack() as stack:
        stack.enter_context(serving(endpoint, own_url))
        stack.enter_context(running_broker(endpoint, limits=LIMITS, drain_timeout=0.1))
        stack.enter_context(Worker("echo", list, broker=endpoint, **BEATS))
        titanic = Titanic(stack.enter_context(Client(endpoint, timeout=TIMEOUT_SECONDS)))
        assert titanic.submit("echo", b"body").result(timeout=TIMEOUT_SECONDS) == [b"body"]

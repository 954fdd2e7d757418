"""Database failures: 200 always means stored, and Titanic recovers by itself."""

import asyncio
import sqlite3
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest
import sqlalchemy as sa
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, connected, lease, row, running_bench, serving, state, stored

from zmdp.clients import Client, ServiceError, SettingError
from zmdp.testing import running_broker
from zmdp.titanic import Titanic, TitanicError, attempts, schema
from zmdp.titanic.schema import SchemaError
from zmdp.titanic.server import Server
from zmdp.workers import Worker

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
LARGE = bytes(20_000)
"""Ballast in each request of a `Load`, so that the database grows."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shorten the timeouts of locks to five seconds; `impatient(seconds)` shortens them further."""

    def shorten(seconds):
        monkeypatch.setitem(schema.open_engine.__kwdefaults__, "lock_timeout", seconds)
        monkeypatch.setitem(schema.open_engine.__kwdefaults__, "busy_timeout", seconds)

    monkeypatch.setattr(schema, "BUSY_TIMEOUT_SECONDS", 5)
    shorten(5)
    return shorten


class Load:
    """Callers that submit requests, one after the other, during the block; and the service that executes them."""

    def __init__(self, bench, callers=3):
        self.accepted = {}
        """The body of each request that was answered with 200, by UUID."""
        self.refused = []
        """The errors that the others got."""
        self.executed = Counter()
        """How often each body was executed."""
        self._bench = bench
        self._callers = callers
        self._numbers = count()
        self._ending = False
        self._changed = threading.Condition()

    def _call(self, titanic):
        while not self._ending:
            body = b"%d" % next(self._numbers)
            try:
                uuid, told = titanic.submit("load", body, LARGE).uuid, None
            except TitanicError as error:
                uuid, told = None, (error.code, error.text)
            with self._changed:
                if uuid is None:
                    self.refused.append(told)
                else:
                    self.accepted[uuid] = body
                self._changed.notify_all()

    def _execute(self, request):
        with self._changed:
            self.executed[request[0]] += 1
        return request[0]

    @contextmanager
    def running(self):
        endpoint = self._bench.endpoint
        with (
            Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client,
            Worker("load", self._execute, broker=endpoint, concurrency=2, **BEATS),
            ThreadPoolExecutor(self._callers) as threads,
        ):
            titanic = Titanic(client)
            calls = [threads.submit(self._call, titanic) for _ in range(self._callers)]
            try:
                self.more()
                yield self
                self.more()
            finally:
                self._ending = True
            for call in calls:
                call.result()
            for uuid, body in self.accepted.items():
                assert titanic.ticket(uuid).result(timeout=TIMEOUT_SECONDS) == [body]
        assert {self.executed[body] for body in self.accepted.values()} == {1}

    def more(self):
        """Wait until some more requests are accepted."""
        self._wait_for(self.accepted, 10)

    def wait_refused(self):
        """Wait until some more requests are rejected, and return the last error."""
        self._wait_for(self.refused, 3)
        code, text = self.refused[-1]
        assert code == 500
        return text

    def _wait_for(self, answers, more):
        before = len(answers)
        with self._changed:
            assert self._changed.wait_for(lambda: len(answers) >= before + more, TIMEOUT_SECONDS)

    def check(self, url):
        """Assert that every request that was answered with 200 is in the database."""
        known = {str(each["uuid"]).replace("-", "") for each in stored(url)["requests"]}
        assert set(self.accepted) <= known


@contextmanager
def loaded(bench, url, **settings):
    """A Titanic under load."""
    load = Load(bench)
    with serving(bench.endpoint, url, **settings), load.running():
        yield load
    load.check(url)


# ── SQLite ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def writing():
    """Collect the SQLite connection of each writing transaction from now on."""
    found = []

    def executing(connection, cursor, statement, *others):
        if statement == "BEGIN IMMEDIATE":
            found.append(connection.connection.driver_connection)

    sa.event.listen(sa.engine.Engine, "before_cursor_execute", executing)
    yield found
    sa.event.remove(sa.engine.Engine, "before_cursor_execute", executing)


@on_sqlite
@pytest.mark.parametrize(
    ("pragma", "told"),
    [
        (("max_page_count = 1", "max_page_count = 1000000"), "database or disk is full"),
        (("query_only = ON", "query_only = OFF"), "attempt to write a readonly database"),
    ],
)
def test_a_database_that_rejects_writes(bench, own_url, writing, pragma, told):
    with loaded(bench, own_url) as load:
        connection = writing[-1]
        connection.execute(f"PRAGMA {pragma[0]}")
        assert load.wait_refused() == told
        connection.execute(f"PRAGMA {pragma[1]}")
    assert set(load.refused) == {(500, told)}


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
    monkeypatch.setattr(attempts, "MAX_UNSTORED_BYTES", 100_000)
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
    bench, own_url, client, monkeypatch, impatient, caplog
):
    impatient(0.05)
    monkeypatch.setattr(attempts, "MAX_UNSTORED_BYTES", 100_000)
    with serving(bench.endpoint, own_url):
        ticket = Titanic(client).submit("count", b"body")
        worker = bench.x1_worker(b"count")
        flood(own_url, worker, lambda: eventually(lambda: "database is locked" in caplog.text))
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
def test_connections_that_are_cut_under_load(bench, own_url, cluster):
    with loaded(bench, own_url) as load:
        for _ in range(10):
            cluster.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'titanic'")
            load.more()
    assert load.refused == []  # interrupted transactions are repeated over another connection


@on_postgresql
@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_server_that_is_restarted_under_load(bench, own_url, cluster, how):
    with loaded(bench, own_url):
        cluster.restart(how)


@on_postgresql
def test_a_server_that_is_away_for_a_while(bench, own_url, cluster):
    with loaded(bench, own_url) as load:
        cluster.stop()
        try:
            told = load.wait_refused()
            assert told
            assert str(cluster.url()).partition("host=")[2] not in told  # callers must not see the address
        finally:
            cluster.start()


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


def test_titanics_that_restart_under_load(bench, own_url):
    load = Load(bench)
    with ExitStack() as stack:
        running = stack.enter_context(ExitStack())
        running.enter_context(serving(bench.endpoint, own_url, drain_timeout=600))
        stack.enter_context(load.running())
        for _ in range(3):
            running.close()
            running.enter_context(serving(bench.endpoint, own_url, drain_timeout=600))
            load.more()
    load.check(own_url)
    assert load.refused == []


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

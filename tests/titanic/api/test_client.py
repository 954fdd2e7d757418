"""Titanic for Python programs: `Titanic` and `AsyncTitanic`, their tickets, and `enqueue`."""

import asyncio
import inspect
import json
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, connected, row, serving, stored

from zmdp.clients import (
    AsyncClient,
    Client,
    RequestTimeout,
    ServiceError,
    SettingError,
)
from zmdp.testing import running_broker
from zmdp.titanic import (
    AsyncTicket,
    AsyncTitanic,
    InvalidUUID,
    Titanic,
    TitanicError,
    UnknownTicket,
    enqueue,
)
from zmdp.titanic.db.store.models import Base
from zmdp.titanic.server import fetch
from zmdp.workers import Worker

STRANGE = "0123456789abcdef0123456789abcdef"
"""A UUID of no request."""
on_both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)


class Driven:
    """An asyncio object that this thread can use like its counterpart for threads."""

    def __init__(self, loop, target):
        self._loop = loop
        self._target = target

    def __getattr__(self, name):
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments, **named):
            result = found(*arguments, **named)
            if inspect.isasyncgen(result):
                return self._steps(result)
            if inspect.isawaitable(result):
                result = self._wait(result)
            return Driven(self._loop, result) if isinstance(result, AsyncTicket) else result

        return call

    def _wait(self, awaitable):
        async def wait():
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _steps(self, parts):
        try:
            while (part := self._wait(anext(parts, None))) is not None:
                yield part
        finally:
            self._wait(parts.aclose())

    def __repr__(self):
        return repr(self._target).removeprefix("Async")

    def __enter__(self):
        self._wait(self._target.__aenter__())
        return self

    def __exit__(self, *error):
        self._wait(self._target.__aexit__(*error))


@contextmanager
def running_loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(cancel_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def cancel_tasks():
    """Cancel all other tasks of the loop: after a failure, threads that wait for them would never end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def opened(twin, endpoint, **settings):
    """Open the API for threads, or the one for asyncio made to look like it."""
    settings = {"timeout": TIMEOUT_SECONDS, **settings}
    if twin == "threads":
        with Client(endpoint, retries=0, **settings) as opened:
            yield Titanic(opened)
        return
    with running_loop() as loop:

        async def make():
            return AsyncClient(endpoint, **settings)

        asynchronous = asyncio.run_coroutine_threadsafe(make(), loop).result()
        try:
            yield Driven(loop, AsyncTitanic(asynchronous))
        finally:
            asyncio.run_coroutine_threadsafe(asynchronous.close(), loop).result()


@pytest.fixture
def backend(request):
    """SQLite, because the API does not depend on the database, unless a test asks for others."""
    return getattr(request, "param", "sqlite")


@pytest.fixture(params=["threads", "asyncio"])
def twin(request):
    return request.param


@pytest.fixture
def endpoint():
    with running_broker(limits=LIMITS, drain_timeout=0.1) as broker:
        yield broker.endpoints[0]


@pytest.fixture
def server(endpoint, url):
    with serving(endpoint, url) as server:
        yield server


@pytest.fixture
def titanic(twin, endpoint, server):
    with opened(twin, endpoint) as titanic:
        yield titanic


@pytest.fixture
def echo(endpoint):
    with Worker("echo", list, broker=endpoint, concurrency=2, **BEATS):
        yield


@pytest.fixture
def gate():
    """The event that `held` waits for."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def held(endpoint, gate):
    """The service `held` yields two PARTIALs, and the rest once `gate` is open."""

    def hold(request):
        yield b"one"
        yield [b"two", request[0]]
        gate.wait(TIMEOUT_SECONDS)
        yield b"three"
        return b"end"

    with Worker("held", hold, broker=endpoint, **BEATS):
        yield
        gate.set()


# ── tickets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("echo")
def test_submit_and_result(titanic):
    ticket = titanic.submit("echo", b"one", b"", b"three")
    assert UUID(ticket.uuid).hex == ticket.uuid
    assert repr(ticket) == f"Ticket('{ticket.uuid}')"
    for _ in range(2):
        reply = ticket.result()
        assert reply == [b"one", b"", b"three"]
        assert reply.final
    assert titanic.submit(b"echo").result(timeout=TIMEOUT_SECONDS) == [b""]


@pytest.mark.usefixtures("echo")
def test_a_uuid_can_be_given_in_any_form(titanic):
    uuid = titanic.submit("echo", b"body").uuid
    for written in (uuid, uuid.upper(), uuid.encode(), UUID(uuid), str(UUID(uuid))):
        ticket = titanic.ticket(written)
        assert ticket.uuid == uuid
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"body"]


def test_an_invalid_uuid_is_not_even_sent(titanic):
    for wrong in ("", "../../etc/passwd", "0" * 31, "0" * 33, "g" * 32, b"\xff" * 32, "0x" + "1" * 30, "é" * 32, 5):
        with pytest.raises(InvalidUUID, match=re.escape(f"{wrong!r} is not a UUID: it must be 32 hex digits")) as told:
            titanic.ticket(wrong)
        assert isinstance(told.value, ValueError)
        assert not isinstance(told.value, SettingError)


@pytest.mark.usefixtures("echo")
def test_an_invalid_timeout_is_rejected(titanic):
    ticket = titanic.submit("echo")
    for wrong in (-1, "1", True):
        with pytest.raises(SettingError, match="timeout"):
            ticket.result(timeout=wrong)
        with pytest.raises(SettingError, match="timeout"):
            list(ticket.partials(timeout=wrong))


@pytest.mark.usefixtures("echo")
def test_a_closed_request_is_unknown(titanic, url):
    ticket = titanic.submit("echo")
    ticket.result()
    ticket.close()
    ticket.close()
    assert stored(url)["requests"] == []
    for ask in (ticket.ready, ticket.result, lambda: ticket.result(timeout=0), lambda: list(ticket.partials())):
        with pytest.raises(UnknownTicket, match=f"Titanic does not know request {ticket.uuid}") as told:
            ask()
        assert isinstance(told.value, TitanicError)
        assert isinstance(told.value, LookupError)
        assert told.value.code == 400
    with pytest.raises(UnknownTicket):
        titanic.ticket(STRANGE).result()


@pytest.mark.usefixtures("echo")
def test_a_ticket_closes_itself_at_the_end_of_a_block(titanic, url):
    with titanic.submit("echo", b"body") as ticket:
        assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"body"]
        assert len(stored(url)["requests"]) == 1
    assert stored(url)["requests"] == []
    with pytest.raises(ZeroDivisionError), titanic.submit("echo"):
        raise ZeroDivisionError
    assert stored(url)["requests"] == []


@pytest.mark.usefixtures("held")
def test_partials_come_as_they_are_made_and_again_later(titanic, gate):
    ticket = titanic.submit("held", b"body")
    live = ticket.partials()
    assert [next(live), next(live)] == [[b"one"], [b"two", b"body"]]
    assert next(ticket.partials(1)) == [b"two", b"body"]
    with pytest.raises(RequestTimeout):
        list(ticket.partials(2, timeout=0.05))
    gate.set()
    assert [list(part) for part in live] == [[b"three"]]
    assert [list(part) for part in ticket.partials()] == [[b"one"], [b"two", b"body"], [b"three"]]
    assert [list(part) for part in ticket.partials(2)] == [[b"three"]]
    assert list(ticket.partials(3)) == []
    assert ticket.result(timeout=0) == [b"end"]


# ── what is asked for ────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_options_are_stored(titanic, url):
    before = time.time()
    ticket = titanic.submit(
        "later", b"body", key="k", key_ttl=60, delay=3600, priority=7, retries=3, backoff=0.25, ttl=86400,
        headers={"tenant": "größer"},
    )  # fmt: skip
    told = row(url, ticket.uuid)
    assert (told["service"], told["state"], told["key"], told["priority"]) == ("later", "delayed", "k", 7)
    assert (told["retries"], told["backoff"], told["result_ttl"]) == (3, 0.25, 86400)
    assert json.loads(told["headers"]) == {"tenant": "größer"}
    assert before <= told["created"] <= time.time()
    assert told["due"] - told["created"] == pytest.approx(3600)
    (key,) = stored(url)["keys"]
    assert key["expires"] - told["created"] == pytest.approx(60)


def test_a_full_titanic_rejects_requests(twin, endpoint, url):
    with serving(endpoint, url, max_waiting=1), opened(twin, endpoint) as titanic:
        titanic.submit("later")
        with pytest.raises(TitanicError, match="full") as told:
            titanic.submit("later")
        assert told.value.code == 429


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_request_raises_what_its_handler_raised(titanic, endpoint):
    def fail(request):
        yield b"part"
        raise ServiceError(404, "no such größe", b"\0detail")

    def crash(request):
        raise ZeroDivisionError("by zero")

    with Worker("fail", fail, broker=endpoint, **BEATS), Worker("crash", crash, broker=endpoint, **BEATS):
        ticket = titanic.submit("fail")
        for _ in range(2):
            with pytest.raises(ServiceError) as told:
                ticket.result(timeout=TIMEOUT_SECONDS)
            assert (told.value.code, told.value.text, told.value.detail) == (404, "no such größe", b"\0detail")
            assert "service 'fail' failed with 404: no such größe" in str(told.value)
        assert ticket.ready()
        parts = ticket.partials()
        assert next(parts) == [b"part"]
        with pytest.raises(ServiceError, match="no such größe"):
            next(parts)
        with pytest.raises(ServiceError, match="ZeroDivisionError: by zero") as told:
            titanic.submit("crash").result(timeout=TIMEOUT_SECONDS)
        assert (told.value.code, told.value.detail) == (500, None)


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_task_stops_waiting(endpoint, url, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_CALLERS", 1)

    async def scenario():
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as asynchronous:
            ticket = await AsyncTitanic(asynchronous).submit("later")

            async def waiting():
                (told,) = await asynchronous.request("mmi.workers", b"titanic.reply")
                return sum(each["busy"] for each in json.loads(told)["workers"])

            for _ in range(3):
                task = asyncio.ensure_future(ticket.result())
                while not await waiting():
                    await asyncio.sleep(0.01)
                task.cancel()
                while await waiting():
                    await asyncio.sleep(0.01)
                with pytest.raises(asyncio.CancelledError):
                    await task

    with serving(endpoint, url):
        asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_SECONDS))


# ── clients of MDP/0.2 and 0.1 ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
@pytest.mark.usefixtures("server")
def test_a_client_of_mdp(twin, endpoint, protocol):
    with opened(twin, endpoint, protocol=protocol) as titanic:
        ticket = titanic.submit("echo", b"one", b"")
        assert not ticket.ready()
        for timeout in (0, 0.1):
            with pytest.raises(RequestTimeout):
                ticket.result(timeout=timeout)
        with Worker("echo", list, broker=endpoint, **BEATS):
            assert ticket.result() == [b"one", b""]
        assert ticket.result(timeout=0) == [b"one", b""]
        ticket.close()
        with pytest.raises(UnknownTicket):
            ticket.result()
        with pytest.raises(SettingError):
            titanic.submit("echo", key="k")
        with pytest.raises(SettingError):
            next(titanic.ticket(STRANGE).partials())


# ── enqueue ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def orders(own_url):
    """The engine of a database with a table of the caller's own beside Titanic's."""
    engine = sa.create_engine(sa.make_url(own_url).set(drivername=DRIVERS[own_url.partition(":")[0]]))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (number INTEGER PRIMARY KEY)"))
    yield engine
    engine.dispose()


DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


@pytest.fixture
def shop(endpoint, own_url, orders):
    """A client of a Titanic with that database, and the executed requests by body."""
    executed = Counter()

    def ship(request):
        executed[request[0]] += 1
        return [b"shipped", *request]

    with ExitStack() as stack:
        stack.enter_context(serving(endpoint, own_url))
        stack.enter_context(Worker("ship", ship, broker=endpoint, **BEATS))
        yield stack.enter_context(opened("threads", endpoint)), executed


@on_both
def test_an_enqueued_request_runs_once_committed(shop, orders, own_url):
    titanic, executed = shop
    with Session(orders) as session:
        session.execute(sa.text("INSERT INTO orders VALUES (1)"))
        uuid = enqueue(session, "ship", b"1", b"", headers={"a": "b"}, priority=3)
        assert executed == {}
        session.commit()
    assert titanic.ticket(uuid).result(timeout=TIMEOUT_SECONDS) == [b"shipped", b"1", b""]
    assert executed == {b"1": 1}
    told = row(own_url, uuid)
    assert (told["priority"], json.loads(told["headers"]), told["attempts"]) == (3, {"a": "b"}, 1)


@on_both
def test_an_enqueued_request_never_runs_if_rolled_back(shop, orders, own_url):
    titanic, executed = shop
    with Session(orders) as session:
        lost = enqueue(session, "ship", b"lost", key="k")
        session.rollback()
        with session.begin():
            session.execute(sa.text("INSERT INTO orders VALUES (1)"))
            savepoint = session.begin_nested()
            undone = enqueue(session, "ship", b"undone")
            savepoint.rollback()
            kept = enqueue(session, "ship", b"kept", key="k")
    assert titanic.ticket(kept).result(timeout=TIMEOUT_SECONDS) == [b"shipped", b"kept"]
    for uuid in (lost, undone):
        with pytest.raises(UnknownTicket):
            titanic.ticket(uuid).result()
    assert executed == {b"kept": 1}
    assert [each["key"] for each in stored(own_url)["keys"]] == ["k"]


@on_both
def test_submit_and_enqueue_share_keys(shop, orders, own_url):
    titanic, executed = shop
    with Session(orders) as session, session.begin():
        first = enqueue(session, "ship", b"1", key="k")
        assert enqueue(session, "ship", b"2", key="k") == first
    assert titanic.submit("ship", b"3", key="k").uuid == first
    titanic.ticket(first).result(timeout=TIMEOUT_SECONDS)
    with Session(orders) as session, session.begin():
        assert enqueue(session, "ship", b"4", key="k") == first
        other = enqueue(session, "ship", b"5", key="other", key_ttl=60)
    titanic.ticket(other).result(timeout=TIMEOUT_SECONDS)
    assert executed == {b"1": 1, b"5": 1}


@on_both
def test_enqueue_accepts_the_options_of_submit(orders, own_url):
    with Session(orders) as session, session.begin():
        uuid = enqueue(session, b"later", delay=3600, retries=2, backoff=0.5, ttl=60)
        with connected(own_url) as other:
            assert other.scalar(sa.text("SELECT count(*) FROM titanic_requests")) == 0
    told = row(own_url, uuid)
    assert (told["state"], told["retries"], told["backoff"], told["result_ttl"]) == ("delayed", 2, 0.5, 60)
    assert told["due"] - told["created"] == pytest.approx(3600)


@on_both
def test_enqueue_accepts_a_connection_and_a_scoped_session(shop, orders):
    titanic, executed = shop
    with orders.begin() as connection:
        kept = enqueue(connection, "ship", b"kept")
    with orders.connect() as connection:
        lost = enqueue(connection, "ship", b"lost")
        connection.rollback()
    session = scoped_session(sessionmaker(orders))
    also = enqueue(session, "ship", b"also")
    session.commit()
    session.remove()
    assert [titanic.ticket(uuid).result(timeout=TIMEOUT_SECONDS)[1] for uuid in (kept, also)] == [b"kept", b"also"]
    with pytest.raises(UnknownTicket):
        titanic.ticket(lost).result()
    assert executed == {b"kept": 1, b"also": 1}


@on_both
def test_enqueue_uses_the_bind_of_titanics_tables(orders, own_url):
    elsewhere = sa.create_engine("sqlite://")
    with Session(elsewhere, binds={Base: orders}) as session, session.begin():
        uuid = enqueue(session, "later")
    elsewhere.dispose()
    assert row(own_url, uuid)["service"] == "later"


@on_both
def test_enqueue_reports_missing_tables(empty_url):
    engine = sa.create_engine(sa.make_url(empty_url).set(drivername=DRIVERS[empty_url.partition(":")[0]]))
    with Session(engine) as session, pytest.raises(TitanicError, match="titanic db upgrade"):
        enqueue(session, "later")
    engine.dispose()
    with pytest.raises(SettingError, match="is not a session"):
        enqueue("session", "later")


@on_both
def test_an_invalid_enqueue_stores_nothing(orders, own_url):
    with Session(orders) as session:
        for service_, asked, told in (
            ("later", {"priority": 10}, "priority"),
            ("later", {"delay": "x"}, "delay"),
            ("later", {"key": "a\0b"}, "key"),
            ("later", {"headers": {"a": 1}}, "headers"),
            ("titanic.request", {}, "cannot be called through Titanic"),
            ("no\tname", {}, "is not a valid service name"),
        ):
            with pytest.raises(SettingError, match=told):
                enqueue(session, service_, b"body", **asked)
        session.commit()
    assert stored(own_url)["requests"] == []


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_an_uncommitted_key_does_not_block_requests_without_it(shop, orders, own_url, pool):
    titanic, executed = shop
    with Session(orders) as session:
        first = enqueue(session, "ship", b"first", key="k")
        same = pool.submit(titanic.submit, "ship", b"same", key="k")
        eventually(lambda: blocked(own_url))
        others = [pool.submit(titanic.submit, "ship", b"other") for _ in range(5)]
        session.commit()
        assert same.result(TIMEOUT_SECONDS).uuid == first
        assert {each.result(TIMEOUT_SECONDS).result(timeout=TIMEOUT_SECONDS)[1] for each in others} == {b"other"}
    assert titanic.ticket(first).result(timeout=TIMEOUT_SECONDS) == [b"shipped", b"first"]
    assert executed == {b"first": 1, b"other": 5}


def blocked(url):
    with connected(url) as connection:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return connection.scalar(sa.text(waiting))


@pytest.mark.parametrize("kind", [Titanic, AsyncTitanic])
def test_an_endpoint_is_no_client(kind):
    with pytest.raises(SettingError, match="it must be of type"):
        kind("tcp://127.0.0.1:5555")

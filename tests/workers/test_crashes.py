"""Errors in zmdp itself, in workers: no request is held in silence, whatever the error is."""

import asyncio
import re

import pytest

from zmdp.clients import (
    AsyncClient,
    Client,
    RequestTimeout,
    ServiceError,
    WorkerLost,
)
from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient
from zmdp.interop.freelance.worker import AsyncFreelanceWorker, FreelanceWorker
from zmdp.interop.freelance.worker.session import FreelanceServerSession
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, Worker, aio_connection, handling
from zmdp.workers.session import outgoing, session

TOLD = "an error in zmdp itself, at the {}: TypeError('a bug')"


def bug(*arguments, **settings):
    raise TypeError("a bug")


@pytest.fixture
def endpoint():
    with running_broker(limits=Limits(max_attempts=1), drain_timeout=0.0) as server:
        yield server.endpoints[0]


def with_handler(kind):
    """A handler for this kind of worker."""
    if kind in {Worker, FreelanceWorker}:
        return lambda request: request

    async def handle(request):
        return request

    return handle


def ask(kind, endpoint):
    """Make two requests while a worker of this kind serves; return what each raised, or its reply."""

    def result(call):
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    if kind is Worker:
        with Worker("s", with_handler(kind), broker=endpoint), Client(endpoint, timeout=60) as client:
            return [result(lambda: client.request("s", b"x")) for _ in range(2)]

    async def run():
        async with (
            AsyncWorker("s", with_handler(kind), broker=endpoint),
            AsyncClient(endpoint, timeout=None) as client,
        ):
            return await asyncio.gather(*(client.request("s", b"x") for _ in range(2)), return_exceptions=True)

    return asyncio.run(run())


@pytest.fixture(params=[Worker, AsyncWorker])
def kind(request):
    return request.param


def check_told(errors, where="worker"):
    for error in errors:
        assert type(error) is ServiceError
        assert error.code == 500
        assert TOLD.format(where) in str(error)


def test_a_handler_that_cannot_be_started(endpoint, monkeypatch, logged):
    monkeypatch.setattr(aio_connection, "begin_task", lambda work, *_: (work.close(), bug()))
    check_told(ask(AsyncWorker, endpoint))
    assert logged("s: an error in zmdp itself, please report it")


def test_a_failure_that_cannot_be_reported(kind, endpoint, monkeypatch):
    """The handler's result cannot be converted, and then its error cannot be either."""
    monkeypatch.setattr(handling.HandlerAdapter, "frames", bug)
    for module in ("mdworker", "aio_handling"):
        monkeypatch.setattr(f"zmdp.workers.{module}.failed", bug)
    check_told(ask(kind, endpoint))


@pytest.mark.pure_only  # compiled code does not look up its own methods
def test_a_reply_that_cannot_be_sent(kind, endpoint, monkeypatch):
    monkeypatch.setattr(session.WorkerSession, "final", bug)
    check_told(ask(kind, endpoint))


@pytest.mark.pure_only
def test_a_reply_that_fails_halfway(kind, endpoint, monkeypatch, logged):
    """The session no longer holds the request, but nothing was sent: the broker ends it when the connection does."""
    monkeypatch.setattr(outgoing.Outgoing, "final", bug)
    assert {type(each) for each in ask(kind, endpoint)} == {WorkerLost}
    assert logged("s: an error in zmdp itself, please report it; reconnecting")


@pytest.mark.pure_only
def test_an_error_that_cannot_be_sent_either(kind, endpoint, monkeypatch):
    """The worker gives its requests up, and is there again."""
    with monkeypatch.context() as patched:
        patched.setattr(session.WorkerSession, "final", bug)
        patched.setattr(session.WorkerSession, "error", bug)
        assert {type(each) for each in ask(kind, endpoint)} == {WorkerLost}
    assert ask(kind, endpoint) == [[b"x"]] * 2


@pytest.mark.pure_only
def test_an_error_in_the_worker_s_loop(kind, endpoint, monkeypatch, logged):
    """Once: the worker connects again, and serves."""
    take, calls = session.WorkerSession._take_request, []

    def given(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            bug()
        take(*arguments)

    monkeypatch.setattr(session.WorkerSession, "_take_request", given)
    monkeypatch.setattr(session, "BACKOFF_SECONDS", (0.01, 0.1))
    results = ask(kind, endpoint)
    assert WorkerLost in {type(each) for each in results}
    assert all(type(each) is WorkerLost or each == [b"x"] for each in results)
    assert logged("s: an error in zmdp itself, please report it; reconnecting")


def test_a_task_that_is_cancelled_before_it_begins_leaves_its_requests_to_the_next(endpoint, monkeypatch):
    begun = []

    def begin_and_cancel(*arguments):
        begun.append(begin_task(*arguments))
        if len(begun) < 3:
            begun[-1].cancel()
        return begun[-1]

    async def echo(request):
        return request

    async def run():
        async with AsyncWorker("s", echo, broker=endpoint), AsyncClient(endpoint, timeout=None) as client:
            return await asyncio.gather(*(client.request("s", b"%d" % n) for n in range(9)))

    begin_task = aio_connection.begin_task
    monkeypatch.setattr(aio_connection, "begin_task", begin_and_cancel)
    assert asyncio.run(run()) == [[b"%d" % n] for n in range(9)]


@pytest.mark.parametrize("kind", [FreelanceWorker, AsyncFreelanceWorker])
def test_freelance_servers_tell_as_well(kind, monkeypatch, tmp_path):
    place = f"ipc://{tmp_path}/server"
    monkeypatch.setattr(handling.HandlerAdapter, "frames", bug)
    for module in ("mdworker", "aio_handling"):
        monkeypatch.setattr(f"zmdp.workers.{module}.failed", bug)
    if kind is FreelanceWorker:
        with FreelanceWorker(place, with_handler(kind)), FreelanceClient(place, timeout=60) as client:
            with pytest.raises(ServiceError, match=re.escape(TOLD.format("worker"))):
                client.request(b"x")
        return

    async def run():
        async with (
            AsyncFreelanceWorker(place, with_handler(kind)),
            AsyncFreelanceClient(place, timeout=60) as client,
        ):
            with pytest.raises(ServiceError, match=re.escape(TOLD.format("worker"))):
                await client.request(b"x")

    asyncio.run(run())


@pytest.mark.pure_only  # as above
def test_a_freelance_server_whose_session_fails_serves_the_next_client(monkeypatch, tmp_path):
    place, finish, calls = f"ipc://{tmp_path}/server", FreelanceServerSession._finish, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) <= 2:
            bug()
        return finish(*arguments)

    monkeypatch.setattr(FreelanceServerSession, "_finish", once)
    with FreelanceWorker(place, lambda request: request) as worker:
        with (
            FreelanceClient(place, timeout=1) as client,
            pytest.raises(RequestTimeout),
        ):
            client.request(b"x")
        with FreelanceClient(place, timeout=60) as client:
            assert client.request(b"y") == [b"y"]
        assert worker.started

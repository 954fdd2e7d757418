"""Clients of several brokers over real connections: nothing fails while brokers drain, die and come back."""

import asyncio
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from threading import Event

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.x1_broker import X1Router
from support.x1_client import DISCONNECT, HEARTBEAT

from zmdp.clients import AsyncClient, Client, RequestTimeout, RetryLater
from zmdp.mdp import wire
from zmdp.mdp.wire import batch, x1


@pytest.fixture
def routers():
    with X1Router() as first, X1Router() as second:
        yield first, second


@pytest.fixture
def quick_probes(monkeypatch):
    monkeypatch.setattr("zmdp.clients.failover.PROBE_INTERVAL", (0.05, 0.1))


def refuse(router, *asked):
    """Answer requests as a draining broker does."""
    packed = batch.Batch((asked[0].sender, b""), wire.CX1)
    for each in asked:
        packed.error(x1.CLIENT_ERROR, each.number, 503, b"the broker is draining", [])
    router.send(*packed.messages()[0])


def echo(router, *asked):
    router.reply(*((each, each.body) for each in asked))


def answer_probe(router, command=HEARTBEAT):
    """Wait for a probe and answer it."""
    sender, *message = router.recv()
    assert message == HEARTBEAT
    router.send(sender, *command)


class Threads:
    """The same calls, made by threads."""

    def __init__(self, endpoints, **settings):
        self._client = Client(endpoints, timeout=TIMEOUT_SECONDS, retries=0, **settings)
        self._pool = ThreadPoolExecutor(20)

    @property
    def endpoint(self):
        return self._client.endpoint

    def ask(self, body):
        return self._pool.submit(self._client.request, "echo", body)

    def stream(self, **how):
        return self._pool.submit(lambda: [list(part) for part in self._client.stream("echo", b"x", **how)])

    def close(self):
        self._client.close()
        self._pool.shutdown()


class Futures(Threads):
    """The same calls as futures, which a thread of the client's serves."""

    def ask(self, body):
        return self._client.submit("echo", body)


class Asyncio:
    """The same calls, made by tasks of an event loop in a thread."""

    def __init__(self, endpoints, **settings):
        self._pool = ThreadPoolExecutor(1)
        self._started, self._stop = Event(), None
        self._running = self._pool.submit(asyncio.run, self._run(endpoints, settings))
        assert self._started.wait(TIMEOUT_SECONDS)

    async def _run(self, endpoints, settings):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncClient(endpoints, timeout=TIMEOUT_SECONDS, **settings) as self._client:
            self._started.set()
            await self._stop.wait()

    @property
    def endpoint(self):
        return self._client.endpoint

    def ask(self, body):
        return asyncio.run_coroutine_threadsafe(self._client.request("echo", body), self._loop)

    def stream(self, **how):
        async def collect():
            return [list(part) async for part in self._client.stream("echo", b"x", **how)]

        return asyncio.run_coroutine_threadsafe(collect(), self._loop)

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._running.result(TIMEOUT_SECONDS)
        self._pool.shutdown()


KINDS = [Threads, Futures, Asyncio]
every_kind = pytest.mark.parametrize("kind", KINDS)


@contextmanager
def client_of(kind, endpoints, **settings):
    client = kind(endpoints, **settings)
    try:
        yield client
    finally:
        client.close()


# ── brokers written by hand ──────────────────────────────────────────────────────────────────────────────────────────


@every_kind
def test_what_is_outstanding_is_answered_by_the_draining_broker(kind, routers):
    first, second = routers
    with client_of(kind, [first.endpoint, second.endpoint]) as client:
        old = [client.ask(b"old %d" % n) for n in range(3)]
        asked = first.requests(3)
        first.send(asked[0].sender, *DISCONNECT)
        eventually(lambda: client.endpoint == second.endpoint)
        new = client.ask(b"new")
        echo(second, *second.requests(1))
        assert new.result(TIMEOUT_SECONDS) == [b"new"]
        assert not any(each.done() for each in old)
        echo(first, *asked[:2])
        echo(first, asked[2])
        assert [each.result(TIMEOUT_SECONDS) for each in old] == [[b"old 0"], [b"old 1"], [b"old 2"]]


@every_kind
def test_what_the_draining_broker_refuses_is_sent_to_the_next(kind, routers):
    first, second = routers
    with client_of(kind, [first.endpoint, second.endpoint]) as client:
        asking = [client.ask(b"%d" % n) for n in range(3)]
        asked = first.requests(3)
        refuse(first, asked[1], asked[2])
        again = second.requests(2)
        assert [(each.number, each.body) for each in again] == [(each.number, each.body) for each in asked[1:]]
        echo(second, *again)
        echo(first, asked[0])
        assert sorted(each.result(TIMEOUT_SECONDS) for each in asking) == [[b"0"], [b"1"], [b"2"]]


@every_kind
def test_the_draining_broker_ends_before_it_has_answered(kind, routers):
    _, second = routers
    with ExitStack() as ends:
        first = ends.enter_context(X1Router())
        client = ends.enter_context(client_of(kind, [first.endpoint, second.endpoint]))
        asking = [client.ask(b"%d" % n) for n in range(2)]
        asked = first.requests(2)
        first.send(asked[0].sender, *DISCONNECT)
        eventually(lambda: client.endpoint == second.endpoint)
        echo(first, asked[0])
        wait([asking[asked[0].body != [b"0"]]], TIMEOUT_SECONDS)
        first.__exit__(None, None, None)
        echo(second, *second.requests(1))
        assert [each.result(TIMEOUT_SECONDS) for each in asking] == [[b"0"], [b"1"]]


@every_kind
def test_a_stream_goes_on_at_the_draining_broker(kind, routers):
    first, second = routers
    with client_of(kind, [first.endpoint, second.endpoint]) as client:
        parts = client.stream()
        (asked,) = first.requests(1)
        first.reply((asked, [b"1"]), final=False)
        first.send(asked.sender, *DISCONNECT)
        eventually(lambda: client.endpoint == second.endpoint)
        first.reply((asked, [b"2"]), final=False)
        first.reply((asked, [b"3"]))
        assert parts.result(TIMEOUT_SECONDS) == [[b"1"], [b"2"], [b"3"]]


@every_kind
def test_a_stream_that_times_out_at_the_draining_broker_is_cancelled_there(kind, routers):
    first, second = routers
    with client_of(kind, [first.endpoint, second.endpoint]) as client:
        stream = client.stream(timeout=0.2)
        (asked,) = first.requests(1)
        first.send(asked.sender, *DISCONNECT)
        assert isinstance(stream.exception(TIMEOUT_SECONDS), RequestTimeout)
        while (message := first.recv())[1:] == HEARTBEAT:
            pass
        (cancel,) = batch.from_client(message, 2, (asked.sender, b""), 1 << 30, 1 << 30)
        assert (type(cancel), cancel.id) == (wire.Cancel, asked.number)


@every_kind
def test_a_client_returns_with_requests_outstanding(kind, routers, quick_probes):
    del quick_probes
    _, second = routers
    with ExitStack() as ends:
        first = ends.enter_context(X1Router())
        client = ends.enter_context(client_of(kind, [first.endpoint, second.endpoint], heartbeat=0.2, liveness=1000))
        asking = client.ask(b"old")
        first.requests(1)
        first.__exit__(None, None, None)
        (asked,) = second.requests(1)
        first = ends.enter_context(X1Router(first.endpoint))
        answer_probe(first, DISCONNECT)  # it drains: the client stays
        answer_probe(first)
        eventually(lambda: client.endpoint == first.endpoint)
        new = client.ask(b"new")
        echo(first, *first.requests(1))
        assert new.result(TIMEOUT_SECONDS) == [b"new"]
        assert not asking.done()
        echo(second, asked)
        assert asking.result(TIMEOUT_SECONDS) == [b"old"]


@every_kind
def test_closing_closes_old_connections_and_probes(kind, routers, quick_probes):
    del quick_probes
    first, second = routers
    with client_of(kind, [first.endpoint, second.endpoint]) as client:
        asking = [client.ask(b"x")]
        asked = first.requests(1)
        first.send(asked[0].sender, *DISCONNECT)
        eventually(lambda: client.endpoint == second.endpoint)
        asking.append(client.ask(b"x"))
        second.requests(1)
        while first.recv()[0] == asked[0].sender:  # a HEARTBEAT over the old connection
            pass  # until the first is probed
    assert [type(each.exception(TIMEOUT_SECONDS)).__name__ for each in asking] == ["ClosedError"] * 2
    for router in (first, second):
        while (message := router.recv())[1:] == HEARTBEAT:
            pass
        assert [type(command) for command in batch.from_client(message, 2, (), 0, 0)] == [wire.Cancel]


def test_with_one_broker_a_refusal_fails(routers):
    first, _ = routers
    with Client(first.endpoint, timeout=TIMEOUT_SECONDS) as client:
        asking = client.submit("echo", b"x")
        (asked,) = first.requests(1)
        first.send(asked.sender, *DISCONNECT)
        refuse(first, asked)
        with pytest.raises(RetryLater, match="draining"):
            asking.result(TIMEOUT_SECONDS)


# ── real brokers ─────────────────────────────────────────────────────────────────────────────────────────────────────

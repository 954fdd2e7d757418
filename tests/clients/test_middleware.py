"""Middleware of clients: around requests, streams, futures and rows."""

import asyncio
import threading
from contextlib import closing
from contextvars import ContextVar
from functools import partial

import pytest
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import AsyncClient, Client, ServiceError, Services, Worker
from zmdp.clients import ClosedError, Reply, SettingError
from zmdp.clients.middleware import MAX_THREADS
from zmdp.testing import running_broker

TENANT = ContextVar("tenant", default="nobody")


@pytest.fixture(scope="module")
def endpoint():
    """A broker with `told`, which replies with its tenant header and the body, `twice`, which streams, and `wait`."""

    def told(request):
        return [request.headers.get("tenant", "").encode(), request[0]]

    def twice(request):
        yield told(request)
        return told(request)

    with running_broker() as server:
        at = server.endpoints[0]
        with Worker("told", told, broker=at), Worker("twice", twice, broker=at), Worker("waits", waits, broker=at):
            yield at


def waits(request):
    HELD.wait(TIMEOUT_SECONDS)
    return request


HELD = threading.Event()


def threads_of_middleware():
    return [each for each in threading.enumerate() if each.name.startswith("zmdp-middleware")]


class Seen:
    """Middleware of each kind, and what it has seen."""

    def __init__(self):
        self.requests = []

    def note(self, request):
        self.requests.append((request.service, len(request.body)))
        request.headers["tenant"] = TENANT.get()

    def sync(self, request, call_next):
        self.note(request)
        return call_next(request)

    async def asynchronous(self, request, call_next):
        self.note(request)
        return await call_next(request)


@pytest.fixture
def tenant():
    token = TENANT.set("a")
    yield
    TENANT.reset(token)


def rows(outcomes):
    return [list(each) for each in outcomes]


@pytest.mark.usefixtures("tenant")
def test_middleware_surrounds_what_a_client_sends(endpoint):
    seen = Seen()
    with Client(endpoint, timeout=TIMEOUT_SECONDS, middleware=[seen.sync]) as client:
        assert client.request("told", b"x") == [b"a", b"x"]
        assert list(client.stream("twice", b"x")) == [[b"a", b"x"], [b"a", b"x"]]
        futures = [client.submit("told", b"%d" % n) for n in range(200)]
        assert rows(each.result() for each in futures) == [[b"a", b"%d" % n] for n in range(200)]
        assert seen.requests == [("told", 1), ("twice", 1), *(200 * [("told", 1)])]
        seen.requests.clear()
        outcomes = client.map("told", [b"%d" % n for n in range(100)])
        assert rows(outcomes) == [[b"a", b"%d" % n] for n in range(100)]
        assert seen.requests == 100 * [("told", 1)]
        assert client.endpoint == endpoint


@pytest.mark.usefixtures("tenant")
def test_middleware_surrounds_what_an_asyncio_client_sends(endpoint):
    seen = Seen()

    async def call():
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, middleware=[seen.asynchronous]) as client:
            assert await client.request("told", b"x") == [b"a", b"x"]
            assert [part async for part in client.stream("twice", b"x")] == [[b"a", b"x"], [b"a", b"x"]]
            outcomes = [each async for each in client.map("told", [b"x"] * 100)]
            assert rows(outcomes) == [[b"a", b"x"]] * 100
            assert seen.requests == [("told", 1), ("twice", 1), *(100 * [("told", 1)])]
            with pytest.raises(SettingError, match="needs a client without middleware"):
                client.begin(None, "told")
            assert client.endpoint == endpoint

    asyncio.run(call())


def test_middleware_may_change_refuse_and_repeat_requests_and_replace_replies(endpoint):
    def outer(request, call_next):
        if request.service == "secret":
            raise ServiceError(403, "not from here")
        return call_next(request)

    def inner(request, call_next):
        if request.body == [b"known"]:
            return Reply([b"cached"], service=request.service, final=True)
        replies = [call_next(request)]
        request.service, request.body = "told", [b"changed"]
        replies.append(call_next(request))
        return [*replies[0], *replies[1]]

    with Client(endpoint, middleware=[outer, inner], timeout=TIMEOUT_SECONDS) as client:
        assert client.request("told", b"known") == [b"cached"]
        assert client.request("told", b"x") == [b"", b"x", b"", b"changed"]
        with pytest.raises(ServiceError, match="not from here"):
            client.request("secret")
        with pytest.raises(ServiceError, match="not from here"):
            client.submit("secret").result()
        assert {type(each) for each in client.map("secret", [b"x"])} == {ServiceError}
        client.send("told", b"the lower level has no middleware")
        assert client.recv() == [b"", b"the lower level has no middleware"]
        client.reset()


def test_values_of_futures_are_read(endpoint):
    services = Services()
    double = services.service("double")(lambda n: 2 * n)
    seen = Seen()
    worker = Worker("double", lambda n: 2 * n, broker=endpoint, codec="json")
    with worker, Client(endpoint, timeout=TIMEOUT_SECONDS, middleware=[seen.sync]) as client:
        assert client.submit(double, 21).result() == 42


def test_what_is_outstanding_ends_with_the_client_and_with_map(endpoint):
    HELD.clear()
    seen = Seen()
    try:
        with Client(endpoint, timeout=TIMEOUT_SECONDS, middleware=[seen.sync]) as client:
            with closing(client.map("waits", iter(lambda: b"x", None), window=2)) as outcomes:
                threading.Timer(0.2, HELD.set).start()
                assert next(outcomes) == [b"x"]
            HELD.clear()
            futures = [client.submit("waits", b"x") for _ in range(2 * MAX_THREADS)]
            eventually(lambda: len(threads_of_middleware()) == MAX_THREADS)
        for future in futures:
            with pytest.raises(ClosedError):
                future.result(TIMEOUT_SECONDS)
        with pytest.raises(ClosedError):
            client.submit("waits", b"x")
        eventually(lambda: not threads_of_middleware())
    finally:
        HELD.set()


@pytest.mark.parametrize(
    ("kind", "middleware", "problem"),
    [
        (Client, Seen().asynchronous, "middleware Seen.asynchronous is async: a Client needs a def"),
        (AsyncClient, Seen().sync, "middleware Seen.sync is a def: an AsyncClient needs async def"),
        (Client, partial(Seen().asynchronous), "middleware Seen.asynchronous is async: a Client needs a def"),
        (Client, 5, "middleware 5 is not a function of a request and call_next"),
    ],
)
def test_middleware_of_the_other_kind_is_refused(kind, middleware, problem):
    with pytest.raises(SettingError, match=problem):
        kind(middleware=[middleware])

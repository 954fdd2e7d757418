"""Declared services: through a real broker, and through their test client, which must behave the same."""

import asyncio
import decimal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps

import pytest
from support.offered import offered
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import AsyncClient, Client, Service, ServiceError, Services, Streaming
from zmdp.clients import ClosedError, CodecError, RequestRejected, ServiceNotFound, SettingError
from zmdp.testing import running_broker
from zmdp.workers import Worker, current_request


@dataclass
class Resize:
    path: str
    width: int


@dataclass
class Size:
    width: int
    height: int


def declared(**arguments):
    """Return services of every kind."""
    services = Services(**arguments)

    @services.service("resize")
    def resize(job: Resize) -> Size:
        """Scale an image."""
        if job.width < 0:
            raise ServiceError(460, "negative")
        return Size(job.width, 2 * job.width)

    @services.service("fetch")
    async def fetch(url: str) -> bytes:
        await asyncio.sleep(0)
        return url.encode()

    @services.service("count")
    def count(n: int) -> Iterator[int]:
        yield from range(n)
        if n < 0:
            raise ValueError("negative")

    @services.service("find")
    async def find(query: str) -> AsyncIterator[Size]:
        for n, _ in enumerate(query):
            yield Size(n, n)

    @services.service("now")
    def now() -> str:
        return "now"

    @services.service("plain")
    def plain(value):
        return value

    @services.service("wrong")
    def wrong(value: int) -> int:
        return "text"

    return services, {each.name: each for each in services}


@pytest.fixture(params=["broker", "test client"])
def connect(request):
    """`connect(services)` is a client that calls the services."""

    @contextmanager
    def connected(services):
        if request.param == "test client":
            with services.test_client() as client:
                yield client
        else:
            with (
                running_broker() as server,
                offered(services, server.endpoints[0]),
                Client(server.endpoints[0], timeout=TIMEOUT_SECONDS, retries=0) as client,
            ):
                yield client

    return connected


def test_each_kind_of_service(connect):
    services, by_name = declared()
    with connect(services) as client:
        assert client.call(by_name["resize"], Resize("a", 3)) == Size(3, 6)
        assert client.call(by_name["fetch"], "größe") == "größe".encode()
        assert client.call(by_name["now"]) == "now"
        assert client.call(by_name["plain"], {"a": [1, None]}) == {"a": [1, None]}
        assert list(client.stream(by_name["count"], 3)) == [0, 1, 2]
        assert list(client.stream(by_name["count"], 0)) == []
        assert list(client.stream(by_name["find"], "ab")) == [Size(0, 0), Size(1, 1)]


def test_a_service_can_be_called_without_its_code(connect):
    services, _ = declared()
    with connect(services) as client:
        assert client.call(Service("resize", Resize, Size), Resize("a", 3)) == Size(3, 6)
        assert list(client.stream(Streaming("find", str, Size), "a")) == [Size(0, 0)]
        assert client.call(Service("now", None, str)) == "now"
        assert client.call(Service("resize"), {"path": "a", "width": 1}) == {"width": 1, "height": 2}


def test_the_function_can_be_called_as_before():
    _, by_name = declared()
    assert by_name["resize"](Resize("a", 3)) == Size(3, 6)
    assert by_name["resize"].__doc__ == "Scale an image."
    assert by_name["resize"].__name__ == "resize"
    assert asyncio.run(by_name["fetch"]("a")) == b"a"
    assert list(by_name["count"](2)) == [0, 1]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"path": "a", "width": "80"}, r"\$\.width: expected int, got str"),
        ({"path": "a"}, r"\$: object missing required field width"),
        ("a", r"\$: expected object, got str"),
        (None, r"\$: expected object, got null"),
    ],
)
def test_a_request_that_does_not_fit_never_reaches_the_function(connect, value, problem):
    services, _ = declared()
    with connect(services) as client, pytest.raises(ServiceError, match=problem) as caught:
        client.call(Service("resize"), value)
    assert caught.value.code == 422


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_a_service_that_takes_no_value(connect, codec):
    services = Services(codec=codec)
    now = services.service("now")(lambda: "now")
    with connect(services) as client:
        assert client.call(now) == "now"
        with pytest.raises(ServiceError, match=r"\$: expected null, got int") as caught:
            client.call(Service("now", codec=codec), 1)
    assert caught.value.code == 422


def test_parts_before_the_reply_do_not_count():
    def progress(request):
        yield b"half"
        return b'{"width":1,"height":2}'

    service = Service("resize", Resize, Size)
    with (
        running_broker() as server,
        Worker("resize", progress, broker=server.endpoints[0]),
        Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client,
    ):
        assert client.call(service, Resize("a", 1)) == Size(1, 2)
        assert client.submit(service, Resize("a", 1)).result(TIMEOUT_SECONDS) == Size(1, 2)


def test_a_reply_that_does_not_fit_says_so_to_the_caller(connect):
    services, by_name = declared()
    with (
        connect(services) as client,
        pytest.raises(CodecError, match=r"reply of service 'wrong' .*\$: expected int, got str"),
    ):
        client.call(by_name["wrong"], 1)


def test_errors_of_functions(connect):
    services, by_name = declared()
    with connect(services) as client:
        with pytest.raises(ServiceError, match="negative") as caught:
            client.call(by_name["resize"], Resize("a", -1))
        assert caught.value.code == 460
        with pytest.raises(ServiceError, match="ValueError: negative") as caught:
            list(client.stream(by_name["count"], -1))
        assert caught.value.code == 500


def test_map_and_submit(connect):
    services, by_name = declared()
    with connect(services) as client:
        one, failed, two = client.map(by_name["resize"], [Resize("a", 1), Resize("a", -1), Resize("a", 2)])
        assert (one, two) == (Size(1, 2), Size(2, 4))
        assert failed.code == 460
        (misfit,) = client.map(by_name["wrong"], [1])
        assert isinstance(misfit, CodecError)
        assert client.submit(by_name["resize"], Resize("a", 1)).result(TIMEOUT_SECONDS) == Size(1, 2)
        with pytest.raises(CodecError):
            client.submit(by_name["wrong"], 1).result(TIMEOUT_SECONDS)


def test_a_name_is_enough_and_returns_types_a_single_call():
    services, _ = declared()
    with (
        running_broker() as server,
        offered(services, server.endpoints[0]),
        Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client,
    ):
        value = {"path": "a", "width": 1}
        assert client.call("resize", value) == {"width": 1, "height": 2}
        assert client.call("resize", value, returns=Size) == Size(1, 2)
        with pytest.raises(CodecError, match=r"\$: expected int, got object"):
            client.call("resize", value, returns=int)
        assert client.request("fetch", b'"a"') == [b"a"]
        assert list(client.call_stream("find", "a")) == [{"width": 0, "height": 0}]
        assert client.request("now") == [b'"now"']
        with pytest.raises(RequestRejected, match="cannot be read as json"):
            client.request("resize", b"{")


def test_asyncio_clients():
    services, by_name = declared()

    async def main(endpoint):
        async with AsyncClient(endpoint) as client:
            assert await client.call(by_name["resize"], Resize("a", 3)) == Size(3, 6)
            assert [part async for part in client.stream(by_name["find"], "ab")] == [Size(0, 0), Size(1, 1)]
            assert [each async for each in client.map(by_name["resize"], [Resize("a", 1)])] == [Size(1, 2)]
            assert await client.call("resize", {"path": "a", "width": 1}, returns=Size) == Size(1, 2)

            async def jobs():
                yield Resize("a", 2)

            assert [each async for each in client.map(by_name["resize"], jobs())] == [Size(2, 4)]

    with running_broker() as server, offered(services, server.endpoints[0]):
        asyncio.run(main(server.endpoints[0]))


def test_the_wrong_way_of_calling_says_which_is_right():
    _, by_name = declared()
    with Client() as client:
        with pytest.raises(SettingError, match=r"service 'find' streams its reply: use stream\(\)"):
            client.call(by_name["find"], "a")
        with pytest.raises(SettingError, match=r"service 'resize' has one reply: use call\(\)"):
            client.stream(by_name["resize"], Resize("a", 1))
        with pytest.raises(SettingError, match="takes one value, not 2: use a dataclass for several"):
            client.submit(by_name["resize"], "a", 1)


# ── lifespan and middleware ──────────────────────────────────────────────────────────────────────────────────────────


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value: int) -> int:
        """Scale a number."""
        return self.factor * value


class AsyncScaled(Scaled):
    async def __call__(self, value: int) -> int:
        """Scale a number."""
        return self.factor * value


class ScaledTwice(Scaled):
    def __call__(self, value: int) -> Iterator[int]:
        """Scale a number."""
        yield self.factor * value
        yield self.factor * value


def scaled(factor: int, value: int) -> int:
    """Scale a number."""
    return factor * value


@pytest.mark.parametrize(
    ("function", "replies"),
    [(Scaled(3), [6]), (AsyncScaled(3), [6]), (ScaledTwice(3), [6, 6]), (partial(scaled, 3), [6])],
)
def test_objects_that_can_be_called_and_partial(function, replies):
    services = Services()
    offered = services.service("scaled")(function)
    assert offered.about().description == "Scale a number."
    with services.test_client() as client:
        assert list(client.stream("scaled", 2)) == replies
        with pytest.raises(ServiceError, match="expected int"):
            client.call("scaled", "2")


def test_a_functions_own_attributes_do_not_replace_those_of_its_service():
    def function(n: int) -> int:
        return n

    function.name = function.settings = function.group = "the function's own"
    service = Services().service("same", concurrency=3)(function)
    assert (service.name, service.settings, service.function) == ("same", {"concurrency": 3}, function)
    assert service.__name__ == "function"


def test_a_lifespan_surrounds_all_requests(connect):
    events = []

    @asynccontextmanager
    async def outer():
        events.append("outer in")
        yield {"pool": "pool", "name": "outer"}
        events.append("outer out")

    @contextmanager
    def inner():
        events.append("inner in")
        yield {"name": "inner"}
        events.append("inner out")

    services, included = Services(lifespan=outer), Services(lifespan=inner)

    def answer(value: str) -> list[str]:
        state = current_request().state
        events.append(value)
        return [state.pool, state["name"]]

    one = services.service("one")(answer)
    two = included.service("two")(answer)
    services.include(included)
    with connect(services) as client:
        assert client.call(one, "one") == ["pool", "outer"]
        assert client.call(two, "two") == ["pool", "inner"]
    assert events == ["outer in", "inner in", "one", "two", "inner out", "outer out"]


def test_a_lifespan_that_fails_ends_the_others_and_the_worker():
    events = []

    @contextmanager
    def outer():
        yield
        events.append("left")

    @contextmanager
    def failing():
        raise OSError("no database")
        yield

    services, included = Services(lifespan=outer), Services(lifespan=failing)
    included.service("a")(lambda: 1)
    services.include(included)
    with pytest.raises(OSError, match="no database"):
        asyncio.run(services.worker().run())
    with pytest.raises(OSError, match="no database"), services.test_client():
        pass
    assert events == ["left", "left"]


def test_what_a_lifespan_must_return():
    def forgotten():
        yield

    with pytest.raises(SettingError, match=r"forgotten is a generator: decorate it with contextlib\.contextmanager"):
        Services(lifespan=forgotten)
    with pytest.raises(SettingError, match="lifespan is 1: it must be a function"):
        Services(lifespan=1)
    services = Services(lifespan=lambda: {"db": 1})
    services.service("a")(lambda: 1)
    with pytest.raises(SettingError, match="it must return a context manager"):
        asyncio.run(services.worker().run())


def test_middleware_surrounds_functions(connect):
    def outer(request, call_next):
        if request.headers.get("token") != "secret":
            raise ServiceError(401, "who are you?")
        return call_next(request)

    def inner(request, call_next):
        return [request.service, call_next(request)]

    async def shout(request, call_next):
        return (await call_next(request)).upper()

    services = Services(middleware=[outer, inner])
    asynchronous = Services(middleware=[shout])

    @services.service("one")
    def one(value: int):
        return value

    @asynchronous.service("two")
    async def two(value: str) -> str:
        return value

    with connect(services) as client:
        assert client.call(one, 1, headers={"token": "secret"}) == ["one", 1]
        with pytest.raises(ServiceError, match="who are you") as caught:
            client.call(one, 1)
        assert caught.value.code == 401
    with connect(asynchronous) as client:
        assert client.call(two, "a") == "A"


def test_middleware_awaits_streams_as_other_services(connect):
    async def awaits(request, call_next):
        return await call_next(request)

    async def passes(request, call_next):
        return call_next(request)

    for middleware in (awaits, passes):
        surrounded = Services(middleware=[middleware])

        @surrounded.service("letters")
        async def letters(text: str) -> AsyncIterator[str]:
            for letter in text:
                yield letter

        with connect(surrounded) as client:
            assert list(client.stream(letters, "abc")) == ["a", "b", "c"]


POOL = ContextVar("pool", default="no pool")


def _prepare():
    """Prepare in a lifespan what handlers see without asking for it."""
    decimal.getcontext().prec = 7
    return POOL.set("the pool")


@contextmanager
def prepared():
    """Prepare, and check at the end that the context is that of the beginning."""
    token = _prepare()
    yield {}
    POOL.reset(token)


@asynccontextmanager
async def prepared_async():
    """Prepare, as above."""
    with prepared():
        yield {}


def test_a_plain_wrapper_around_a_coroutine_function_is_told_what_to_do(connect):
    services = Services()

    async def inner(n: int) -> int:
        return n

    @services.service("plain")
    @wraps(inner)
    def plain(n):
        return inner(n)

    @services.service("asynchronous")
    @wraps(inner)
    async def asynchronous(n):
        return await inner(n)

    with connect(services) as client:
        assert client.call(asynchronous, 1) == 1
        with pytest.raises(ServiceError, match="a handler returned a coroutine that was not run, as a plain function"):
            client.call(plain, 1)


@pytest.mark.parametrize("lifespan", [prepared, prepared_async])
def test_a_request_sees_what_the_lifespan_has_set_and_nothing_of_other_requests(connect, lifespan):
    services = Services(lifespan=lifespan)

    def seen(precision):
        before = decimal.getcontext().prec
        decimal.getcontext().prec = precision
        pool = POOL.get()
        POOL.set("another pool")
        return f"{pool}, {before}"

    @services.service("plain")
    def plain(precision: int) -> str:
        return seen(precision)

    @services.service("coroutine")
    async def coroutine(precision: int) -> str:
        return seen(precision)

    @services.service("batches", batch=1)
    def batches(precisions: list[int]) -> list[str]:
        return [seen(each) for each in precisions]

    @services.service("batches_async", batch=1)
    async def batches_async(precisions: list[int]) -> list[str]:
        return [seen(each) for each in precisions]

    @services.service("stream")
    def stream(precision: int) -> Iterator[str]:
        yield seen(precision)
        yield f"{POOL.get()}, {decimal.getcontext().prec}"

    @services.service("stream_async")
    async def stream_async(precision: int) -> AsyncIterator[str]:
        yield seen(precision)
        yield f"{POOL.get()}, {decimal.getcontext().prec}"

    with connect(services) as client:
        for each in (plain, coroutine, batches, batches_async):
            assert [client.call(each, precision) for precision in (3, 4, 5)] == ["the pool, 7"] * 3
        for each in (stream, stream_async):
            for precision in (3, 4):
                assert list(client.stream(each, precision)) == ["the pool, 7", f"another pool, {precision}"]


TENANT = ContextVar("tenant", default="nobody")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_middleware_is_called_for_each_row(asynchronous):
    seen, calls = [], []

    @contextmanager
    def lifespan():
        yield {"numbers": {"a": 10, "b": 20}}

    def begin(request):
        seen.append((len(request), current_request() is request))
        tenant = request.headers.get("tenant", "")
        if tenant not in request.state.numbers:
            raise ServiceError(401, f"no tenant {tenant!r}")
        TENANT.set(tenant)

    def middleware(request, call_next):
        begin(request)
        return call_next(request)

    async def middleware_async(request, call_next):
        begin(request)
        return await call_next(request)

    def add(n: int) -> int:
        calls.append(n)
        return n + current_request().state.numbers[TENANT.get()]

    async def add_async(n: int) -> int:
        await asyncio.sleep(0)
        return add(n)

    services = Services(lifespan=lifespan, middleware=[middleware_async if asynchronous else middleware])
    service = services.service("add")(add_async if asynchronous else add)
    settings = {"timeout": TIMEOUT_SECONDS}
    with running_broker() as server, offered(services, server.endpoints[0]), Client(server.endpoints[0]) as client:
        for tenant, number in (("a", 10), ("b", 20)):
            outcomes = client.map(service, range(100), headers={"tenant": tenant}, **settings)
            assert list(outcomes) == [n + number for n in range(100)]
        assert seen == 200 * [(1, True)]
        calls.clear()
        failures = [*client.map(service, range(100), headers={"tenant": "c"}, **settings)]
        assert {(each.code, each.text) for each in failures} == {(401, "no tenant 'c'")}
        assert calls == []


def test_rows_of_map_are_handled_in_batches():
    """Every batch waits until it is full, so all rows come only if they are outstanding together."""
    services, sizes = Services(), []

    @services.service("double", batch=16, batch_wait=59.0)
    async def double(numbers: list[int]) -> list[int]:
        sizes.append(len(numbers))
        return [2 * n for n in numbers]

    with running_broker() as server, offered(services, server.endpoints[0]), Client(server.endpoints[0]) as client:
        outcomes = client.map(double, range(160), timeout=TIMEOUT_SECONDS)
        assert list(outcomes) == [2 * n for n in range(160)]
    assert sizes == 10 * [16]


def test_middleware_of_the_other_kind_is_refused():
    def middleware(request, call_next):
        return call_next(request)

    services = Services(middleware=[middleware])

    @services.service("fetch")
    async def fetch(url: str) -> str:
        return url

    with pytest.raises(
        SettingError, match=r"is a def, and cannot wrap service fetch, .* an async def: .* both in one "
    ):
        services.worker()


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_of_batches_gets_several_requests(asynchronous):
    batches = []
    services = Services()

    def double(values: list[int]) -> list[int | Exception]:
        batches.append(values)
        return [ServiceError(460, "negative") if value < 0 else 2 * value for value in values]

    async def double_async(values: list[int]) -> list[int | Exception]:
        return double(values)

    service = services.service("double", batch=4, batch_wait=1.0)(double_async if asynchronous else double)
    with running_broker() as server, offered(services, server.endpoints[0]), Client(server.endpoints[0]) as client:
        futures = [client.submit(service, value) for value in (1, 2, -3, 4)]
        replies = [each.exception(TIMEOUT_SECONDS) or each.result() for each in futures]
        assert replies[:2] + replies[3:] == [2, 4, 8]
        assert replies[2].code == 460
        assert sorted(each for batch in batches for each in batch) == [-3, 1, 2, 4]
        assert len(batches) < 4
        with pytest.raises(ServiceError) as caught:
            client.call(Service("double"), "text")  # it joins no batch
        assert caught.value.code == 422


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda values: values[:-1], "expected 1 replies"),
        (lambda values: 1, "expected 1 replies"),
        (lambda values: {}[1], "KeyError"),
        (lambda values: next(iter(())), "StopIteration"),
    ],
)
def test_a_batch_that_fails_fails_its_requests(function, problem):
    services = Services()
    service = services.service("batch", batch=2, batch_wait=0.0)(function)
    with services.test_client() as client, pytest.raises(ServiceError, match=problem):
        client.call(service, 1)


# ── declarations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_whose_requests_are_cancelled_ends_before_the_lifespan():
    begun, go_on, events = threading.Semaphore(0), threading.Event(), []

    @contextmanager
    def lifespan():
        yield {}
        events.append("left")

    services = Services(lifespan=lifespan)

    @services.service("hold", batch=2, batch_wait=0)
    def hold(values: list[int]) -> list[int]:
        begun.release()
        go_on.wait(TIMEOUT_SECONDS)
        events.append("ended")
        return values

    async def scenario(broker):
        worker = services.worker(broker=broker)
        await worker.start()
        async with AsyncClient(broker, timeout=TIMEOUT_SECONDS) as client:
            calling = [asyncio.create_task(client.call(hold, 1)) for _ in range(2)]
            assert await asyncio.to_thread(begun.acquire, timeout=TIMEOUT_SECONDS)
            held = worker.requests
            for each in calling:
                each.cancel()
            await asyncio.to_thread(eventually, lambda: all(each.cancelled for each in held))
        worker.stop()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await worker.wait()
        assert events[-1] == "left"
        assert events.count("ended") >= 1

    with running_broker() as server:
        asyncio.run(scenario(server.endpoints[0]))


def test_prefixes_and_included_services():
    inner = Services(prefix="b.")

    @inner.service("c")
    def c() -> int:
        return 1

    outer = Services(prefix="a.")
    outer.include(inner, prefix="x.")
    assert [each.name for each in outer] == ["x.b.c"]
    inner.service("d")(lambda: 1)
    assert [each.name for each in outer] == ["x.b.c", "x.b.d"]
    with pytest.raises(SettingError, match="are included already"):
        Services().include(inner)
    other = Services()
    other.service("x.b.c")(lambda: 1)
    with pytest.raises(SettingError, match=r"service 'x\.b\.c' was declared before"):
        outer.include(other)


def test_a_worker_that_is_stopped_before_it_starts_ends_at_once():
    services, _ = declared()
    worker = services.worker()
    worker.stop()
    asyncio.run(worker.run())
    assert worker.requests == []


def test_only_some_services_are_offered():
    services, _ = declared()
    assert [each.name for each in services.worker(only=["now"]).offered] == ["now"]
    with pytest.raises(SettingError, match=r"there is no service 'resise': did you mean resize\?"):
        services.worker(only=["resise"])
    with pytest.raises(SettingError, match="there are no services"):
        Services().worker()


def test_a_value_that_has_a_default_may_be_left_out():
    services = Services()

    @services.service("greet")
    def greet(name: str = "world", *, mark: str = "!") -> str:
        return f"Hello, {name}{mark}"

    @services.service("size")
    def size(data: bytes = b"four") -> int:
        return len(data)

    @services.service("plain", every=60)
    def plain(value=3, factor=2):
        return value * factor

    @services.service("parts")
    def parts(count: int = 2) -> Iterator[int]:
        yield from range(count)

    with services.test_client() as client:
        assert (client.call("greet"), client.call("greet", "Ann")) == ("Hello, world!", "Hello, Ann!")
        assert (client.call(greet), client.call(size, b""), client.call(size, b"x")) == ("Hello, world!", 4, 1)
        assert (client.call("plain"), client.call("plain", 5)) == (6, 10)
        assert (list(client.stream("parts")), list(client.stream("parts", 1))) == ([0, 1], [0])
        with pytest.raises(ServiceError, match=r"expected str \| null, got int"):
            client.call("greet", 1)
    assert greet.about().request == {"anyOf": [{"type": "string"}, {"type": "null"}]}


def two(a, b):
    return a


def unresolved(a: "Nowhere") -> int:  # noqa: F821
    return a


def misspelt(a: "int |") -> int:  # noqa: F722
    return a


def unsendable(a: object) -> int:
    return a


@pytest.mark.parametrize(
    ("function", "settings", "problem"),
    [
        (two, {}, "two takes 2 arguments: a service takes one value or none"),
        (lambda *values: 1, {}, "takes 1 arguments: a service takes one value or none"),
        (unresolved, {}, "an annotation of unresolved cannot be resolved"),
        (misspelt, {}, "an annotation of misspelt cannot be resolved"),
        (int, {}, "int cannot be a service"),
        (unsendable, {}, "unsendable: values of type object cannot be sent"),
        (5, {}, "it needs a function"),
        (lambda: 1, {"batch": 3}, "handles batches: it takes a list of values"),
        (lambda values: values, {"batch": 0}, "batch is 0: it must be a whole number"),
        (lambda values: values, {"batch": 2, "batch_wait": -1}, "batch_wait is -1"),
        (lambda value: value, {"codec": "pickle"}, "codec is 'pickle'"),
    ],
)
def test_what_cannot_be_a_service(function, settings, problem):
    with pytest.raises(SettingError, match=problem):
        Services().service("a", **settings)(function)


def test_a_setting_that_is_misspelt():
    for declare in (lambda: Services().service("x", retrys=3), lambda: Services(retrys=3)):
        with pytest.raises(TypeError, match=r"has no setting 'retrys': did you mean retries\?"):
            declare()


def test_a_service_without_a_name():
    def count(text: str) -> int:
        return len(text)

    services = Services()
    with pytest.raises(SettingError, match=r'write @services\.service\("count"\) above its function'):
        services.service(count)
    with pytest.raises(SettingError, match=r'write @services\.service\("count"\)'):
        services.service()
    assert list(services) == []


def test_a_batch_of_other_types():
    def function(values: int) -> list[int]:
        return [values]

    with pytest.raises(SettingError, match=r"annotate its argument as a list"):
        Services().service("a", batch=2)(function)


def test_the_test_client_knows_only_what_is_declared():
    services, _ = declared()
    with services.test_client() as client, pytest.raises(ServiceNotFound, match="not declared here; there are resize"):
        client.call("other")


def test_the_test_client_leaves_no_current_request_between_parts():
    services, named = declared()
    with services.test_client() as client:
        streams = [client.stream(named["count"], 2), client.stream(named["count"], 2)]
        for n in range(2):
            assert [next(stream) for stream in streams] == [n, n]
            with pytest.raises(LookupError):
                current_request()
        assert [list(stream) for stream in streams] == [[], []]
    with pytest.raises(LookupError):
        current_request()


def test_the_test_client_outside_of_its_block():
    services, named = declared()
    client = services.test_client()
    for service, value in ((named["fetch"], "a"), (named["find"], "a")):
        with pytest.raises(ClosedError, match="within the test client's `with` block"):
            list(client.stream(service.name, value))
    with client:
        begun = client.stream(named["find"], "ab")
        assert next(begun) == Size(0, 0)
    begun.close()
    with pytest.raises(ClosedError):
        client.call(named["fetch"], "a")
    assert client.call(named["plain"], 1) == 1

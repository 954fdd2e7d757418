"""Trace context from the request that is handled to those made meanwhile, with and without OpenTelemetry."""

import asyncio
import json
import threading
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import serving

from zmdp.clients import AsyncClient, Client, RequestTimeout, ServiceError, ZmdpError
from zmdp.mdp import tracing
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.workers import AsyncWorker, Worker

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.fixture
def without_otel(monkeypatch):
    """As in a program that does not use it."""
    monkeypatch.setattr(tracing, "opentelemetry_trace", lambda: None)


@pytest.fixture
def spans(monkeypatch):
    """What is exported: spans that have ended.  The provider is this test's own."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("zmdp"))

    def ended():
        provider.force_flush()
        return exporter.get_finished_spans()

    return ended


def headers_of(request):
    return json.dumps(dict(request.headers)).encode()


@pytest.fixture
def endpoint():
    with running_broker(drain_timeout=0.1) as server:
        at = server.endpoints[0]
        with Worker("inner", headers_of, broker=at, concurrency=2):
            yield at


def told(reply):
    return json.loads(reply[0])


# ── the headers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Handled:
    service = "outer"

    def __init__(self, headers):
        self.headers = headers


@pytest.mark.parametrize(
    ("handled", "own", "sent"),
    [
        (None, None, None),
        (None, {"a": "b"}, {"a": "b"}),
        ({}, None, None),
        ({"a": "b"}, None, None),
        ({"traceparent": PARENT}, None, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "x=1", "a": "b"}, None, {"traceparent": PARENT, "tracestate": "x=1"}),
        ({"traceparent": PARENT}, {"a": "b"}, {"traceparent": PARENT, "a": "b"}),
        ({"request-id": "7", "a": "b"}, None, {"request-id": "7"}),
        ({"request-id": "7", "traceparent": PARENT}, {"request-id": "8"}, {"request-id": "8", "traceparent": PARENT}),
        (
            {"request-id": "7", "traceparent": PARENT},
            {"traceparent": OTHER},
            {"request-id": "7", "traceparent": OTHER},
        ),
        ({"traceparent": PARENT, "tracestate": "x=1"}, {"traceparent": OTHER}, {"traceparent": OTHER}),
        (
            {"traceparent": PARENT, "tracestate": "x=1"},
            {"tracestate": "y=2"},
            {"traceparent": PARENT, "tracestate": "y=2"},
        ),
    ],
)
@pytest.mark.usefixtures("without_otel")
def test_a_request_carries_the_trace_headers(handled, own, sent):
    if handled is None:
        headers, finish = tracing.calling("service", own)
    else:
        with tracing.handling(Handled(handled)):
            headers, finish = tracing.calling("service", own)
    assert headers == sent
    finish(None)
    finish(ValueError())


@pytest.mark.usefixtures("without_otel")
def test_handled_requests_within_handled_requests():
    with tracing.handling(Handled({"traceparent": PARENT})):
        with tracing.handling(Handled({"traceparent": OTHER})):
            assert tracing.calling("s", None)[0] == {"traceparent": OTHER}
        with pytest.raises(ZeroDivisionError), tracing.handling(Handled({"traceparent": OTHER})):
            raise ZeroDivisionError
        with tracing.handling(Handled({})):
            assert tracing.calling("s", None)[0] is None
        assert tracing.calling("s", None)[0] == {"traceparent": PARENT}
    assert tracing.calling("s", None)[0] is None


@pytest.mark.usefixtures("without_otel")
def test_headers_are_parsed_lazily():
    class Unread:
        @property
        def headers(self):
            raise ZeroDivisionError

    with tracing.handling(Unread()):
        with pytest.raises(ZeroDivisionError):
            tracing.calling("s", None)
    assert tracing.calling("s", None)[0] is None


def test_a_span_that_fails_to_start_leaves_nothing_behind(spans):
    del spans

    class Unread:
        service = "outer"

        @property
        def headers(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tracing.handling(Unread()).__enter__()
    assert tracing.current.get(None) is None


WITH_AND_WITHOUT = pytest.mark.parametrize("package", ["with", "without"])


@pytest.fixture
def _package(request, package):
    request.getfixturevalue("spans" if package == "with" else "without_otel")


@WITH_AND_WITHOUT
@pytest.mark.usefixtures("_package")
def test_from_a_handler_in_a_thread(endpoint, package):
    """A function, a generator, and each way to ask."""
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as inside:

        def function(request):
            return [
                *inside.request("inner"),
                *next(inside.stream("inner")),
                *inside.submit("inner").result(TIMEOUT_SECONDS),
                *inside.request("inner", headers={"own": "x"}),
                *inside.request("inner", headers={"traceparent": OTHER}),
            ]

        def generator(request):
            yield inside.request("inner")
            yield next(inside.stream("inner"))
            return inside.request("inner")

        with (
            Worker("function", function, broker=endpoint),
            Worker("generator", generator, broker=endpoint),
            Client(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):
            headers = {"traceparent": PARENT, "tracestate": "x=1", "not": "passed on"}
            seen = [json.loads(frame) for frame in client.request("function", headers=headers)]
            seen += [json.loads(frame) for frame in client.request("generator", headers=headers)]
            unrelated = told(client.request("inner"))
    other = seen.pop(4)
    assert (other["traceparent"], "tracestate" in other) == (OTHER, False)
    assert seen[3].pop("own") == "x"
    assert len(seen) == 7
    for each in seen:
        assert set(each) - {tracing.TTL} == {"traceparent", "tracestate"}
        assert each["tracestate"] == "x=1"
        assert each["traceparent"][:36] == PARENT[:36]
        assert (each["traceparent"] == PARENT) == (package == "without")
    assert set(unrelated) == ({"traceparent", tracing.TTL} if package == "with" else set())


@WITH_AND_WITHOUT
@pytest.mark.usefixtures("_package")
def test_from_a_handler_in_asyncio(endpoint, package):
    async def scenario():
        async with (
            AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as inside,
            AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):

            async def function(request):
                both = await asyncio.gather(inside.request("inner"), inside.request("inner"))
                return [*both[0], *both[1], *(await anext(inside.stream("inner")))]

            async def generator(request):
                yield await inside.request("inner")
                yield await inside.request("inner")

            async with (
                AsyncWorker("function", function, broker=endpoint, concurrency=2),
                AsyncWorker("generator", generator, broker=endpoint),
            ):
                headers = {"traceparent": PARENT, "tracestate": "x=1"}
                first, second, third = await asyncio.gather(
                    client.request("function", headers=headers),
                    client.request("function", headers={"traceparent": OTHER}),
                    client.request("generator", headers=headers),
                )
        for frame in [*first, *third[:2]]:
            assert json.loads(frame)["traceparent"][:36] == PARENT[:36]
            assert json.loads(frame)["tracestate"] == "x=1"
        for frame in second:
            assert json.loads(frame)["traceparent"][:36] == OTHER[:36]
            assert "tracestate" not in json.loads(frame)

    asyncio.run(scenario())


# ── spans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_kind(spans):
    return {(span.kind, span.name): span for span in spans}


def test_client_and_server_are_linked_in_one_trace(endpoint, spans):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as inside:
        with (
            Worker("outer", lambda request: inside.request("inner"), broker=endpoint),
            Client(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):
            client.request("outer", headers={"a": "b"})
    found = by_kind(spans())
    assert len(found) == 4
    asked = found[SpanKind.CLIENT, "outer"]
    handled = found[SpanKind.SERVER, "outer"]
    asked_within = found[SpanKind.CLIENT, "inner"]
    handled_within = found[SpanKind.SERVER, "inner"]
    assert asked.parent is None
    assert handled.parent.span_id == asked.context.span_id
    assert asked_within.parent.span_id == handled.context.span_id
    assert handled_within.parent.span_id == asked_within.context.span_id
    assert len({span.context.trace_id for span in found.values()}) == 1
    assert dict(asked.attributes) == {"rpc.system.name": "mdp", "rpc.method": "outer"}


def test_a_request_keeps_its_name(endpoint, spans):
    """Its name, and not the trace context, which is that of the span."""
    del spans
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as inside:
        with (
            Worker("outer", lambda request: inside.request("inner"), broker=endpoint),
            Client(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):
            headers = told(client.request("outer", headers={"request-id": "7", "traceparent": PARENT}))
    assert headers["request-id"] == "7"
    assert headers["traceparent"][:36] == PARENT[:36]
    assert headers["traceparent"] != PARENT


class Waited:
    """A request whose deadline is in so many seconds, and that began with that ttl."""

    service = "echo"

    def __init__(self, ttl, left=2.0):
        self.headers = {} if ttl is None else {tracing.TTL: ttl}
        self.deadline = None if left is None else time.monotonic() + left


@pytest.mark.parametrize(
    ("waited", "seconds"),
    [
        (Waited("1e9", 1e6), 999_000_000),
        (Waited("1.000", 1e6), 0.0),
        (Waited("1.000", None), None),
        (Waited(None), None),
        (Waited("soon"), None),
        (Waited("inf"), None),
        (Waited("nan"), None),
    ],
)
def test_the_time_that_a_request_has_waited(spans, waited, seconds):
    with tracing.handling(waited):
        pass
    (span,) = spans()
    found = span.attributes.get(tracing.QUEUE_SECONDS)
    assert found == (seconds if not seconds else pytest.approx(seconds, rel=0.01))


def test_the_span_of_a_worker_has_the_time_in_the_queue(endpoint, spans):
    """The worker is busy with the first request until the second has been accepted."""
    begun, queued = threading.Event(), threading.Event()

    def handler(request):
        begun.set()
        queued.wait(TIMEOUT_SECONDS)
        return request[0]

    with Worker("slow", handler, broker=endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        first = client.submit("slow", b"1")
        assert begun.wait(TIMEOUT_SECONDS)
        second = client.submit("slow", b"2")
        eventually(lambda: told(client.request("mmi.services", b"slow"))["services"][0]["queued"])
        before = time.monotonic()
        client.request("mmi.stats")  # which takes some time
        waited = time.monotonic() - before
        queued.set()
        assert (first.result(TIMEOUT_SECONDS)[0], second.result(TIMEOUT_SECONDS)[0]) == (b"1", b"2")
        parts = client.stream("slow", b"3")  # without a deadline
        assert next(parts)[0] == b"3"
    handled = [span for span in spans() if (span.kind, span.name) == (SpanKind.SERVER, "slow")]
    first, second = (span.attributes[tracing.QUEUE_SECONDS] for span in handled[:2])
    assert second >= waited - 0.002  # ttls are rounded to milliseconds
    assert first >= 0
    assert tracing.QUEUE_SECONDS not in handled[2].attributes


def test_errors_are_recorded(endpoint, spans):
    def fail(request):
        raise ValueError("no good")

    with Worker("fail", fail, broker=endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        for ask in (
            lambda: client.request("fail"),
            lambda: list(client.stream("fail")),
            lambda: client.submit("fail").result(TIMEOUT_SECONDS),
        ):
            with pytest.raises(ServiceError):
                ask()
    found = spans()
    assert sorted(span.kind.name for span in found) == ["CLIENT"] * 3 + ["SERVER"] * 3
    for span in found:
        assert span.status.status_code is StatusCode.ERROR
        (event,) = span.events
        kind = "ValueError" if span.kind is SpanKind.SERVER else "zmdp.mdp.errors.ServiceError"
        assert event.attributes["exception.type"] == kind
        assert "no good" in event.attributes["exception.message"]


def test_each_span_ends_however_its_request_ends(endpoint, spans):
    def stop(request):
        yield b"first"
        raise ServiceError(502, "lost")

    async def scenario():
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            with pytest.raises(RequestTimeout):
                await client.request("nobody", timeout=0.05)
            task = asyncio.create_task(client.request("nobody"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async for _ in client.stream("inner"):
                pass
            parts = client.stream("stop")
            await anext(parts)
            with pytest.raises(ZmdpError):
                await anext(parts)

    with Worker("stop", stop, broker=endpoint):
        asyncio.run(scenario())
        client = Client(endpoint, timeout=TIMEOUT_SECONDS)
        client.submit("nobody").cancel()
        with pytest.raises(ServiceError):
            list(client.stream("stop"))
        parts = client.stream("inner")
        next(parts)
        parts.close()
        client.close()
    ended = [span.name for span in spans() if span.kind is SpanKind.CLIENT]
    assert sorted(ended) == ["inner", "inner", "nobody", "nobody", "nobody", "stop", "stop"]


def test_each_attempt_of_titanic_is_a_child_of_the_submission(endpoint, spans, tmp_path):
    received = []

    def fails_once(request):
        received.append(dict(request.headers))
        if len(received) == 1:
            raise ValueError("not yet")

    with (
        Worker("job", fails_once, broker=endpoint),
        serving(endpoint, f"sqlite:///{tmp_path}/titanic.db"),
        Client(endpoint, timeout=TIMEOUT_SECONDS) as client,
    ):
        ticket = Titanic(client).submit("job", headers={"a": "b"}, retries=1, backoff=0.001)
        ticket.result(TIMEOUT_SECONDS)
    # A client that asks before Titanic is there asks again, with another span.
    *_, submission = (span for span in spans() if (span.kind, span.name) == (SpanKind.CLIENT, "titanic.request"))
    attempts = [span for span in spans() if (span.kind, span.name) == (SpanKind.CLIENT, "job")]
    handled = [span for span in spans() if (span.kind, span.name) == (SpanKind.SERVER, "job")]
    assert [span.parent.span_id for span in attempts] == [submission.context.span_id] * 2
    assert [span.parent.span_id for span in handled] == [span.context.span_id for span in attempts]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    assert {name for headers in received for name in headers} == {"a", "request-id", "traceparent"}


def test_tracing_works_without_the_sdk(endpoint):
    """Nothing is recorded, and the trace context goes on all the same."""
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as inside:
        with (
            Worker("outer", lambda request: inside.request("inner"), broker=endpoint),
            Client(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):
            assert told(client.request("outer", headers={"traceparent": PARENT}))["traceparent"] == PARENT
            assert told(client.request("outer")) == {}

"""The Flux gateway over its real socket, with one broker and workers."""

import asyncio
import os

import pytest
from support.flux_client import (
    ANY,
    EVENT,
    NORESPONSE,
    REQUEST,
    RESPONSE,
    STREAMING,
    Message,
    encode,
    packed,
)
from support.flux_gateways import count, echo, running_gateway, running_workers
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import Client
from zmdp.interop.flux.wire.framing import BIG, LITTLE
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.transport import reading
from zmdp.testing.broker import running_broker
from zmdp.workers import AsyncWorker

USER = os.getuid()


def ok(topic, payload=None, tag=1, flags=0):
    """The response that a client gets if all is well."""
    return Message(RESPONSE, topic.encode(), packed(payload), flags, 0, tag, USER, 5, ())


def error(topic, errnum, text="", tag=1, flags=0):
    """The response that a client gets for a failure."""
    payload = f"{text}\0".encode() if text else None
    return Message(RESPONSE, topic.encode(), payload, flags, errnum, tag, USER, 5, ())


def unknown(topic, **settings):
    return error(topic, 38, f"No service matching {topic} is registered", **settings)


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["<", ">"], ids=[LITTLE, BIG])
def test_a_call_reaches_the_service_of_its_topics_first_word(stack, broker, gateway, order):
    seen = []

    async def note(request):
        seen.append((list(request), dict(request.options["flux"])))
        return b'{"y":2}'

    stack.enter_context(running_workers(broker, calc=note))
    with gateway.client(order) as client:
        assert client.rpc("calc.a.b", {"x": 1}, tag=7) == ok("calc.a.b", b'{"y":2}\0', tag=7)
    [(body, flux)] = seen
    assert body == [b'{"x": 1}']
    assert flux.pop("gateway").startswith("flux.gateway.")
    assert len(flux.pop("client")) == 36
    assert flux == {"topic": "calc.a.b", "userid": USER, "rolemask": 5, "matchtag": 7}


def test_a_service_with_the_name_of_the_topic_comes_first(stack, broker, client):
    async def whole(request):
        return b"whole"

    with running_workers(broker, **{"calc": echo}):
        assert client.rpc("calc.add", b"first word").payload == b"first word"
        with running_workers(broker, **{"calc.add": whole}):
            assert client.rpc("calc.sub", b"first word").payload == b"first word"
    with running_workers(broker, **{"calc.add": whole}):
        assert client.rpc("calc.add", b"first word").payload == b"whole"
        assert client.rpc("calc.sub").a == 38
    assert client.rpc("calc.add") == unknown("calc.add", tag=5)


@pytest.mark.parametrize("topic", ["flux.events", "flux.gateway.x", "attr.nope", "broker.rusage", "event.x"])
def test_the_gateways_own_services_cannot_be_called(client, topic):
    assert client.rpc(topic) == error(topic, 38, f"Unknown service method '{topic}'")


def test_a_request_without_response_is_done_though_its_client_leaves(stack, broker, gateway, pool):
    handled = pool.submit(asyncio.run, serve_once(broker, "late"))
    with Client(broker, timeout=TIMEOUT_SECONDS) as caller:
        while not caller.available("late"):
            pass
    with gateway.client() as client:
        client.request("late.x", b"go", flags=NORESPONSE)
    assert handled.result(TIMEOUT_SECONDS) == [b"go"]


async def serve_once(broker, service):
    """Offer a service until it is called; return the request."""
    called = asyncio.get_running_loop().create_future()

    async def handler(request):
        called.set_result(list(request))

    async with AsyncWorker(service, handler, broker=broker):
        return await called


def test_streams_end_with_no_data(stack, broker, client):
    stack.enter_context(running_workers(broker, count=count, echo=echo))
    end = error("count.up", 61, flags=STREAMING)
    parts = [ok("count.up", {"i": number}, flags=STREAMING) for number in range(3)]
    packed_parts = [Message(**{**vars(each), "payload": each.payload.replace(b" ", b"")}) for each in parts]
    assert client.stream("count.up", {"parts": 3}) == [*packed_parts, end]
    assert client.stream("count.up", {"parts": 0}, tag=1) == [end]
    assert client.stream("echo.x", b"all", tag=1) == [
        ok("echo.x", b"all", flags=STREAMING), error("echo.x", 61, flags=STREAMING)
    ]  # fmt: skip


def test_without_the_flag_only_the_last_part_of_a_stream_arrives(stack, broker, client):
    stack.enter_context(running_workers(broker, count=count, echo=echo))
    assert client.rpc("count.up", {"parts": 3}) == ok("count.up")
    assert client.rpc("echo.x") == ok("echo.x", tag=2)


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def wait(request):
    """Stream once, and then wait."""
    yield b"begun"
    await asyncio.get_running_loop().create_future()


def test_a_cancel_request_ends_a_stream(stack, broker, client, logged):
    stack.enter_context(running_workers(broker, watch=wait))
    tag = client.request("watch.this", flags=STREAMING, tag=5)
    assert client.receive().payload == b"begun"
    client.request("watch.cancel", {"matchtag": 6}, flags=NORESPONSE)  # another: nothing happens
    client.request("watch.cancel", {"matchtag": tag}, flags=NORESPONSE)
    assert client.receive() == error("watch.this", 61, tag=5, flags=STREAMING)
    client.request("watch.cancel", {"matchtag": tag}, flags=NORESPONSE)  # again: it has ended
    assert client.rpc("attr.get", {"name": "rank"}, tag=6).a == 0
    assert logged("watch: a request was cancelled")


def test_a_client_that_leaves_while_it_is_not_read_cancels_its_requests(stack, broker, gateway, logged, monkeypatch):
    monkeypatch.setattr(reading, "LOOK_SECONDS", 0.01)
    stack.enter_context(running_workers(broker, watch=wait))
    with gateway.client() as client:
        client.socket.sendall(1100 * encode(Message(REQUEST, b"watch.this", None, STREAMING, ANY, 1)))
        [connection] = gateway.gateway.connections
        while gateway.run(connection._transport.is_reading):
            pass
        assert client.receive().payload == b"begun"
    assert logged("watch: a request was cancelled")
    while gateway.run(lambda: connection in gateway.gateway.connections):
        pass


# ── ping ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PING = {"seq": 3, "time.tv_sec": 4, "time.tv_nsec": 5, "pad": "zz"}


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_attributes(client, gateway):
    def get(name):
        return client.rpc("attr.get", {"name": name}).json

    assert get("rank") == {"value": "0", "flags": 1}
    assert get("size") == {"value": "1", "flags": 0}
    assert get("tbon.level") == {"value": "0", "flags": 0}
    assert get("tbon.maxlevel") == {"value": "0", "flags": 0}
    assert get("tbon.descendants") == {"value": "0", "flags": 0}
    assert get("instance-level") == {"value": "0", "flags": 1}
    assert get("security.owner") == {"value": str(USER), "flags": 1}
    assert get("local-uri") == {"value": f"local://{gateway.path}", "flags": 1}
    names = client.rpc("attr.list").json["names"]
    assert {"hostlist", "hostname", "broker.uuid", "version"} < set(names)
    for name in names:
        assert isinstance(get(name)["value"], str)


def test_attributes_that_are_not_there_and_requests_that_are_wrong(client):
    assert client.rpc("attr.get", {"name": "nope"}) == error("attr.get", 2)
    assert client.rpc("attr.get", {"nam": "rank"}, tag=1) == error("attr.get", 71)
    assert client.rpc("attr.get", {"name": 1}, tag=1) == error("attr.get", 71)
    assert client.rpc("attr.get", b'{"name":"rank"}', tag=1) == error("attr.get", 71)  # without NUL
    assert client.rpc("attr.get", tag=1) == error("attr.get", 71)
    assert client.rpc("attr.get", {"name": "rank"}, nodeid=1, tag=1) == error("attr.get", 113)
    assert client.rpc("attr.get", {"name": "rank"}, nodeid=0, flags=16, tag=1) == error("attr.get", 113, flags=16)
    assert client.rpc("attr.set", {"name": "rank", "value": "1"}, tag=1) == error("attr.set", 1)


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def event(topic, payload=None, sequence=1, flags=0, userid=USER, rolemask=5):
    return Message(EVENT, topic.encode(), payload, flags, sequence, 0, userid, rolemask, None)


def test_events_reach_whoever_has_subscribed_to_a_prefix_of_their_topic(gateway):
    with gateway.client() as one, gateway.client(">") as two:
        assert one.rpc("event.subscribe", {"topic": "a"}) == ok("event.subscribe")
        assert one.rpc("event.subscribe", {"topic": "a.b"}) == ok("event.subscribe", tag=2)
        assert two.rpc("event.subscribe", {"topic": ""}) == ok("event.subscribe")
        publish = {"topic": "a.b", "flags": 0, "payload": "eyJ4IjoxfQA="}
        assert two.rpc("event.subscribe", {"topic": "b"}, tag=1) == ok("event.subscribe")
        two.request("event.publish", publish, nodeid=0, tag=1)
        received = [two.receive(), two.receive()]
        assert event("a.b", b'{"x":1}\0') in received
        assert ok("event.publish", b'{"seq":1}\0') in received
        two.send(Message(EVENT, b"b", b"raw"))  # as the tool `flux event pub` does it
        assert two.receive() == event("b", b"raw", 2)
        two.send(Message(EVENT, b"abc", None, routes=None))
        assert two.receive() == event("abc", None, 3)
        assert [one.receive(), one.receive()] == [event("a.b", b'{"x":1}\0'), event("abc", None, 3)]
        # Each subscription ends once, and is gone when it has ended as often as it was made.
        assert one.rpc("event.unsubscribe", {"topic": "a"}, tag=1) == ok("event.unsubscribe")
        assert one.rpc("event.unsubscribe", {"topic": "a"}, tag=1) == error("event.unsubscribe", 2)
        two.send(Message(EVENT, b"abc"))
        two.send(Message(EVENT, b"a.b.c"))
        assert one.receive() == event("a.b.c", None, 5)
        assert one.rpc("event.unsubscribe", {"topic": "a.b"}, tag=1) == ok("event.unsubscribe")


@pytest.mark.parametrize(
    "payload",
    [None, b"{", {}, {"topic": 1, "flags": 0}, {"topic": "", "flags": 0}, {"topic": "x", "flags": 1},
     {"topic": "x", "flags": True}, {"topic": "x", "flags": 0, "payload": "="},
     {"topic": "x", "flags": 0, "payload": 1}],
)  # fmt: skip
def test_what_cannot_be_published_is_refused(client, payload):
    assert client.rpc("event.publish", payload).a == 71


def test_subscriptions_that_make_no_sense_are_refused(client):
    for topic in ("event.subscribe", "event.unsubscribe"):
        assert client.rpc(topic, {"topic": 1}, tag=1) == error(topic, 71)
        assert client.rpc(topic, tag=1) == error(topic, 71)
    assert client.rpc("event.publish", {"topic": "x"}, nodeid=1, tag=1) == error(
        "event.publish", 71, "this service is only available on rank 0"
    )


def test_a_subscriber_that_never_reads_is_disconnected_and_others_are_not_delayed(stack, broker, tmp_path):
    gateway = stack.enter_context(running_gateway(broker, tmp_path / "flux", max_unread=4 << 20))
    payload = bytes(1 << 19)
    with gateway.client() as lazy, gateway.client() as client:
        lazy.rpc("event.subscribe", {"topic": "x"})
        client.rpc("event.subscribe", {"topic": "x"})
        for number in range(1, 41):
            client.send(Message(EVENT, b"x", payload))
            assert client.receive() == event("x", payload, number)
        received = []
        with pytest.raises((EOFError, ConnectionResetError)):  # noqa: PT012 - which of the messages is the last is open
            while True:
                received.append(lazy.receive())
        assert len(received) < 40


# ── clients of the broker and Flux programs ──────────────────────────────────────────────────────────────────────────


def test_a_program_serves_flux_clients(gateway):
    with gateway.client() as service, gateway.client() as client:
        assert service.rpc("service.add", {"service": "zecho"}) == ok("service.add")
        client.request("zecho.say", {"x": 1}, tag=9, routes=(b"far",))
        request = service.receive()
        number, uuid, hop = request.routes
        assert (len(uuid), hop) == (36, b"far")
        assert request == Message(
            REQUEST, b"zecho.say", b'{"x": 1}\0', 0, ANY, 9, USER, 5, routes=(number, uuid, b"far")
        )  # fmt: skip
        service.respond(request, {"y": 2})
        assert client.receive() == Message(
            RESPONSE, b"zecho.say", b'{"y": 2}\0', 0, 0, 9, USER, 5, routes=(b"far",)
        )  # fmt: skip
        client.request("zecho.say", tag=9)
        service.respond(service.receive(), b"it went wrong\0", 200)
        assert client.receive() == error("zecho.say", 200, "it went wrong", tag=9)
        client.request("zecho.say", tag=9)
        service.respond(service.receive(), None, 38)
        assert client.receive().a == 38
        client.request("zecho.ping", PING, tag=9)
        request = service.receive()
        assert (request.topic, request.json, request.b) == (b"zecho.ping", PING, 9)
        service.respond(request, {"mine": 1})
        assert client.receive() == ok("zecho.ping", {"mine": 1}, tag=9)


def test_names_of_services(gateway):
    with gateway.client() as one, gateway.client() as two:
        assert one.rpc("service.add", {"service": "zecho"}).a == 0
        assert one.rpc("service.add", {"service": "zecho"}, tag=1) == error("service.add", 17)
        assert two.rpc("service.add", {"service": "zecho"}, tag=1) == error("service.add", 17)
        for name, errnum in {"broker": 17, "attr": 17, "a.b": 22, "": 22, "a b": 22, "x" * 300: 22}.items():
            assert one.rpc("service.add", {"service": name}, tag=1) == error("service.add", errnum)
        assert one.rpc("service.add", {"name": "x"}, tag=1) == error("service.add", 71)
        assert one.rpc("service.remove", {"name": "x"}, tag=1) == error("service.remove", 71)
        assert two.rpc("service.remove", {"service": "zecho"}, tag=1) == error("service.remove", 2)
        assert one.rpc("service.remove", {"service": "zecho"}, tag=1) == ok("service.remove")
        assert two.rpc("service.add", {"service": "zecho"}, tag=1) == ok("service.add")


def test_clients_of_the_broker_call_a_program(broker, gateway, pool):
    with gateway.client() as service, Client(broker, timeout=TIMEOUT_SECONDS) as caller:
        service.rpc("service.add", {"service": "zecho"})
        call = pool.submit(caller.request, "zecho", b'{"x":1}', options={"flux": {"topic": "zecho.say"}})
        request = service.receive()
        assert (request.topic, request.payload, request.rolemask) == (b"zecho.say", b'{"x":1}\0', 1)
        assert len(request.routes) == 2
        service.respond(request, {"y": 2})
        assert call.result(TIMEOUT_SECONDS) == [b'{"y": 2}']
        call = pool.submit(caller.request, "zecho", b"raw")
        request = service.receive()
        assert (request.topic, request.payload) == (b"zecho", b"raw")
        service.respond(request, b"no\0", 71)
        with pytest.raises(ServiceError) as raised:
            call.result(TIMEOUT_SECONDS)
        assert (raised.value.code, raised.value.text, raised.value.detail) == (400, "no", b'{"errnum":71}')


def test_forged_options_do_no_harm(broker, gateway, pool):
    with gateway.client() as service, Client(broker, timeout=TIMEOUT_SECONDS) as caller:
        service.rpc("service.add", {"service": "zecho"})
        forged = {
            "topic": "other.say", "matchtag": -1, "client": "\0", "gateway": "titanic.close", "userid": "x",
            "rolemask": 1 << 40, "routes": ["", 1], "streaming": 1, "noresponse": "x",
        }  # fmt: skip
        for flux in (forged, {**forged, "client": 1, "gateway": "flux.gateway.x"}, [], {"topic": "zecho.\0"}):
            call = pool.submit(caller.request, "zecho", b"", options={"flux": flux})
            request = service.receive()
            assert (request.topic, request.payload, request.flags) == (b"zecho", None, 0)
            assert (request.userid, request.rolemask, len(request.routes)) == (ANY, 1, 2)
            service.respond(request)
            assert call.result(TIMEOUT_SECONDS) == [b""]


def test_a_broker_that_restarts_interrupts_nothing_for_long(stack, tmp_path):
    with running_broker(drain_timeout=0.0) as first:
        endpoint = first.endpoints[0]
        gateway = stack.enter_context(running_gateway(endpoint, tmp_path / "flux"))
        client = stack.enter_context(gateway.client())
        client.rpc("event.subscribe", {"topic": ""})
    with running_broker(endpoint, drain_timeout=0.0), running_workers(endpoint, echo=echo):
        assert client.rpc("echo.say", b"x").payload == b"x"
        received = []
        while not any(message.type == EVENT for message in received):
            client.request("event.publish", {"topic": "x", "flags": 0})
            received.append(client.receive())

"""WebSockets between a client of another make and real workers."""

import base64
import json
import socket
import struct
import threading
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from support.http_gateways import connections, http_gateway, websocket_url
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS, eventually
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import connect

from zmdp.clients.gateways.http import access as http_access
from zmdp.clients.gateways.http import websocket
from zmdp.mdp.http.connections import Phase
from zmdp.mdp.tokens import digest_of
from zmdp.testing import running_broker
from zmdp.workers import ServiceError, Worker

BODY = "x" * 20_000
BUFFER = 1 << 16
"""Of a socket: less than the replies of a test, so that they fill it."""
ORIGIN = "https://shop.example"


class Gate:
    """A service whose requests wait until they are told to go on, and which counts those that were cancelled."""

    def __init__(self):
        self.started = []
        self.cancelled = []
        self._open = threading.Condition()
        self._places = 0

    def open(self, places=1):
        with self._open:
            self._places += places
            self._open.notify_all()

    def __call__(self, request):
        self.started.append(request[0])
        yield b"started " + request[0]
        with self._open:
            while not self._places:
                if request.cancelled:
                    self.cancelled.append(request[0])
                    return
                self._open.wait(0.01)
            self._places -= 1
        yield b"going " + request[0]
        return


def fails(request):
    raise ServiceError(404, "no such user")


def chatter(request):
    """Stream until nobody listens."""
    try:
        while not request.cancelled:
            yield b"x" * 10_000
    finally:  # it may also be closed where it yields
        ENDED.set()


ENDED = threading.Event()


@pytest.fixture(scope="module")
def endpoint():
    with running_broker(drain_timeout=0.0) as server:
        at = server.endpoints[0]
        with (
            Worker("echo", list, broker=at, concurrency=4),
            Worker("fails", fails, broker=at),
            Worker("chatter", chatter, broker=at),
        ):
            yield at


@pytest.fixture
def gate(endpoint):
    gate = Gate()
    with Worker("gate", gate, broker=endpoint, concurrency=8):
        yield gate


@pytest.fixture(scope="module")
def gateway(endpoint):
    with http_gateway(endpoint, allow_origins=(ORIGIN,), max_body=100_000, max_unread=300_000) as running:
        yield running


@pytest.fixture
def ws(gateway):
    with opened(gateway) as connection:
        yield connection


class Messages:
    """A client's connection, whose messages are JSON."""

    def __init__(self, connection):
        self.connection = connection

    def say(self, **content):
        self.connection.send(json.dumps(content))

    def hear(self):
        message = self.connection.recv(TIMEOUT_SECONDS)
        if isinstance(message, bytes):
            return message
        content = json.loads(message)
        if "error" in content:
            content["error"] = content["error"]["type"].partition("#")[2]
        return content

    def closed(self):
        """Wait until the gateway has closed the connection, and return the code."""
        with suppress(ConnectionClosed):
            while True:
                self.connection.recv(TIMEOUT_SECONDS)
        return self.connection.close_code


@contextmanager
def opened(gateway, **settings):
    with connect(
        websocket_url(gateway), compression=None, max_size=None, open_timeout=TIMEOUT_SECONDS, **settings
    ) as connection:
        yield Messages(connection)


def test_one_request(ws):
    ws.say(id=1, service="echo", body="hi", wait=True)
    assert ws.hear() == {"id": 1, "final": "hi"}
    ws.say(id=1, service="echo", body={"a": [1]})
    assert ws.hear() == {"id": 1, "final": {"a": [1]}}
    ws.connection.send(b'{"id":2,"service":"echo"}\n\x00\xff')
    assert ws.hear() == b'{"id":2,"final":[2]}\n\x00\xff'


def test_a_caller_cannot_make_the_gateways_connection_a_link(ws):
    ws.say(id=1, service="mmi.link", body={"name": "mallory", "instance": "1", "kind": "peer", "link": 1})
    assert ws.hear() == {"id": 1, "final": 501}
    ws.say(id=2, service="echo", body="still here")
    assert ws.hear() == {"id": 2, "final": "still here"}


def test_many_requests_at_once(ws):
    for number in range(500):
        ws.say(id=number, service="echo", body=number, wait=True)
    heard = [ws.hear() for _ in range(500)]
    assert sorted(heard, key=lambda each: each["id"]) == [{"id": each, "final": each} for each in range(500)]


def test_partials_arrive_before_the_final(ws, gate):
    ws.say(id="a", service="gate", body="x", stream=True, wait=True)
    assert ws.hear() == {"id": "a", "partial": "started x"}
    gate.open()
    assert [ws.hear(), ws.hear()] == [{"id": "a", "partial": "going x"}, {"id": "a", "final": ""}]


def test_a_stream_that_takes_too_long(ws, gate):
    for number, timeout in enumerate(SHORT_TIMEOUTS):
        ws.say(id=number, service="gate", body="x", stream=True, wait=True, timeout=timeout)
        if (heard := ws.hear()) != {"id": number, "error": "timeout"}:  # there was time for a first part
            break
    assert heard == {"id": number, "partial": "started x"}
    assert ws.hear() == {"id": number, "error": "timeout"}


def test_errors(ws):
    ws.say(id=1, service="nobody")
    assert ws.hear() == {"id": 1, "error": "no-worker"}
    ws.say(id=1, service="nobody", wait=True, timeout=0.01)
    assert ws.hear() == {"id": 1, "error": "timeout"}
    ws.say(id=1, service="fails", wait=True)
    assert ws.hear() == {"id": 1, "error": "service-error"}


@pytest.mark.parametrize(
    "content",
    [
        {"service": "bad\nname"},
        {"service": "\ud800"},
        {"service": ""},
        {"service": "echo", "timeout": 1e9},
        {"service": "echo", "options": {"on_behalf": "boss"}},
        {"service": "echo", "options": {"user": "boss"}},
        {"service": "echo", "options": {"ttl": 1}},
        {"service": "echo", "headers": {"x": "y" * 70_000}},
    ],
)
def test_invalid_requests(ws, content):
    ws.say(id=1, **content)
    assert ws.hear() == {"id": 1, "error": "invalid"}
    ws.say(id=1, service="echo", wait=True)
    assert ws.hear() == {"id": 1, "final": ""}


def test_too_many_frames(ws):
    ws.say(id=1, service="echo", body="", more=[""] * 1000)
    assert ws.hear() == {"id": 1, "error": "too-large"}


def test_a_cancel_reaches_the_worker(ws, gate):
    ws.say(id=1, service="gate", body="c", stream=True, wait=True)
    ws.hear()
    ws.say(id=1, cancel=True)
    assert ws.hear() == {"id": 1, "error": "cancelled"}
    eventually(lambda: gate.cancelled == [b"c"])


@pytest.mark.parametrize("end", ["close", "vanish"])
def test_the_end_of_the_connection_cancels_everything(gateway, gate, end):
    with opened(gateway) as ws:
        for number in range(3):
            ws.say(id=number, service="gate", body=str(number), wait=True)
        eventually(lambda: len(gate.started) == 3)
        if end == "close":
            ws.connection.close()
        else:
            ws.connection.socket.shutdown(socket.SHUT_RDWR)
    eventually(lambda: sorted(gate.cancelled) == [b"0", b"1", b"2"])


def test_nothing_is_read_while_too_much_is_outstanding(endpoint, gate, monkeypatch):
    monkeypatch.setattr(websocket, "MAX_OUTSTANDING", 2)
    with http_gateway(endpoint) as gateway, opened(gateway) as ws:
        for name in "ab":
            ws.say(id=name, service="gate", body=name, wait=True)
        eventually(lambda: len(gate.started) == 2)
        ws.say(id="c", service="gate", body="c", wait=True)
        (connection,) = connections(gateway)
        eventually(lambda: not gateway.call(connection.transport.is_reading))
        assert gateway.gateway.outstanding == 2
        gate.open()
        assert ws.hear()["final"] == ""
        eventually(lambda: len(gate.started) == 3)
        gate.open(2)
        assert sorted([ws.hear()["final"], ws.hear()["final"]]) == ["", ""]


@pytest.mark.parametrize("end", ["close", "reset"])
def test_the_end_of_a_connection_that_is_not_read_cancels_everything(endpoint, gate, monkeypatch, end):
    monkeypatch.setattr(websocket, "MAX_OUTSTANDING", 1)
    # To write a PING would notice the end as well.
    with http_gateway(endpoint, ping_interval=1000.0) as gateway, raw(gateway) as peer:
        peer.sendall(frame(b'{"id":1,"service":"gate","body":"x","wait":true,"timeout":60}'))
        eventually(lambda: gate.started == [b"x"])
        peer.sendall(frame(b'{"id":2,"service":"gate","body":"y","wait":true}'))  # which nobody takes
        (connection,) = connections(gateway)
        eventually(lambda: not gateway.call(connection.transport.is_reading))
        if end == "reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        eventually(lambda: gate.cancelled == [b"x"])
        eventually(lambda: gateway.gateway.outstanding == 0)


def test_the_limit_of_the_whole_gateway(endpoint, gate):
    with http_gateway(endpoint, max_outstanding=1) as gateway, opened(gateway) as ws:
        ws.say(id=1, service="gate", body="x", wait=True)
        ws.say(id=2, service="echo")
        assert ws.hear() == {"id": 2, "error": "overloaded"}
        gate.open()
        assert ws.hear() == {"id": 1, "final": ""}
        ws.say(id=2, service="echo", wait=True)
        assert ws.hear() == {"id": 2, "final": ""}


def test_a_peer_that_does_not_read_is_disconnected(gateway):
    ENDED.clear()
    with raw(gateway) as peer:
        peer.sendall(frame(b'{"id":1,"service":"chatter","stream":true,"wait":true}'))
        assert ENDED.wait(TIMEOUT_SECONDS)
        eventually(lambda: gateway.gateway.outstanding == 0)


def test_a_flood_of_pings_from_a_peer_that_does_not_read(endpoint):
    with http_gateway(endpoint) as gateway, raw(gateway) as peer:
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:
                peer.sendall(frame(b"x" * 125, opcode=9) * 1000)
                assert gateway.gateway.memory < 1 << 20
        eventually(lambda: connections(gateway) == [])


def test_a_peer_that_reads_late_gets_everything(endpoint):
    """Nothing more is read from it until it has read the replies to earlier requests."""
    with http_gateway(endpoint, max_unread=1 << 30) as gateway, socket.socket() as small:
        # By default, the kernel's buffers may grow until all replies fit in.
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        small.connect(("127.0.0.1", gateway.port))
        with opened(gateway, sock=small) as ws:
            (connection,) = connections(gateway)
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            sender = threading.Thread(
                target=lambda: [ws.say(id=n, service="echo", body=BODY, wait=True) for n in range(300)]
            )
            sender.start()
            eventually(lambda: connection.phase is Phase.UNREAD)
            heard = [ws.hear() for _ in range(300)]
            sender.join()
            assert sorted(each["id"] for each in heard) == list(range(300))
            assert {each["final"] for each in heard} == {BODY}


def test_a_flood_of_invalid_messages_ends_nothing_else(gateway, ws):
    with opened(gateway) as flood:
        for _ in range(2000):
            flood.connection.send("{")
        ws.say(id=1, service="echo", wait=True)
        assert ws.hear() == {"id": 1, "final": ""}
        assert [flood.hear() for _ in range(2000)] == [{"id": None, "error": "invalid"}] * 2000


def test_a_message_that_is_too_large(ws):
    ws.say(id=1, service="echo", body="x" * 100_001)
    assert ws.closed() == CloseCode.MESSAGE_TOO_BIG


def test_a_message_for_which_there_is_no_memory(endpoint):
    with http_gateway(endpoint, max_memory=50_000) as gateway, raw(gateway) as peer:
        peer.sendall(b"\x81\xff" + (1_000_000).to_bytes(8, "big") + bytes(4) + b"x" * 60_000)
        assert (1013).to_bytes(2, "big") in received(peer)


def test_messages_that_arrive_together_with_the_end_of_the_connection(endpoint):
    """A PING that cannot be answered ends it, before the messages behind that PING are taken."""
    sent = threading.Event()
    with http_gateway(endpoint) as gateway, raw(gateway) as peer:
        gateway.loop.call_soon_threadsafe(sent.wait, TIMEOUT_SECONDS)
        peer.sendall(frame(b"", opcode=9) + frame(b"{}") * 2)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        sent.set()
        eventually(lambda: not connections(gateway) and not gateway.gateway.sessions)
        assert gateway.gateway.memory == 0


def test_messages_that_are_never_finished(endpoint):
    """Those that have sent most are ended; others go on."""
    with http_gateway(endpoint, max_memory=16 << 20) as gateway, ExitStack() as stack:
        for _ in range(40):
            peer = stack.enter_context(raw(gateway))
            peer.sendall(b"\x81\xff" + (10 << 20).to_bytes(8, "big") + bytes(4) + b"x" * (3 << 20))
            assert gateway.gateway.memory < 13 << 20
        with opened(gateway) as ws:
            ws.say(id=1, service="echo", body="x" * 100_000, wait=True)
            assert ws.hear() == {"id": 1, "final": "x" * 100_000}


@pytest.mark.parametrize("opcode", [0, 9], ids=["fragments", "PINGs"])
def test_too_many_small_frames(endpoint, opcode):
    with http_gateway(endpoint) as gateway, raw(gateway) as peer:
        flood = bytes([opcode | (opcode and 0x80), 0x80]) + bytes(4)
        with suppress(ConnectionResetError, BrokenPipeError):
            peer.sendall(bytes([0x01, 0x80]) + bytes(4) + flood * 100_000)
            received(peer)
        eventually(lambda: connections(gateway) == [])


def test_replies_for_which_there_is_no_memory(endpoint):
    ENDED.clear()
    with http_gateway(endpoint, max_memory=100_000, max_unread=1 << 40) as gateway, raw(gateway) as peer:
        peer.sendall(frame(b'{"id":1,"service":"chatter","stream":true,"wait":true}'))
        assert ENDED.wait(TIMEOUT_SECONDS)
        eventually(lambda: gateway.gateway.memory == 0)


def test_requests_end_even_if_others_use_all_the_memory(endpoint, gate):
    with http_gateway(endpoint, max_memory=100_000) as gateway, opened(gateway) as ws:

        def use(size):
            gateway.gateway.memory += size

        ws.say(id=1, service="gate", body="x", wait=True)
        eventually(lambda: gate.started == [b"x"])
        gateway.call(lambda: use(100_000))
        ws.say(id=2, service="gate", body="y")
        ws.connection.close()
        eventually(lambda: gateway.gateway.outstanding == 0)
        eventually(lambda: gate.cancelled == [b"x"])
        assert gateway.call(lambda: gateway.gateway.memory) == 100_000
        gateway.call(lambda: use(-100_000))


def test_a_peer_that_answers_no_ping_is_disconnected(endpoint):
    with http_gateway(endpoint, ping_interval=0.1) as gateway, opened(gateway) as living, raw(gateway) as peer:
        heard = received(peer)
        assert heard.startswith(b"\x89")
        assert heard.endswith(b"\x88\x02" + (1011).to_bytes(2, "big"))
        living.say(id=1, service="echo", wait=True)
        assert living.hear() == {"id": 1, "final": ""}


def test_a_gateway_that_stops_finishes_what_is_outstanding(endpoint, gate):
    with http_gateway(endpoint, drain_timeout=TIMEOUT_SECONDS) as gateway, opened(gateway) as ws:
        ws.say(id=1, service="gate", body="x", stream=True, wait=True)
        ws.hear()
        gateway.call(gateway.server.stop)
        eventually(lambda: gateway.server.connections.draining)
        ws.say(id=2, service="echo")
        assert ws.hear() == {"id": 2, "error": "closing"}
        gate.open()
        assert [ws.hear(), ws.hear()] == [{"id": 1, "partial": "going x"}, {"id": 1, "final": ""}]
        assert ws.closed() == CloseCode.GOING_AWAY


# ── the handshake ────────────────────────────────────────────────────────────────────────────────────────────────────


def refusal(gateway, **settings):
    """Return the status and the kind of problem with which the handshake is refused."""
    with pytest.raises(InvalidStatus) as caught:
        connect(websocket_url(gateway), open_timeout=TIMEOUT_SECONDS, **settings)
    response = caught.value.response
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, json.loads(response.body)["type"].partition("#")[2]


def test_the_origin_of_a_page(gateway):
    with opened(gateway, origin=ORIGIN, subprotocols=["zmdp"]) as ws:
        assert ws.connection.subprotocol == "zmdp"
        ws.say(id=1, service="echo", wait=True)
        assert ws.hear() == {"id": 1, "final": ""}
    for origin in ("https://evil.example", "null", gateway.url):
        assert refusal(gateway, origin=origin) == (403, "origin-not-allowed")


def test_a_refusal_is_not_logged_as_an_error(endpoint, caplog):
    with http_gateway(endpoint) as gateway:
        assert refusal(gateway, origin=ORIGIN) == (403, "origin-not-allowed")
    assert [each.getMessage() for each in caplog.records if each.name == "uvicorn.error"] == []


def test_a_subprotocol_that_is_unknown_is_not_selected(gateway):
    with opened(gateway, subprotocols=["other"]) as ws:
        assert ws.connection.subprotocol is None


def test_another_path_and_a_request_without_an_upgrade(gateway):
    with pytest.raises(InvalidStatus, match="404"):
        connect(websocket_url(gateway) + "x", open_timeout=TIMEOUT_SECONDS)
    answer = httpx.get(gateway.url + "/ws", timeout=TIMEOUT_SECONDS)
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ("Sec-WebSocket-Version: 13", "Sec-WebSocket-Version: 8", 400),
        ("Sec-WebSocket-Version: 13", "X: y", 400),
        ("Sec-WebSocket-Key: ", "Sec-WebSocket-Key: short", 400),
        ("Sec-WebSocket-Key: ", "Sec-WebSocket-Key: again\r\nSec-WebSocket-Key: ", 400),
    ],
)
def test_an_invalid_handshake(gateway, old, new, status):
    with gateway.connect() as client:
        client.send(handshake().replace(old.encode(), new.encode()))
        assert client.response()[0] == status


def test_a_handshake_that_cannot_be_parsed(endpoint):
    with http_gateway(endpoint, header_timeout=0.2) as gateway, gateway.connect() as client:
        client.send(handshake("X: " + "y" * 9000))
        assert client.response()[0] == 408


def access(tmp_path, *, token):
    digest = "sha256:" + digest_of(token.encode()).hex()
    file = tmp_path / "access.toml"
    file.write_text(f'[roles.shop]\ntokens = ["{digest}"]\ncall = ["echo"]\n')
    return http_access.load(file)


def test_tokens(endpoint, tmp_path):
    with http_gateway(endpoint, access=access(tmp_path, token="secret")) as gateway, ExitStack() as stack:
        assert refusal(gateway) == (401, "unauthorized")
        assert refusal(gateway, subprotocols=["zmdp", "zmdp.token.wrong"]) == (401, "unauthorized")
        assert refusal(gateway, additional_headers={"Authorization": "Bearer wrong"}) == (401, "unauthorized")
        with pytest.raises(InvalidStatus, match="401"):
            connect(websocket_url(gateway) + "?token=secret", open_timeout=TIMEOUT_SECONDS)
        for settings in (
            {"subprotocols": ["zmdp", "zmdp.token.secret"]},
            {"additional_headers": {"Authorization": "Bearer secret"}},
        ):
            ws = stack.enter_context(opened(gateway, **settings))
            assert ws.connection.subprotocol in {None, "zmdp"}
            ws.say(id=1, service="echo", wait=True)
            assert ws.hear() == {"id": 1, "final": ""}
            ws.say(id=2, service="fails")
            assert ws.hear() == {"id": 2, "error": "not-allowed"}
        gateway.gateway.access = access(tmp_path, token="another")  # as after SIGHUP
        for number in (3, 4):
            ws.say(id=number, service="echo")
            assert ws.hear() == {"id": number, "error": "unauthorized"}


# ── a client by hand ─────────────────────────────────────────────────────────────────────────────────────────────────


def handshake(*more):
    key = base64.b64encode(bytes(16)).decode()
    lines = [
        "GET /ws HTTP/1.1", "Host: gateway", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}", *more, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


@contextmanager
def raw(gateway):
    """Open a WebSocket whose peer reads only what a test reads."""
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(TIMEOUT_SECONDS)
        peer.connect(("127.0.0.1", gateway.port))
        peer.sendall(handshake())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += peer.recv(1)
        assert head.startswith(b"HTTP/1.1 101 ")
        yield peer


def received(peer):
    """Read until the gateway closes the connection."""
    pieces = []
    while data := peer.recv(1000):
        pieces.append(data)
    return b"".join(pieces)


def frame(data, opcode=1):
    """Return a frame, masked with zeros."""
    assert len(data) < 126
    return bytes([0x80 | opcode, 0x80 | len(data)]) + bytes(4) + data

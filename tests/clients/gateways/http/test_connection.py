"""What a connection accepts, refuses and ends, byte by byte."""

import contextlib
import threading
import time

import pytest
from support.gateways import running_gateway
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients.gateways.http.gateway import on_disconnect
from zmdp.mdp.http.checks import certificate_names
from zmdp.mdp.http.connection import CONNECTION, MAX_PIPELINED
from zmdp.mdp.http.connections import Phase
from zmdp.mdp.http.guard import MAX_IGNORED

POST = b"POST /services/echo HTTP/1.1\r\n"
HOST = b"host: x\r\n"
OK = [200]


def request(body=b"x", *lines):
    return POST + HOST + b"".join(line + b"\r\n" for line in lines) + b"content-length: %d\r\n\r\n" % len(body) + body


LAST = request(b"last", b"connection: close")
"""A request that ends the connection: its reply shows that what came before was understood as intended."""


SHAPES = {
    "one request": (LAST, OK),
    "pipelined": (request(b"1") + request(b"2") + LAST, [200, 200, 200]),
    "chunked": (POST + HOST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n" + LAST, [200, 200]),
    "chunked with extensions and trailers": (
        POST + HOST + b"transfer-encoding: chunked\r\n\r\n1;a=b\r\nx\r\n0\r\nx: y\r\n\r\n" + LAST,
        [200, 200],
    ),
    "HTTP/1.0": (b"POST /services/echo HTTP/1.0\r\ncontent-length: 1\r\n\r\nx", OK),
    "absolute form for another host": (
        b"POST http://y/services/echo HTTP/1.1\r\n" + HOST + b"\r\n" + LAST,
        [400],
    ),
    "absolute form": (b"POST http://x/services/echo HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n", OK),
    "empty lines before": (b"\r\n\r\n" + LAST, OK),
    # refused, and the connection is closed: nothing of what follows is taken for a request
    "length and chunked": (
        POST + HOST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + LAST,
        [400],
    ),
    "chunked and length": (
        POST + HOST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + LAST,
        [400],
    ),
    "two lengths": (POST + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx" + LAST, [400]),
    "the same length twice": (POST + HOST + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx" + LAST, [400]),
    "a list of lengths": (POST + HOST + b"content-length: 1, 1\r\n\r\nx" + LAST, [400]),
    "a negative length": (POST + HOST + b"content-length: -1\r\n\r\n" + LAST, [400]),
    "a signed length": (POST + HOST + b"content-length: +1\r\n\r\nx" + LAST, [400]),
    "a length in hex": (POST + HOST + b"content-length: 0x1\r\n\r\nx" + LAST, [400]),
    "an enormous length": (POST + HOST + b"content-length: 99999999999999999999999\r\n\r\nx", [400]),
    "an unknown coding": (POST + HOST + b"transfer-encoding: gzip\r\n\r\n" + LAST, [400]),
    "chunked is not last": (POST + HOST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + LAST, [400]),
    "compressed and chunked": (
        POST + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n" + LAST,
        [400],
    ),
    "chunked twice": (
        POST + HOST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n1\r\nx\r\n0\r\n\r\n" + LAST,
        [400],
    ),
    "almost chunked": (POST + HOST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + LAST, [400]),
    "chunked in HTTP/1.0": (
        b"POST /services/echo HTTP/1.0\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n0\r\n\r\n" + LAST,
        [400],
    ),
    "a bad chunk size": (POST + HOST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n\r\n" + LAST, [400]),
    "a signed chunk size": (POST + HOST + b"transfer-encoding: chunked\r\n\r\n+1\r\nx\r\n0\r\n\r\n" + LAST, [400]),
    "a chunk size in C": (POST + HOST + b"transfer-encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n" + LAST, [400]),
    "a chunk that is too long": (
        POST + HOST + b"transfer-encoding: chunked\r\n\r\n1\r\nxx\r\n0\r\n\r\n" + LAST,
        [400],
    ),
    "an enormous chunk": (POST + HOST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nx" + LAST, [400]),
    "chunks with LF only": (POST + HOST + b"transfer-encoding: chunked\r\n\r\n1\nx\n0\n\n" + LAST, [400]),
    "a folded header": (POST + HOST + b"a: b\r\n c\r\n\r\n" + LAST, [400]),
    "lines that end with LF": (POST.replace(b"\r", b"") + b"host: x\n\n" + LAST, [400]),
    "lines that end with CR": (POST.replace(b"\n", b"") + b"host: x\r\r" + LAST, [400]),
    "a space before the colon": (POST + b"host : x\r\n\r\n" + LAST, [400]),
    "a space before the name": (POST + b" host: x\r\n\r\n" + LAST, [400]),
    "a header without a colon": (POST + HOST + b"nothing\r\n\r\n" + LAST, [400]),
    "a NUL in a header": (POST + HOST + b"a: b\x00c\r\n\r\n" + LAST, [400]),
    "a NUL in a name": (POST + HOST + b"a\x00b: c\r\n\r\n" + LAST, [400]),
    "no host": (POST + b"\r\n" + LAST, [400]),
    "two hosts": (POST + HOST + HOST + b"\r\n" + LAST, [400]),
    "two tokens": (request(b"", b"authorization: a", b"authorization: b") + LAST, [400, 200]),
    "bytes in the path that are not ASCII": (b"POST /services/\xff HTTP/1.1\r\n" + HOST + b"\r\n" + LAST, [400]),
    "a path that is not UTF-8": (b"POST /services/%ff HTTP/1.1\r\n" + HOST + b"\r\n" + LAST, [400, 200]),
    "a path with dots": (b"POST /x/../services/echo HTTP/1.1\r\n" + HOST + b"\r\n" + LAST, [404, 200]),
    "a relative path": (b"POST services/echo HTTP/1.1\r\n" + HOST + b"\r\n" + LAST, [400]),
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"\r\n" + LAST, [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "HTTP/0.9": (b"GET /\r\n\r\n", [400]),
    "an unknown version": (b"POST /services/echo HTTP/1.7\r\n" + HOST + b"\r\n" + LAST, [400]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
    "an unknown method": (b"BREW /services/echo HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "an unknown expectation": (request(b"x", b"expect: tea"), [417]),
    "too many headers": (request(b"", *[b"a: b"] * 101), [431]),
    "a header that is too large": (request(b"", b"a: " + b"b" * 70_000), [431]),
    "a path that is too long": (b"POST /" + b"x" * 1_000_000, [431]),
}


@pytest.mark.parametrize(("data", "expected"), SHAPES.values(), ids=SHAPES.keys())
def test_shapes(gateway, data, expected):
    with gateway.connect() as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was refused before all was sent
            client.send(data)
        assert [status for status, _, _ in client.responses()] == expected


def test_a_client_that_disconnects_with_several_requests(gateway, services, caplog):
    """None of them counts as one that the gateway has failed to answer."""
    body = b"the first of several"
    with gateway.connect() as client:
        client.send(request(body).replace(b"echo", b"hold") + request() * 2)
        eventually(lambda: body in services.begun)
    eventually(lambda: body in services.cancelled)
    eventually(lambda: not gateway.call(lambda: gateway.server._uvicorn.server_state.tasks))
    assert [each.getMessage() for each in caplog.records if each.name == "uvicorn.error"] == []


CHUNKED = POST + HOST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"1\r\nx\r\n" * 1_000_000,
        b"1;" + b"x" * 10_000_000,
        b"0\r\n" + b"a: b\r\n" * 1_000_000,
        b"0\r\n\r\n" + POST + b"a: b\r\n" * 1_000_000,
    ],
    ids=["chunks of one byte", "an extension without end", "trailers without end", "headers without end, pipelined"],
)
def test_mostly_framing(gateway, data):
    with gateway.connect() as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(CHUNKED + data)
        client.rest()  # it ends
    eventually(lambda: gateway.gateway.memory == gateway.gateway.outstanding == 0)


def test_a_refusal_says_why(gateway):
    with gateway.connect() as client:
        client.send(b"nonsense\r\n\r\n")
        status, headers, body = client.response()
        assert (status, headers["connection"]) == (400, "close")
        assert b"Invalid HTTP request" in body
        assert client.rest() == b""


@pytest.mark.parametrize("more", [(), (b"a: " + b"b" * 40_000,)])
@pytest.mark.parametrize("connection", [b"Upgrade, HTTP2-Settings", b"Upgrade, close"])
def test_h2c_is_ignored(gateway, connection, more):
    """Java's HTTP client offers HTTP/2 with every first request."""
    with gateway.connect() as client:
        client.send(request(b"x", b"Upgrade: h2c", b"connection: " + connection, *more))
        assert client.response()[::2] == (200, b"x")
        if b"close" not in connection:
            assert client.send(LAST).response()[::2] == (200, b"last")
        assert client.rest() == b""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200), (b"LocalHost:8080", 200), (b"127.0.0.1:1", 200), (b"[::1]:8080", 200), (b"[::1]", 200),
        (b"evil.example", 421), (b"evil.example:8080", 421), (b"localhost.evil.example", 421), (b"[::2]:80", 421),
        (b"127.0.0.1:80@evil.example", 421), (b"[::1]evil.example", 421), (b"127.0.0.1:", 421), (b"", 421),
    ],
)  # fmt: skip
def test_pages_of_other_names_cannot_reach_an_open_gateway(endpoint, services, host, status):
    with running_gateway(endpoint, hosts=frozenset({"localhost", "127.0.0.1", "[::1]"})) as running:
        with running.connect() as client:
            client.send(LAST.replace(HOST, b"host: " + host + b"\r\n"))
            assert [found for found, _, _ in client.responses()] == [status]


def test_bytes_one_at_a_time(gateway):
    with gateway.connect() as client:
        for at in range(len(LAST)):
            client.send(LAST[at : at + 1])
        assert [body for _, _, body in client.responses()] == [b"last"]


def test_pipelined_requests_are_answered_in_order(gateway, services):
    with gateway.connect() as client:
        client.send(b"POST /services/hold HTTP/1.1\r\nhost: x\r\nrequest-timeout: 0.1\r\n\r\n" + request(b"2") + LAST)
        assert [(status, body) for status, _, body in client.responses()][1:] == [(200, b"2"), (200, b"last")]


def test_too_many_pipelined_requests(gateway):
    with gateway.connect() as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(request(b"1") * 100 * MAX_PIPELINED)
        assert client.rest() in {b"", b"reset"}
    eventually(lambda: gateway.gateway.memory == gateway.gateway.outstanding == 0)


def test_a_client_that_disconnects_cancels_the_first_of_pipelined_requests(gateway, services):
    with gateway.connect() as client:
        client.send(b"POST /services/hold HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\npipe" + request(b"2"))
        eventually(lambda: b"pipe" in services.begun)
    eventually(lambda: b"pipe" in services.cancelled)
    eventually(lambda: gateway.gateway.outstanding == 0)


LONG = b"POST /services/hold HTTP/1.1\r\nhost: x\r\nrequest-timeout: 60\r\n"
"""The request would not end by itself while the test waits."""


def test_a_client_that_disconnects_after_a_late_and_large_body(gateway, services):
    """Reading pauses while much of a body has not been taken, and goes on afterwards, so that the end is noticed."""
    body = bytes(100_000)
    with gateway.connect() as client:
        client.send(LONG + b"content-length: %d\r\n\r\n" % len(body))
        eventually(lambda: [each.phase for each in list(gateway.server.connections)] == [Phase.UPLOADING])
        client.send(body)
        eventually(lambda: body in services.begun)
    eventually(lambda: body in services.cancelled)


def test_a_client_that_disconnects_cancels_the_first_of_many(gateway, services):
    """While requests wait for the first one, nothing is read."""
    with gateway.connect() as client:
        client.send(LONG + b"content-length: 4\r\n\r\nmany")
        eventually(lambda: b"many" in services.begun)
        client.send(request(b"2") * 2)
        eventually(lambda: gateway.call(lambda: any(each.inner.pipeline for each in gateway.server.connections)))
    eventually(lambda: b"many" in services.cancelled)


def test_a_client_that_has_disconnected_before_anybody_asks(gateway, services):
    with gateway.connect() as client:
        client.send(LONG + b"content-length: 5\r\n\r\nearly")
        eventually(lambda: b"early" in services.begun)
        (connection,) = list(gateway.server.connections)
        assert not connection.disconnected
    eventually(lambda: b"early" in services.cancelled)
    called = []
    with on_disconnect({"state": {CONNECTION: connection}}, lambda: called.append(1)):
        assert called == [1]


def test_a_malformed_body_is_refused_at_once(gateway, services):
    with gateway.connect() as client:
        client.send(POST + HOST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        client.send(b"nonsense\r\n")
        assert [status for status, _, _ in client.responses()] == [400]
    eventually(lambda: gateway.gateway.memory == gateway.gateway.outstanding == 0)


def test_a_body_is_not_read_if_it_is_too_large(endpoint, services):
    with running_gateway(endpoint, max_body=1000) as gateway:
        with gateway.connect() as client:
            client.send(POST + HOST + b"content-length: 100000000\r\nexpect: 100-continue\r\n\r\n")
            assert [status for status, _, _ in client.responses()] == [413]  # no 100 before
        with gateway.connect() as client:  # one that sends all the same
            client.send(POST + HOST + b"content-length: 2000\r\n\r\n" + bytes(2000) + LAST)
            assert [status for status, _, _ in client.responses()] == [413]
        with gateway.connect() as client:
            client.send(POST + HOST + b"content-length: 100000000\r\n\r\n")
            assert client.response()[0] == 413
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(1000):  # far more than the buffers of the sockets hold
                    client.send(bytes(MAX_IGNORED // 10))
                raise AssertionError("everything was read")


def test_100_continue(gateway):
    with gateway.connect() as client:
        client.send(POST + HOST + b"content-length: 2\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n")
        assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"ok")
        assert client.response()[2] == b"ok"


def test_too_many_connections(endpoint, services):
    """Those whose requests are handled may stay; a refusal says which program has too many."""
    with running_gateway(endpoint, max_connections=2) as gateway, contextlib.ExitStack() as stack:
        for name in (b"full", b"fuller"):
            stack.enter_context(gateway.connect()).send(LONG + b"content-length: %d\r\n\r\n" % len(name) + name)
            eventually(lambda: name in services.begun)  # noqa: B023 - it is called here
        with gateway.connect() as third:
            status, headers, body = third.response()
            assert (status, headers["retry-after"]) == (503, "1")
            assert b"the gateway has too many connections" in body
            assert third.rest() == b""
        stack.close()
        eventually(lambda: not len(gateway.server.connections))
        with gateway.connect() as client:
            assert client.send(request(b"x")).response()[0] == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"POST", POST + HOST + b"content-length: 100\r\n\r\nx", request(b"x")],
    ids=["silent", "a fragment of the headers", "a fragment of the body", "idle"],
)
def test_connections_that_keep_nobody_out(gateway, services, data):
    """1500 of them, from the address of the one that calls."""
    with contextlib.ExitStack() as stack:
        for _ in range(1500):
            client = stack.enter_context(gateway.connect())
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.send(data)
        with gateway.connect() as client:
            assert client.send(request(b"canary")).response()[::2] == (200, b"canary")
        assert len(gateway.server.connections) <= 1000
    eventually(lambda: gateway.gateway.memory == gateway.gateway.outstanding == 0)


@pytest.fixture(scope="module")
def hasty(endpoint, services):
    with running_gateway(endpoint, header_timeout=0.2, body_timeout=0.2, keep_alive=0.2) as gateway:
        yield gateway


class TestTime:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"POST /services/echo",
            POST + HOST + b"a: ",
            POST + HOST + b"content-length: 2\r\n\r\n",
            POST + HOST + b"content-length: 2\r\n\r\nx",
            POST + HOST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n",
        ],
    )
    def test_a_request_that_does_not_arrive(self, hasty, data):
        with hasty.connect() as client:
            client.send(data)
            assert [status for status, _, _ in client.responses()] == [408]
        eventually(lambda: hasty.gateway.outstanding == hasty.gateway.memory == 0)

    def test_a_trickle_does_not_extend_the_time_for_headers(self, hasty):
        with hasty.connect() as client:
            client.send(POST)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    client.send(b"a: b\r\n")
                    client.socket.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        if client.socket.recv(1, 2):  # MSG_PEEK: it has answered
                            break
            client.socket.settimeout(TIMEOUT_SECONDS)
            assert client.response()[0] == 408

    def test_a_trickle_does_not_extend_the_time_for_a_body(self, hasty):
        def refusal():
            with hasty.connect() as client:
                client.send(POST + HOST + b"content-length: 1000000\r\n\r\n")
                client.socket.settimeout(0.05)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    while True:
                        client.send(b"x")
                        with contextlib.suppress(TimeoutError):
                            if client.socket.recv(1, 2):  # MSG_PEEK: it has answered
                                break
                client.socket.settimeout(TIMEOUT_SECONDS)
                status, _, body = client.response()
                assert status == 408
                return body

        # If this process is held up, the headers are late already.
        assert b"--min-body-rate" in eventually(lambda: b"headers" not in (body := refusal()) and body)

    @pytest.mark.parametrize("head", [b"POST /services/echo", POST + HOST])
    def test_what_arrived_while_the_process_was_held_up_is_not_late(self, hasty, head):
        def status():
            with hasty.connect() as client:
                client.send(head)
                held_up, arrived = threading.Event(), threading.Event()
                hasty.loop.call_soon_threadsafe(lambda: (held_up.set(), arrived.wait(TIMEOUT_SECONDS), time.sleep(0.4)))
                held_up.wait(TIMEOUT_SECONDS)
                client.send(request()[len(head) :])
                arrived.set()
                return client.response()[0]

        # If this thread is held up after the head, the headers are late.
        assert eventually(lambda: (found := status()) != 408 and found) == 200

    def test_an_idle_connection_ends(self, endpoint, services):
        with running_gateway(endpoint, keep_alive=0.2) as gateway, gateway.connect() as client:
            assert client.send(request(b"x")).response()[0] == 200
            assert client.rest() == b""

    def test_a_reply_may_take_longer(self, hasty, services):
        def status():
            with hasty.connect() as client:
                client.send(b"POST /services/hold HTTP/1.1\r\nhost: x\r\nrequest-timeout: 0.6\r\n\r\n")
                return client.response()[0]

        # If this process is held up, the headers are late.
        assert eventually(lambda: (found := status()) != 408 and found) == 504

    def test_a_client_that_does_not_read(self, endpoint, services):
        with running_gateway(endpoint, body_timeout=0.2) as gateway, gateway.connect() as client:
            client.send(b"POST /services/large HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n30000000")
            eventually(lambda: gateway.gateway.memory > 0)
            eventually(lambda: not list(gateway.server.connections))
            assert len(client.rest()) < 30_000_000
            eventually(lambda: gateway.gateway.memory == 0)

    def test_a_reply_that_takes_more_memory_than_there_is(self, endpoint, services):
        with running_gateway(endpoint, max_memory=1 << 20) as gateway, gateway.connect() as client:
            client.send(b"POST /services/large HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n30000000")
            assert len(client.rest()) < 30_000_000
            eventually(lambda: gateway.gateway.memory == 0)


def test_names_in_certificates():
    certificate = {
        "subject": ((("organizationName", "Shop"),), (("commonName", "shop"),)),
        "subjectAltName": (("DNS", "shop.example"), ("IP Address", "127.0.0.1"), ("URI", "urn:shop")),
    }
    assert certificate_names(certificate) == ("shop", "shop.example", "urn:shop")
    assert certificate_names(None) == ()

"""The middleware, with a real server and clients that write their own bytes."""

import asyncio
import contextlib
import re
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from starlette.requests import ClientDisconnect
from support.gateways import Raw
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.mdp.http.guard import MAX_IGNORED
from zmdp.mdp.http.limits import ServerLimits
from zmdp.mdp.http.server import Server, run
from zmdp.mdp.transport.listening import listen

POST = b"POST / HTTP/1.1\r\n"
HOST = b"host: x\r\n"
LAST = POST + HOST + b"connection: close\r\ncontent-length: 4\r\n\r\nlast"
"""A request that ends the connection: its reply shows that what came before was understood as intended."""


class Application:
    """Answers with the body, or with as many bytes as the path says."""

    def __init__(self):
        self.memory = self.most = 0
        """Bytes of unfinished bodies; the most there ever were."""
        self.arrived: list[int] = []
        """How much of each body arrived."""
        self.answered = self.left = 0
        """Responses that were sent, and those that were not read."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "memory":
            self.most = max(getattr(self, "most", 0), value)

    async def __call__(self, scope, receive, send):
        self.arrived.append(0)
        number, body, more = len(self.arrived) - 1, b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            self.arrived[number] = len(body)
            more = message["more_body"]
        size = scope["path"].strip("/")
        if size.isdecimal():
            body = bytes(int(size))
        headers = [(b"content-length", b"%d" % len(body))]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except ClientDisconnect:
            self.left += 1
            raise
        self.answered += 1


@contextmanager
def served(**limits):
    """Yield the port of a server in a thread, and its application."""
    listener, application, ready = listen("127.0.0.1", 0), Application(), Future()
    port = listener.getsockname()[1]

    async def main():
        server = Server(application, ServerLimits(**limits), listener, owner=application)
        ready.set_result((server, asyncio.get_running_loop()))
        await server.run()

    thread = threading.Thread(target=run, args=(main,))
    thread.start()
    server, loop = ready.result(TIMEOUT_SECONDS)
    try:
        yield port, application
    finally:
        for _ in range(2):
            loop.call_soon_threadsafe(server.stop)
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def plain():
    with served() as (port, _):
        yield port


def statuses(client):
    """Return the statuses of all responses until the connection ends."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", client.rest())]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LAST, [200]),
        (POST + HOST + b"content-length: 1\r\n\r\nx" + LAST, [200, 200]),
        (POST + HOST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n" + LAST, [200, 200]),
        (b"POST / HTTP/1.0\r\ncontent-length: 1\r\n\r\nx", [200]),
        (LAST.replace(b"close", b"close, Upgrade\r\nupgrade: h2c"), [200]),  # as Java's client begins
        # refused, and the connection is closed: nothing of what follows is taken for a request
        (POST + HOST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + LAST, [400]),
        (POST + HOST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + LAST, [400]),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + LAST, [400]),
        (POST + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx" + LAST, [400]),
        (POST + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n" + LAST, [400]),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", [400]),
    ],
    ids=[
        "one", "pipelined", "chunked", "HTTP/1.0", "h2c", "length and chunked", "chunked and length",
        "chunked in HTTP/1.0", "two lengths", "an unknown coding", "TLS",
    ],
)  # fmt: skip
def test_shapes(plain, data, expected):
    with Raw(plain) as client:
        client.send(data)
        assert statuses(client) == expected


def test_headers_without_end(plain):
    with Raw(plain) as client:
        client.send(POST + HOST)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(10_000):
                client.send(b"a: " + b"b" * 10_000 + b"\r\n")
            raise AssertionError("everything was read")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200), (b"LocalHost:8080", 200), (b"127.0.0.1:1", 200), (b"[::1]:8080", 200), (b"[::1]", 200),
        (b"mine", 200), (b"evil.example", 421), (b"evil.example:8080", 421), (b"localhost.evil.example", 421),
        (b"[::2]:80", 421), (b"127.0.0.1:80@evil.example", 421), (b"127.0.0.1:", 421), (b"", 421),
    ],
)  # fmt: skip
def test_pages_of_other_names_cannot_reach_an_open_server(host, status):
    with served(hosts=frozenset({"mine"})) as (port, _), Raw(port) as client:
        client.send(LAST.replace(HOST, b"host: " + host + b"\r\n"))
        assert statuses(client) == [status]


class TestSize:
    def test_a_body_that_is_too_large_is_not_asked_for(self):
        with served(max_body=1000) as (port, application), Raw(port) as client:
            client.send(POST + HOST + b"content-length: 100000000\r\nexpect: 100-continue\r\n\r\n")
            assert statuses(client) == [413]  # no 100 before
            assert application.arrived == []

    @pytest.mark.parametrize("framing", [b"content-length: 2000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n7d0\r\n"])
    def test_who_sends_it_all_the_same_gets_the_answer(self, framing):
        with served(max_body=1000) as (port, application), Raw(port) as client:
            client.send(POST + HOST + framing + bytes(2000))
            status, headers, body = client.response()
            assert (status, headers["connection"]) == (413, "close")
            assert b"--max-body" in body
            assert application.answered == 0

    def test_the_rest_is_read_within_limits(self):
        with served(max_body=1000) as (port, _), Raw(port) as client:
            client.send(POST + HOST + b"content-length: 1000000000\r\n\r\n")
            assert client.response()[0] == 413
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(1000):  # far more than the buffers of the sockets hold
                    client.send(bytes(MAX_IGNORED // 10))
                raise AssertionError("everything was read")

    def test_100_continue(self, plain):
        with Raw(plain) as client:
            client.send(POST + HOST + b"content-length: 2\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n")
            assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
            client.send(b"ok")
            assert client.response()[2] == b"ok"


class TestTime:
    @pytest.mark.parametrize(
        "framing", [b"content-length: 2\r\n\r\nx", b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n"]
    )
    def test_a_body_that_does_not_arrive(self, framing):
        with served(body_timeout=0.2) as (port, application), Raw(port) as client:
            client.send(POST + HOST + framing)
            assert statuses(client) == [408]
            assert application.memory == 0

    def test_a_body_that_arrives_too_slowly(self):
        with served(body_timeout=0.2, min_body_rate=1 << 30) as (port, _), Raw(port) as client:
            client.send(POST + HOST + b"content-length: 1000000\r\n\r\n")
            client.socket.settimeout(0.05)
            while True:
                client.send(b"x")
                with contextlib.suppress(TimeoutError):
                    if client.socket.recv(1, socket.MSG_PEEK):  # it has answered
                        break
            client.socket.settimeout(TIMEOUT_SECONDS)
            status, _, body = client.response()
            assert status == 408
            assert b"--min-body-rate" in body or b"did not go on" in body  # the latter if this process was held up

    def test_a_reply_that_is_not_read(self):
        with served(body_timeout=0.2) as (port, application), Raw(port) as client:
            client.send(b"GET /30000000 HTTP/1.1\r\n" + HOST + b"\r\n")
            eventually(lambda: application.left == 1)
            assert len(client.rest()) < 30_000_000

    def test_an_idle_connection_ends(self):
        with served(keep_alive=0.2) as (port, _), Raw(port) as client:
            assert client.send(POST + HOST + b"content-length: 1\r\n\r\nx").response()[0] == 200
            assert client.rest() == b""


class TestMemory:
    def test_of_unfinished_bodies_the_largest_is_refused(self):
        with served(max_memory=2 << 20) as (port, application), Raw(port) as large, Raw(port) as small:
            small.send(POST + HOST + b"content-length: 300000\r\n\r\n" + bytes(100_000))
            eventually(lambda: application.memory == 100_000)
            large.send(POST + HOST + b"content-length: 2000000\r\n\r\n" + bytes(1_000_000))
            assert statuses(large) == [503]
            eventually(lambda: application.memory == 100_000)
            small.send(bytes(200_000))
            assert small.response()[0] == 200
            assert application.memory == 0

    def test_a_refused_body_is_not_kept_while_the_rest_of_it_arrives(self):
        with served(max_memory=2 << 20) as (port, application), Raw(port) as client:
            client.send(POST + HOST + b"content-length: 4000000\r\n\r\n" + bytes((1 << 20) + 1))
            assert client.response()[0] == 503
            assert application.memory == 0
            application.most = 0
            client.send(bytes(1 << 19))
            client.close()
            with Raw(port) as other:
                other.send(LAST)
                assert statuses(other) == [200]
            assert application.most < len(LAST)

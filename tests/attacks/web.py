"""Attacks over HTTP, on the gateway or on the dashboard: plain TCP connections, and requests that never end."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from random import Random
from typing import Final
from urllib.parse import urlsplit

from .zmtp import PATIENCE, Connection, sent

HEAD: Final = b"Host: 127.0.0.1\r\n"
LARGE_REPLY: Final = 8_000_000
"""Bytes of the reply of the service `large`."""


def idle_connections(endpoint: str, amount: int, rng: Random) -> None:
    """Connections that say nothing; those that are ended are made again."""
    del rng
    _hold(lambda: Connection(endpoint), min(amount // 40, 1500), _seconds(amount), b"")


def idle_connections_at_the_dashboard(endpoint: str, amount: int, rng: Random) -> None:
    """The same, at the dashboard."""
    del rng
    _hold(lambda: Connection(endpoint), min(amount // 40, 1500), _seconds(amount), b"")


def slow_bodies(endpoint: str, amount: int, rng: Random) -> None:
    """Requests whose bodies arrive by one byte a second."""
    del rng
    request = b"POST /services/canary HTTP/1.1\r\n" + HEAD + b"Content-Length: 1000000\r\n\r\n"
    _hold(lambda: _begun(endpoint, request), min(amount // 50, 1000), _seconds(amount), b"x")


def replies_that_are_not_read(endpoint: str, amount: int, rng: Random) -> None:
    """Clients that ask for large replies, and read none of them."""
    del rng
    for _ in range(min(amount // 300, 150)):
        with suppress(OSError):
            _begun(endpoint, b"POST /services/large HTTP/1.1\r\n" + HEAD + b"Content-Length: 0\r\n\r\n", receive=4096)
    time.sleep(_seconds(amount))  # the attack itself


def names_of_no_service(endpoint: str, amount: int, rng: Random) -> None:
    """Requests for thousands of services that do not exist."""
    connection = HTTPConnection(urlsplit(endpoint).netloc, timeout=PATIENCE)
    for _ in range(min(2 * amount // 5, 20_000)):
        connection.request("POST", f"/services/{rng.getrandbits(128):032x}")
        connection.getresponse().read()
        sent["messages"] += 1
    connection.close()


def endless_headers(endpoint: str, amount: int, rng: Random) -> None:
    """Requests whose headers never end."""
    for _ in range(min(amount // 100, 500)):
        with suppress(OSError):
            connection = _begun(endpoint, b"GET / HTTP/1.1\r\n" + HEAD)
            for number in range(100):
                connection.write(b"X-%d: " % number + rng.randbytes(2000).hex().encode() + b"\r\n")


def streams_of_the_dashboard(endpoint: str, amount: int, rng: Random) -> None:
    """More live pages than there may be, which are not read."""
    del rng
    request = b"GET /live/ HTTP/1.1\r\n" + HEAD + b"\r\n"
    _hold(lambda: _begun(endpoint, request, receive=4096), min(amount // 100, 300), _seconds(amount), b"")


def _seconds(amount: int) -> int:
    return max(2, amount // 5000)


def _begun(endpoint: str, request: bytes, receive: int | None = None) -> Connection:
    """Return a connection over which a request has begun; its buffer has room for `receive` bytes of the answer."""
    connection = Connection(endpoint)
    if receive is not None:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.write(request)
    return connection


def _hold(connect: Callable[[], Connection], count: int, seconds: int, data: bytes) -> None:
    """Keep so many connections open, send `data` over each once a second, and replace those that are ended."""
    held: list[Connection] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        while len(held) < count and time.monotonic() < until:
            with suppress(OSError):
                held.append(connect())
        time.sleep(1)  # the attack itself
        held = [each for each in held if _is_open(each, data)]


def _is_open(connection: Connection, data: bytes) -> bool:
    """Send `data`; return whether the server has not ended the connection."""
    try:
        connection.socket.setblocking(False)
        ended = connection.socket.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        ended = False
    except OSError:
        ended = True
    connection.socket.settimeout(PATIENCE)
    if not ended:
        try:
            connection.write(data)
        except OSError:
            ended = True
    sent["messages"] += 1
    if ended:
        connection.close()
    return not ended

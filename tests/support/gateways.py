"""HTTP gateways in a thread, services for them, and clients that write their own bytes."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

import uvloop
from support.loops import serving
from support.processes import TIMEOUT_SECONDS

from zmdp.gateways.access import Access
from zmdp.gateways.gateway import Gateway, Settings
from zmdp.gateways.http.app import gateway_server
from zmdp.gateways.upstream import Upstream
from zmdp.mdp.http.server import Server
from zmdp.mdp.transport.listening import listen
from zmdp.workers import AsyncWorker, ServiceError


class Running:
    """A gateway that runs in a thread."""

    def __init__(self, gateway: Gateway, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway = gateway
        self.server = server
        self.loop = loop
        self.url = server.url
        self.port = int(server.url.rpartition(":")[2])

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the gateway's event loop, and return its result."""
        found: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: found.set_result(function()))
        return found.result(TIMEOUT_SECONDS)

    def connect(self) -> "Raw":
        return Raw(self.port)


@contextmanager
def running_gateway(
    endpoint: str, *, access: Access | None = None, keys: Any = None, tls: Any = None, **settings: Any
) -> Iterator[Running]:
    """Run a gateway in a thread, at a free port."""
    ready: Future[Running] = Future()

    async def main() -> None:
        upstream = Upstream(endpoint, keys=keys)
        gateway = Gateway(upstream, Settings(**settings), access, on_behalf=keys is not None)
        server = gateway_server(gateway, listen("127.0.0.1", 0), tls)
        running = asyncio.ensure_future(server.run())
        await asyncio.sleep(0)
        ready.set_result(Running(gateway, server, asyncio.get_running_loop()))
        try:
            await running
        finally:
            await upstream.close()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    running = ready.result(TIMEOUT_SECONDS)
    try:
        yield running
    finally:
        running.loop.call_soon_threadsafe(running.server.stop)
        running.loop.call_soon_threadsafe(running.server.stop)  # abandon what still waits
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


class Services:
    """What `running_services` offers, and what its handlers have seen."""

    def __init__(self) -> None:
        self.begun: set[bytes] = set()
        """The bodies of requests that `hold` or `endless` has begun; each test sends its own."""
        self.cancelled: set[bytes] = set()
        """The bodies of those that were cancelled."""
        self.requests: list[Any] = []

    async def echo(self, request: Any) -> list[bytes]:
        """Reply with the request."""
        self.requests.append(request)
        return list(request)

    async def large(self, request: Any) -> bytes:
        """Reply with as many bytes as the request says."""
        return bytes(int(request[0]))

    async def parts(self, request: Any) -> Any:
        """Stream as many parts as the first frame says, each with the second frame."""
        body = request[1] if len(request) > 1 else b"part"
        for _ in range(int(request[0])):
            yield body
            await asyncio.sleep(0)

    async def binary(self, request: Any) -> Any:
        """Stream parts that are not one frame of text."""
        del request
        yield [b"\xff\x00"]
        yield [b"two", b"frames"]
        yield [b"lines\nof\n\ntext"]

    async def hold(self, request: Any) -> bytes:
        """Never reply."""
        self.begun.add(request[0])
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.add(request[0])
            raise
        return b""

    async def endless(self, request: Any) -> Any:
        """Stream forever."""
        self.begun.add(request[0])
        try:
            while True:
                yield b"x" * int(request[0])
                await asyncio.sleep(0.001)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add(request[0])
            raise

    async def fail(self, request: Any) -> bytes:
        """Fail with the code, the text and the detail in the request, or with an exception if it is empty."""
        if not request[0]:
            raise ValueError("out of order")
        raise ServiceError(int(request[0]), request[1].decode(), request[2] if len(request) > 2 else None)


@contextmanager
def running_services(endpoint: str, services: Services | None = None, **keys: Any) -> Iterator[Services]:
    """Offer every handler of `Services` at a broker, from a thread."""
    services = services or Services()
    names = ("echo", "large", "parts", "binary", "hold", "endless", "fail")
    with serving(
        *(AsyncWorker(name, getattr(services, name), broker=endpoint, concurrency=256, **keys) for name in names),
        abandon=True,
    ):
        yield services


class Raw:
    """A TCP connection whose bytes the test writes and reads."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_SECONDS)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> Self:
        self.socket.sendall(data)
        return self

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """Read one response: status, headers and body."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (field := self._file.readline().strip()) != b"":
            name, _, value = field.decode("latin-1").partition(":")
            headers[name] = value.strip()
        return int(line.split()[1]), headers, self._file.read(int(headers.get("content-length", 0)))

    def responses(self) -> Iterator[tuple[int, dict[str, str], bytes]]:
        """Read responses until the other side closes the connection."""
        while self._file.peek(1):
            yield self.response()

    def until(self, text: bytes) -> bytes:
        """Read up to and including `text`, which ends with the end of a line."""
        found = bytearray()
        while not found.endswith(text):
            line = self._file.readline()
            assert line, found[-200:]
            found += line
        return bytes(found)

    def rest(self) -> bytes:
        """Read until the other side closes the connection."""
        try:
            return self._file.read()
        except ConnectionResetError:
            return b"reset"

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

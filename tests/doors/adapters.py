"""The doors through which programs make requests, each behind the same few methods, and what each of them lacks.

A door says as attributes what its wire cannot carry, so that the contracts (`test_contracts.py`) check that as well.
"""

import asyncio
import inspect
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import httpx
from support.gateways import Raw, running_gateway
from support.http_gateways import await_services
from support.loops import LoopThread, serving
from support.processes import TIMEOUT_SECONDS, free_endpoint
from support.titanics import serving as serving_titanic

from zmdp.clients import AsyncClient, Client
from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient
from zmdp.interop.freelance.worker import AsyncFreelanceWorker, FreelanceWorker
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestTimeout,
    ServiceError,
    StreamInterrupted,
    UnknownTicket,
    WorkerLost,
)
from zmdp.titanic import Titanic
from zmdp.workers import AsyncWorker, Worker

SERVICE = "job"
BEATS = {"heartbeat": 0.2, "liveness": 600}
"""For all peers: however busy the machine is, only the end of a connection is noticed."""


class Failed(NamedTuple):
    """How a call ended without a reply, in words that all doors share."""

    kind: str
    code: int | None = None
    text: str = ""


class DoorError(Exception):
    """A failure that a door has told in its own way."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed)
        self.failed = failed


KINDS: dict[type[BaseException], str] = {
    CancelledError: "cancelled", UnknownTicket: "cancelled", KeyboardInterrupt: "cancelled",
    BrokerUnreachable: "unreachable", RequestTimeout: "timeout", WorkerLost: "lost", StreamInterrupted: "interrupted",
    ClosedError: "closed",
}  # fmt: skip


def failure_of(error: BaseException) -> Failed:
    """Return an exception in the words that all doors share."""
    if isinstance(error, DoorError):
        return error.failed
    if isinstance(error, ServiceError):
        lost = error.code == 502  # as Titanic stores it
        return Failed("lost") if lost else Failed("failed", error.code, error.text)
    return Failed(next(kind for each, kind in KINDS.items() if isinstance(error, each)))


class Call:
    """A request that was begun."""

    def __init__(self, future: "Future[Any]", cancel: Callable[[], Any] | None = None) -> None:
        self._future = future
        self.cancel = cancel or future.cancel

    def outcome(self) -> list[bytes] | Failed:
        """Wait for the frames of the reply, or for what ended the call without one."""
        try:
            return [bytes(frame) for frame in self._future.result(TIMEOUT_SECONDS)]
        except (Exception, CancelledError, KeyboardInterrupt) as error:  # noqa: BLE001 - contracts look at it
            return failure_of(error)


class Door:
    """A door to a broker at `endpoint`; it may keep files in `folder`."""

    protocol: ClassVar[str] = "X1"
    cancels: ClassVar[bool] = True
    """Whether its handler learns that its caller has cancelled, has left a stream, or …"""
    timeout_cancels: ClassVar[bool] = True
    """… has waited for long enough."""
    leaving_cancels: ClassVar[bool] = True
    overdue: ClassVar[frozenset[str]] = frozenset({"timeout"})
    """How a call ends that takes too long."""
    streams: ClassVar[bool] = True
    """Whether parts arrive one by one; else they are all in the reply."""
    slow_reader: ClassVar[str] = "interrupted"
    """The end of a stream that is read too slowly: `interrupted` or `complete`."""
    part_bytes: ClassVar[int] = 1000
    """Size of the parts of a stream that is read too slowly."""
    last_loss: ClassVar[Failed] = Failed("lost")
    """What is said if the last worker that may have a request is lost with it."""
    broken_stream: ClassVar[str] = "interrupted"
    """The end of a stream whose broker is killed: `interrupted`, or it `continues`."""
    closing_cancels: ClassVar[bool] = True
    """Whether what is outstanding is cancelled when the door is closed."""
    brokered: ClassVar[bool] = True
    """Whether there is a broker that may die."""
    many: ClassVar[int] = 200
    """So many calls at once."""

    def __init__(self, endpoint: str, folder: Path, *, served: bool = True) -> None:
        self.endpoint = endpoint
        self._folder = folder
        self._served = served
        """Whether there is a broker."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._stack.close()

    def worker(self, *handler: Any) -> Any:
        """Return a worker for the service that `begin` and `stream` call; without a handler, one with `recv`."""
        return Worker(
            SERVICE,
            *handler,
            broker=self.endpoint,
            protocol=self.protocol,
            **BEATS,
            **({"concurrency": 8} if handler else {}),
        )

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        """Make a request."""
        raise NotImplementedError

    def stream(self, *body: bytes, timeout: float = TIMEOUT_SECONDS) -> Any:
        """Make a request; return a generator of the parts of its reply."""
        raise NotImplementedError

    def cancelled_once(self, begun: Callable[[], Any], *body: bytes) -> list[bytes] | Failed:
        """Make a request, cancel it once it has `begun`, and return what came of it."""
        call = self.begin(*body)
        begun()
        call.cancel()
        return call.outcome()


# ── clients of a broker ──────────────────────────────────────────────────────────────────────────────────────────────


class Threads(Door):
    """`Client`."""

    def _open(self) -> None:
        self.client = self._stack.enter_context(
            Client(self.endpoint, timeout=TIMEOUT_SECONDS, protocol=self.protocol, **BEATS)
        )

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        return Call(self.client.submit(SERVICE, *body, timeout=timeout, retries=retries))

    def stream(self, *body: bytes, timeout: float = TIMEOUT_SECONDS) -> Any:
        return self.client.stream(SERVICE, *body, timeout=timeout, retries=0)


class Asyncio(Door):
    """`AsyncClient`, in an event loop of its own, and an `AsyncWorker`."""

    def _open(self) -> None:
        loop = LoopThread()
        self._stack.callback(loop.close)
        self._run = loop.run
        self.client = self._run(self._made()).result(TIMEOUT_SECONDS)
        self._stack.callback(lambda: self._run(self.client.close()).result(TIMEOUT_SECONDS))

    def worker(self, *handler: Any) -> Any:
        if not handler:
            return super().worker()
        settings = {"broker": self.endpoint, "protocol": self.protocol, "concurrency": 8}
        return serving(AsyncWorker(SERVICE, awaiting(*handler), **settings, **BEATS))

    async def _made(self) -> Any:
        return AsyncClient(self.endpoint, timeout=TIMEOUT_SECONDS, protocol=self.protocol, **BEATS)

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        return Call(self._run(self._asked(body, timeout, retries)))

    async def _asked(self, body: tuple[bytes, ...], timeout: float, retries: int) -> list[bytes]:
        """Ask; AsyncClient leaves it to its callers to ask again."""
        while True:
            try:
                reply: list[bytes] = await self.client.request(SERVICE, *body, timeout=timeout)
                return reply
            except RequestTimeout:
                if not retries:
                    raise
                retries -= 1

    def stream(self, *body: bytes, timeout: float = TIMEOUT_SECONDS) -> Any:
        parts = self.client.stream(SERVICE, *body, timeout=timeout)
        try:
            while (part := self._run(anext(parts, None)).result(TIMEOUT_SECONDS)) is not None:
                yield part
        finally:
            self._run(parts.aclose()).result(TIMEOUT_SECONDS)


def awaiting(handler: Any) -> Any:
    """Return the same handler for asyncio: it runs in threads, and ends when its request is cancelled."""

    async def run(request: Any) -> Any:
        return await in_thread(handler, request)

    async def run_steps(request: Any) -> Any:
        steps = handler(request)
        try:
            while (part := await in_thread(next, steps, None)) is not None:
                yield part
        finally:
            steps.close()

    called = handler if inspect.isroutine(handler) else type(handler).__call__
    return run_steps if inspect.isgeneratorfunction(called) else run


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread, and wait until it has ended, also if the task is cancelled."""
    running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class Older(Door):
    """What MDP/0.2 lacks beside X1, for clients and workers: CANCEL and ERROR."""

    protocol = "0.2"
    cancels = timeout_cancels = leaving_cancels = closing_cancels = False
    last_loss = Failed("timeout")


class Oldest(Older):
    """MDP/0.1, which has no PARTIAL either."""

    protocol = "0.1"
    streams = False


class Threads02(Older, Threads): ...


class Threads01(Oldest, Threads): ...


class Asyncio02(Older, Asyncio): ...


class Asyncio01(Oldest, Asyncio): ...


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PROBLEMS = {
    "timeout": "timeout", "worker-lost": "lost", "unreachable": "unreachable", "interrupted": "interrupted",
    "slow-reader": "interrupted", "closing": "closed",
}  # fmt: skip


def problem_of(document: dict[str, Any]) -> Failed:
    """Return a problem document in the words that all doors share."""
    kind = document["type"].partition("#")[2]
    if kind in PROBLEMS:
        return Failed(PROBLEMS[kind])
    return Failed("failed", document["code"], document["detail"])


class Http(Door):
    """The HTTP gateway, which a client calls over a connection for each request."""

    part_bytes = 50_000
    many = 50

    def _open(self) -> None:
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self.many))
        self.gateway = self._stack.enter_context(running_gateway(self.endpoint, max_unread=100_000))

    def _sent(self, body: tuple[bytes, ...], timeout: float) -> Raw:
        (content,) = body or (b"",)
        raw = Raw(self.gateway.port, receive_buffer=4096)
        head = (
            f"POST /services/{SERVICE} HTTP/1.1", "host: localhost", f"content-length: {len(content)}",
            f"request-timeout: {timeout:g}", "prefer: wait=3600",
        )  # fmt: skip
        return raw.send("".join(f"{line}\r\n" for line in (*head, "")).encode() + content)

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        raw = self._sent(body, timeout)
        left = threading.Event()

        def reply() -> list[bytes]:
            with raw:
                try:
                    status, _, content = raw.response()
                except (AssertionError, OSError, ValueError):
                    raise DoorError(Failed("cancelled" if left.is_set() else "closed")) from None
            if status == 200:
                return [content]
            if not content:
                raise DoorError(Failed("closed"))
            raise DoorError(problem_of(json.loads(content)))

        def leave() -> None:
            left.set()
            raw.socket.shutdown(2)

        return Call(self._pool.submit(reply), leave)

    def stream(self, *body: bytes, timeout: float = TIMEOUT_SECONDS) -> Any:
        headers = {"accept": "text/event-stream", "request-timeout": f"{timeout:g}", "prefer": "wait=3600"}
        transport = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
        with (
            httpx.Client(base_url=self.gateway.url, transport=transport, timeout=TIMEOUT_SECONDS) as http,
            http.stream("POST", f"/services/{SERVICE}", content=b"".join(body), headers=headers) as response,
        ):
            event = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data":
                    if event == "error":
                        raise DoorError(problem_of(json.loads(value)))
                    yield [value.encode()]


# ── Titanic ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Durable(Door):
    """Titanic: what it has stored goes on, whoever waits for it, until its ticket is closed."""

    timeout_cancels = leaving_cancels = closing_cancels = False
    slow_reader = "complete"
    broken_stream = "continues"
    many = 20

    def _open(self) -> None:
        self._pool = self._stack.enter_context(ThreadPoolExecutor(self.many))
        if self._served:
            self._stack.enter_context(serving_titanic(self.endpoint, str(self._folder / "titanic.db"), max_deaths=1))
            await_services(self.endpoint, "titanic.request", "titanic.reply", "titanic.close")
        self.client = self._stack.enter_context(Client(self.endpoint, timeout=TIMEOUT_SECONDS, **BEATS))
        self.titanic = Titanic(self.client)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def close(self) -> None:
        self.client.close()

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        if not self._served:
            return Call(self._pool.submit(self.client.request, "titanic.request", *body, timeout=timeout, retries=0))
        ticket = self.titanic.submit(SERVICE, *body)
        return Call(self._pool.submit(ticket.result, timeout), ticket.close)

    def stream(self, *body: bytes, timeout: float = TIMEOUT_SECONDS) -> Any:
        return self.titanic.submit(SERVICE, *body).partials()


# ── Freelance ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Freelance(Door):
    """`FreelanceClient`, with two servers in place of a broker; FLP has neither CANCEL nor parts."""

    cancels = timeout_cancels = closing_cancels = False
    streams = brokered = False
    last_loss = Failed("timeout")

    def _open(self) -> None:
        self._endpoints = [free_endpoint(), free_endpoint()]
        self._offered = 0
        self.client = self._connected()

    def _connected(self) -> Any:
        return self._stack.enter_context(FreelanceClient(self._endpoints, timeout=TIMEOUT_SECONDS))

    def worker(self, *handler: Any) -> Any:
        settings = {"concurrency": 8} if handler else {}
        return FreelanceWorker(self._next_endpoint(), *handler, **settings)

    def _next_endpoint(self) -> str:
        self._offered += 1
        return self._endpoints[self._offered % 2]

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        return Call(self.client.submit(*body, timeout=timeout))


class AsyncFreelance(Freelance):
    """`AsyncFreelanceClient` and `AsyncFreelanceWorker`."""

    def worker(self, *handler: Any) -> Any:
        if not handler:
            return super().worker()
        return serving(AsyncFreelanceWorker(self._next_endpoint(), awaiting(*handler), concurrency=8))

    def _connected(self) -> Any:
        loop = LoopThread()
        self._stack.callback(loop.close)
        self._run = loop.run
        client = self._run(self._made()).result(TIMEOUT_SECONDS)
        self._stack.callback(lambda: self._run(client.close()).result(TIMEOUT_SECONDS))
        return client

    async def _made(self) -> Any:
        return AsyncFreelanceClient(self._endpoints, timeout=TIMEOUT_SECONDS)

    def begin(self, *body: bytes, timeout: float = TIMEOUT_SECONDS, retries: int = 0) -> Call:
        return Call(self._run(self.client.request(*body, timeout=timeout)))


DOORS: dict[str, type[Door]] = {
    "threads": Threads, "threads-0.2": Threads02, "threads-0.1": Threads01,
    "asyncio": Asyncio, "asyncio-0.2": Asyncio02, "asyncio-0.1": Asyncio01,
    "http": Http, "titanic": Durable, "freelance": Freelance, "asyncio-freelance": AsyncFreelance,
}  # fmt: skip


@contextmanager
def offered(door: Door, handler: Any) -> Iterator[Any]:
    """Offer the service for a block."""
    with door.worker(handler):
        yield handler

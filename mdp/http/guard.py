"""ASGI middleware: what a request must not be, how long its body may take, and the end of one that is half read."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

from starlette.requests import ClientDisconnect
from uvicorn.protocols.utils import ClientDisconnected

from .checks import check_request, has_body, header_bytes_of
from .connection import CONNECTION, LINGER_SECONDS, Connection
from .connections import Connections
from .limits import ConnectionLimits
from .problems import Problem

MAX_IGNORED: Final = 1 << 20
"""Bytes of a body that are read and ignored because the request has been answered already."""
UNAUTHORIZED_SECONDS: Final = 0.25
"""How long an answer with status 401 takes."""
UNAUTHORIZED_LOG_SECONDS: Final = 10.0
"""Answers with status 401 are logged once in so many seconds."""
_CLOSE: Final = (b"connection", b"close")

log = logging.getLogger("zmdp.http")


class Guard:
    """An ASGI application around another one, whose clients are `connections`."""

    def __init__(self, application: Any, connections: Connections[Connection]) -> None:
        self._application = application
        self._connections = connections
        self._unauthorized = 0
        """Answers with status 401 that were not logged."""
        self._logged_at = -UNAUTHORIZED_LOG_SECONDS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or serve a WebSocket."""
        connection: Connection = scope["state"][CONNECTION]
        exchange: _WebSocket | _Exchange
        if scope["type"] == "websocket":
            exchange = _WebSocket(self, connection, receive, send)
        else:
            connection.cycle = receive.__self__
            exchange = _Exchange(self, connection, self._connections, scope, receive, send)
        try:
            check_request(scope, exchange.first_bytes, self._connections.limits)
        except Problem as problem:
            problem.headers.append(_CLOSE)
            await exchange.answer(problem)
            return
        with suppress(ClientDisconnect):
            await self._application(scope, exchange.receive, exchange.send)
        await exchange.end()

    async def hold_up(self, connection: Connection) -> None:
        """Log that a client has no valid token, and let it wait; its connection may have to make room meanwhile."""
        now = asyncio.get_running_loop().time()
        self._unauthorized += 1
        if now - self._logged_at >= UNAUTHORIZED_LOG_SECONDS:
            text = "refused a client at %s without a valid token or certificate (%d refusals since the last line)"
            log.warning(text, connection.address, self._unauthorized)
            self._unauthorized, self._logged_at = 0, now
        connection.make_optional()
        await asyncio.sleep(UNAUTHORIZED_SECONDS)


class _WebSocket:
    """Tells the connection what has arrived over a WebSocket."""

    first_bytes = b""  # it was re-written by uvicorn

    def __init__(self, guard: Guard, connection: Connection, receive: Any, send: Any) -> None:
        self._guard = guard
        self._send = send
        self._connection = connection
        self._receive = receive
        connection.set_outstanding(0)

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "websocket.receive":
            self._connection.take_message()
        return message

    async def send(self, message: Any) -> None:
        if message.get("status") == 401:
            await self._guard.hold_up(self._connection)
        await self._send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            raise ClientDisconnected  # to uvicorn, an application that ends without a handshake has a bug

    async def end(self) -> None:
        """There is nothing left to say."""

    async def answer(self, problem: Problem) -> None:
        """Refuse to open the WebSocket."""
        status, headers, body = problem.response()
        await self.send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self.send({"type": "websocket.http.response.body", "body": body})


class _Exchange:
    """A request and its response."""

    def __init__(
        self,
        guard: Guard,
        connection: Connection,
        connections: Connections[Connection],
        scope: Any,
        receive: Any,
        send: Any,
    ) -> None:
        self._guard = guard
        self.first_bytes = connection.first_bytes
        self._connection = connection
        self._connections = connections
        self._limits: ConnectionLimits = connections.limits
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._arriving = has_body(scope["headers"])
        """More of the body will arrive."""
        self._header_bytes = header_bytes_of(scope)
        self._size = 0
        """How much of the body has arrived."""
        self._started = False
        """The response has begun."""
        self._refusal: Problem | None = None
        self._timeout: asyncio.Timeout | None = None
        connection.begin(self._header_bytes, has_body=self._arriving)

    # ── the request ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def receive(self) -> Any:
        """Return what has arrived.  If it is refused, the application is told that the client has disconnected."""
        if not self._arriving:
            return await self._receive()
        message = None
        if self._refusal is None:
            self._connection.upload = self
            try:
                async with asyncio.timeout(None) as self._timeout:
                    message = await self._receive()
            except TimeoutError:
                pass
            finally:
                self._connection.upload = self._timeout = None
        if self._refusal is not None:
            return {"type": "http.disconnect"}
        return self._noted(message)

    def _noted(self, message: Any) -> Any:
        if message["type"] == "http.request":
            self._size += len(message["body"])
            self._connection.progress(self._size)
            if not message["more_body"]:
                self._arriving = False
                self._connection.complete(self._header_bytes + self._size)
        return message

    def refuse(self, problem: Problem) -> None:
        """End `receive`, which waits."""
        self._refusal = problem
        if self._timeout is not None:
            self._timeout.reschedule(self._loop.time())

    def check(self, now: float) -> None:
        """Refuse a body that does not go on, or that arrives too slowly."""
        limits, elapsed = self._limits, now - self._began
        if now - max(self._connection.heard, self._began) > limits.body_timeout:
            text = f"the body of the request did not go on for {limits.body_timeout:g} s"
            self.refuse(Problem("slow-request", text))
        elif elapsed > limits.body_timeout and self._size < limits.min_body_rate * elapsed:
            text = f"{self._size} bytes of the body arrived in {elapsed:.1f} s"
            self.refuse(Problem("slow-request", f"{text}: --min-body-rate is {limits.min_body_rate}"))

    # ── the response ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(self, message: Any) -> None:
        """Send a part of the response, unless another one was sent."""
        if self._refusal is None:
            await self._forward(message)

    async def end(self) -> None:
        """Answer a request that was refused while its body arrived.

        Not before the application has ended, which kept what had arrived: the answer may take long.
        """
        if self._refusal is not None and not self._started:
            await self.answer(self._refusal)

    async def answer(self, problem: Problem) -> None:
        """Answer with a problem document."""
        status, headers, body = problem.response()
        await self._forward({"type": "http.response.start", "status": status, "headers": headers})
        await self._forward({"type": "http.response.body", "body": body})

    async def _forward(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            if message["status"] == 401:
                await self._guard.hold_up(self._connection)
            if (self._arriving or self._connections.draining) and _CLOSE not in message.get("headers", ()):
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
        elif not message.get("more_body", False):
            if self._arriving:
                await self._send({**message, "more_body": True})
                await self._ignore_rest()
                message = {"type": "http.response.body", "body": b""}
            self._connection.end()
        await self._send(message)

    async def _ignore_rest(self) -> None:
        """Read the rest of the body, within limits, so that the client gets the response."""
        limit = self._size + MAX_IGNORED
        self._connection.discard()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self._arriving and self._size < limit:
                    if self._noted(await self._receive())["type"] != "http.request":
                        return

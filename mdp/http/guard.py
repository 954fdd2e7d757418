"""ASGI middleware: size, time and memory of bodies, and the end of a request that is half read."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final, Protocol

from starlette.requests import ClientDisconnect

from .limits import ServerLimits, check_request, length_of
from .problems import Problem

MAX_IGNORED: Final = 32 << 20
"""Maximum number of bytes of a body that are ignored after the answer: more than a proxy in front has under way when it
stops at the default of `max_body`."""
LINGER_SECONDS: Final = 2.0
"""How long the rest of a body is ignored: closing a connection while the client sends would discard the answer."""
WRITE_BYTES: Final = 1 << 16
"""Size of the pieces of a response, each of which the client must read within `body_timeout`."""
UNAUTHORIZED_SECONDS: Final = 0.25
"""Delay of an answer with status 401."""
UNAUTHORIZED_LOG_SECONDS: Final = 10.0
"""Interval at which answers with status 401 are logged."""
_CLOSE: Final = (b"connection", b"close")

log = logging.getLogger("zmdp.http")


class Owner(Protocol):
    """The owner of a server, such as a gateway."""

    memory: int
    """Bytes of incomplete bodies, and of everything else that the owner counts."""


class Alone:
    """The owner of a server that shares nothing with anything else."""

    memory = 0


class Guard:
    """An ASGI application around another one."""

    def __init__(self, application: Any, limits: ServerLimits, owner: Owner) -> None:
        self.limits = limits
        self.outstanding = 0
        """Requests that have not been answered."""
        self.cut_off = 0
        """Number of requests that were cancelled before they were answered."""
        self._application = application
        self._owner = owner
        self._unfinished = 0
        """Bytes of all incomplete bodies."""
        self._uploads: dict[_Exchange, int] = {}
        """The bytes that have arrived of each incomplete body."""
        self._unauthorized = 0
        """Answers with status 401 that were not logged."""
        self._logged_at = -UNAUTHORIZED_LOG_SECONDS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        exchange = _Exchange(self, scope, receive, send)
        self.outstanding += 1
        try:
            await exchange.perform(self._application)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            raise
        finally:
            self.outstanding -= 1
            self.hold(exchange, 0)

    def hold(self, exchange: "_Exchange", size: int) -> None:
        """Take in how much of an incomplete body has arrived.  If all together exceed the limit, refuse the largest."""
        change = size - self._uploads.pop(exchange, 0)
        if size:
            self._uploads[exchange] = size
        self._unfinished += change
        self._owner.memory += change
        if self._unfinished > self.limits.max_unfinished:
            largest = max(self._uploads, key=self._uploads.__getitem__)
            text = f"requests that have not arrived completely take {self.limits.max_unfinished} bytes"
            largest.refuse(Problem("overloaded", f"{text}, which is half of --max-memory"))

    async def hold_up(self, client: Any) -> None:
        """Log that a client has no valid token, and delay the answer."""
        now = asyncio.get_running_loop().time()
        self._unauthorized += 1
        if now - self._logged_at >= UNAUTHORIZED_LOG_SECONDS:
            text = "refused a client at %s without a valid token (%d refusals since the last line)"
            log.warning(text, client[0] if client else "a socket", self._unauthorized)
            self._unauthorized, self._logged_at = 0, now
        await asyncio.sleep(UNAUTHORIZED_SECONDS)


class _Exchange:
    """A request and its response."""

    def __init__(self, guard: Guard, scope: Any, receive: Any, send: Any) -> None:
        self._guard = guard
        self._limits = guard.limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._length = length_of(scope["headers"])
        self._arriving = self._length != 0
        """More of the body will arrive."""
        self._size = 0
        """Bytes of the body that have arrived."""
        self._started = False
        """The response has begun."""
        self._gone = False
        """The client does not read."""
        self._refusal: Problem | None = None
        self._timeout: asyncio.Timeout | None = None

    async def perform(self, application: Any) -> None:
        """Have the application answer, unless the request is refused."""
        try:
            check_request(self._scope, self._limits.hosts)
        except Problem as problem:
            problem.headers.append(_CLOSE)
            await self._answer(problem)
            return
        self._check_size(self._length or 0)
        if self._refusal is None:
            try:
                await application(self._scope, self.receive, self.send)
            except Exception as error:
                if not (self._gone or isinstance(error, ClientDisconnect)):
                    raise
        # Only now that the application has ended, and its memory is free: the answer may take long.
        if self._refusal is not None and not self._started:
            await self._answer(self._refusal)

    # ── the request ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def receive(self) -> Any:
        """Return what has arrived; if the request is refused, tell the application that the client has disconnected."""
        if not self._arriving:
            return await self._receive()
        message = None
        if self._refusal is None:
            try:
                async with asyncio.timeout(self._limits.body_timeout) as self._timeout:
                    message = await self._receive()
            except TimeoutError:
                pass
            finally:
                self._timeout = None
        if message is not None:
            self._take_in(message)
        else:
            text = f"the body of the request did not go on for {self._limits.body_timeout:g} s"
            self.refuse(Problem("slow-request", text))
        return {"type": "http.disconnect"} if self._refusal is not None else message

    def _take_in(self, message: Any) -> None:
        if message["type"] != "http.request":
            return
        self._size += len(message["body"])
        self._arriving = message["more_body"]
        self._check_size(self._size)
        self._check_rate()
        self._guard.hold(self, self._size if self._arriving and self._refusal is None else 0)

    def _check_size(self, size: int) -> None:
        limit = self._limits.max_body
        if size > limit:
            self.refuse(Problem("too-large", f"the body of a request may have up to {limit} bytes (--max-body)"))

    def _check_rate(self) -> None:
        limits, elapsed = self._limits, self._loop.time() - self._began
        if self._arriving and elapsed > limits.body_timeout and self._size < limits.min_body_rate * elapsed:
            text = f"{self._size} bytes of the body arrived in {elapsed:.1f} s"
            self.refuse(Problem("slow-request", f"{text}: --min-body-rate is {limits.min_body_rate}"))

    def refuse(self, problem: Problem) -> None:
        """Answer with a problem instead, once the application has ended; end `receive`, if it waits."""
        self._refusal = self._refusal or problem
        self._guard.hold(self, 0)
        if self._timeout is not None:
            self._timeout.reschedule(self._loop.time())

    # ── the response ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(self, message: Any) -> None:
        """Send a part of the response, unless another one is sent instead."""
        if self._refusal is None:
            await self._forward(message)

    async def _answer(self, problem: Problem) -> None:
        """Answer with a problem document."""
        status, headers, body = problem.response()
        await self._forward({"type": "http.response.start", "status": status, "headers": headers})
        await self._forward({"type": "http.response.body", "body": body})

    async def _forward(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            if message["status"] == 401:
                await self._guard.hold_up(self._scope["client"])
            if self._arriving and _CLOSE not in message.get("headers", ()):
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
        elif message["type"] == "http.response.body":
            body, more = message.get("body", b""), message.get("more_body", False)
            at = 0
            while len(body) - at > WRITE_BYTES:
                part = body[at : at + WRITE_BYTES]
                await self._write({"type": "http.response.body", "body": part, "more_body": True})
                at += WRITE_BYTES
            message = {"type": "http.response.body", "body": body[at:], "more_body": more}
            if self._arriving and not more:
                await self._write({**message, "more_body": True})
                await self._ignore_rest()
                message["body"] = b""
        await self._write(message)

    async def _write(self, message: Any) -> None:
        """Send a message; if the client does not read it in time, end the request, and so the connection."""
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                await self._send(message)
        except TimeoutError:
            self._gone = True  # uvicorn closes the connection of a response that is not complete
        if self._gone:
            raise ClientDisconnect

    async def _ignore_rest(self) -> None:
        """Read the rest of the body, within limits, so that the client gets the response."""
        self._guard.hold(self, 0)
        ignored = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self._arriving and ignored < MAX_IGNORED:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        return
                    ignored += len(message["body"])
                    self._arriving = message["more_body"]

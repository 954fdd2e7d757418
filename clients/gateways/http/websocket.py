"""WebSockets at `/ws`: many requests over one connection (docs/how-to/gateways.md)."""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ....mdp.errors import ClosedError, SettingError
from ....mdp.http.problems import Problem
from ....mdp.wire import service_name
from ....mdp.wire.options import BROKERS
from ...call import Call, Outcome
from ...reply import Reply
from .access import Caller
from .gateway import Gateway, connection_of
from .problems import problem_of
from .websocket_messages import Ask, CancelAsk, Id, MessageError, decode, encode, encode_error

PATH: Final = "/ws"
SUBPROTOCOL: Final = "zmdp"
TOKEN_PREFIX: Final = "zmdp.token."  # noqa: S105 - not a secret
"""A subprotocol that carries a token, because scripts in a browser cannot set headers."""
MAX_OUTSTANDING: Final = 1000
"""Outstanding requests of one connection from which on nothing more is read from it."""
MAX_WAITING_BYTES: Final = 64 << 10
"""Bytes that wait for the client from which on nothing more is read from it."""
GOING_AWAY: Final = 1001

log = logging.getLogger("zmdp.gateway")


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the routes of WebSockets, and the one that answers requests without an upgrade."""

    async def upgrade_required(request: HttpRequest) -> HttpResponse:
        del request
        headers = [(b"upgrade", b"websocket"), (b"connection", b"upgrade")]
        raise Problem("upgrade-required", "open it as a WebSocket", headers=headers)

    async def serve(websocket: WebSocket) -> None:
        try:
            session = Session(gateway, websocket)
        except Problem as problem:
            await _deny(websocket, problem)
        else:
            await session.run()

    async def missing(websocket: WebSocket) -> None:
        await _deny(websocket, Problem("not-found", f"WebSockets are at {PATH}"))

    return [
        Route(PATH, upgrade_required, methods=["GET"]),
        WebSocketRoute(PATH, serve),
        WebSocketRoute("/{path:path}", missing),
    ]


async def _deny(websocket: WebSocket, problem: Problem) -> None:
    """Answer the handshake with a problem document."""
    status, headers, body = problem.response()
    response = HttpResponse(body, status)
    response.raw_headers = headers
    await websocket.send_denial_response(response)


class Session:
    """One connection, from its handshake on: its role is that of the token or certificate with which it is opened.

    Every request ends with one `final` or one `error`; afterwards its id may be used again.  Raises `Problem` if the
    client may not open it.
    """

    def __init__(self, gateway: Gateway, websocket: WebSocket) -> None:
        self._gateway = gateway
        self._websocket = websocket
        self._connection = connection_of(websocket.scope)
        headers = websocket.headers
        for origin in headers.getlist("origin"):
            gateway.check_origin(origin.encode("latin-1"))
        offered = websocket.scope["subprotocols"]
        tokens = [each.removeprefix(TOKEN_PREFIX) for each in offered if each.startswith(TOKEN_PREFIX)]
        authorization = f"Bearer {tokens[-1]}" if tokens else headers.get("authorization")
        self._credentials = (
            None if authorization is None else authorization.encode("latin-1", "replace"), self._connection.certificate,
        )  # fmt: skip
        # Browsers fail if a server selects none of those that they offer.
        self._subprotocol = SUBPROTOCOL if SUBPROTOCOL in offered else None
        self._identify()
        self.client = gateway.upstream.client
        self._requests: dict[Id, _Request] = {}
        """Those that are outstanding."""
        self._unsent: deque[bytes | str] = deque()
        self._unsent_bytes = 0
        self._draining = False
        self._closing = False
        self._changed = asyncio.Event()
        """There is something to send, or to close."""
        self._may_read = asyncio.Event()
        self._may_read.set()

    def _identify(self) -> None:
        self._caller: Caller = self._gateway.identify(*self._credentials)
        self._access = self._gateway.access  # last: as long as the client is unknown, each request asks again
        self._connection.role = self._caller.role or ""

    # ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve the connection until it ends."""
        self._gateway.sessions.add(self)
        self._connection.on_disconnect = self._may_read.set
        writer = None
        try:
            await self._websocket.accept(self._subprotocol)
            writer = asyncio.ensure_future(self._write())
            while True:
                await self._may_read.wait()
                if self._connection.disconnected:
                    return
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                self._take(message.get("text") or message.get("bytes") or "")
        finally:
            self._closing = True
            self._gateway.sessions.discard(self)
            for request in list(self._requests.values()):
                self._forget(request)
                request.cancel()
            self._gateway.memory -= self._unsent_bytes
            if writer is not None:
                writer.cancel()
                await asyncio.wait({writer})

    def _take(self, message: str | bytes) -> None:
        """Take in a message."""
        try:
            said = decode(message)
        except MessageError as error:
            # An error with the id of an outstanding request would end that one.
            self._say_error(None if error.id in self._requests else error.id, Problem("invalid", str(error)))
            return
        request = self._requests.get(said.id)
        if isinstance(said, CancelAsk):
            if request is not None:  # otherwise the CANCEL crossed the end of the request
                self._forget(request)
                request.cancel()
                self._say_error(said.id, Problem("cancelled", "cancelled as asked", service=request.ask.service))
        elif request is not None:
            self._say_error(None, Problem("invalid", f"id {said.id!r:.120} is in use by an outstanding request"))
        else:
            try:
                self._begin(said)
            except Problem as problem:
                self._say_error(said.id, problem)

    def _begin(self, ask: Ask) -> None:
        """Make a request.  Raises `Problem`."""
        gateway, settings, service = self._gateway, self._gateway.settings, ask.service
        if self._draining:
            raise Problem("closing", "the gateway is shutting down", service=service)
        if self._access is not gateway.access:  # it was read again
            self._identify()
        try:
            gateway.check_call(self._caller, service_name(service))
        except SettingError as error:
            raise Problem("invalid", str(error)) from None
        if ask.timeout is not None and ask.timeout > settings.max_timeout:
            raise Problem("invalid", f"timeout must be at most {settings.max_timeout:g} seconds", service=service)
        if len(ask.body) > settings.max_parts:
            raise Problem("too-large", f"a body has at most {settings.max_parts} frames", service=service)
        options, own = ask.options, gateway.options(self._caller)
        if options is not None and not BROKERS.isdisjoint(options):
            names = ", ".join(sorted(BROKERS))
            raise Problem("invalid", f"options may not have these, which gateway and broker set: {names}")
        request = _Request(self, ask, settings.timeout if ask.timeout is None else ask.timeout)
        gateway.enter(request.size)
        self._requests[ask.id] = request
        try:
            request.call = self.client.begin(
                request, service, *ask.body, timeout=request.timeout, wait=ask.wait, headers=ask.headers,
                options={**(options or {}), **own} if own else options,
            )  # fmt: skip
        except (SettingError, ClosedError) as error:
            self._forget(request)
            raise problem_of(error, service) from None
        gateway.upstream.requests += 1
        self._connection.set_outstanding(len(self._requests))
        self._read_or_wait()

    def _forget(self, request: "_Request") -> None:
        """Take in that a request has ended."""
        del self._requests[request.ask.id]
        self._gateway.leave(request.size)
        self._connection.set_outstanding(len(self._requests))
        self._read_or_wait()
        self._changed.set()

    def _read_or_wait(self) -> None:
        """Read nothing while much is outstanding or waits for the client, so that no more is asked for."""
        if len(self._requests) < MAX_OUTSTANDING and self._unsent_bytes < MAX_WAITING_BYTES:
            self._may_read.set()
        else:
            self._may_read.clear()

    def drain(self) -> None:
        """Close the connection once nothing is outstanding; requests from now on are for another gateway."""
        self._draining = True
        self._changed.set()

    # ── the broker ───────────────────────────────────────────────────────────────────────────────────────────────────

    def answered(self, request: "_Request", outcome: Outcome) -> None:
        """Pass on a part, the reply or the error of a request."""
        ask = request.ask
        if self._requests.get(ask.id) is not request:
            return
        if not isinstance(outcome, Reply):
            self._forget(request)
            self._say_error(ask.id, problem_of(outcome, ask.service, overdue=monotonic() >= request.deadline))
        elif outcome.final:
            self._forget(request)
            self._say(ask, "final", outcome)
        elif ask.stream:
            self._say(ask, "partial", outcome)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, ask: Ask, kind: str, reply: Reply) -> None:
        self._send(encode(ask.id, kind, reply, ask.form))

    def _say_error(self, id_: Id | None, problem: Problem) -> None:
        self._send(encode_error(id_, problem.document()))

    def _send(self, message: str | bytes) -> None:
        settings = self._gateway.settings
        if self._closing:
            return
        if self._unsent_bytes > settings.max_unread or self._gateway.memory > settings.max_memory:
            log.warning("WebSocket from %s: disconnected: it does not read what it is sent", self._connection.address)
            self._closing = True
            self._connection.abort()
            return
        self._unsent.append(message)
        self._count(len(message))
        self._changed.set()

    def _count(self, change: int) -> None:
        self._unsent_bytes += change
        self._gateway.memory += change
        self._read_or_wait()

    async def _write(self) -> None:
        """Write what there is to send, as fast as the client reads, and close the connection once it is drained."""
        websocket = self._websocket
        with suppress(WebSocketDisconnect):
            while not self._draining or self._requests:
                await self._changed.wait()
                self._changed.clear()
                while self._unsent:
                    message = self._unsent.popleft()
                    await (websocket.send_text(message) if isinstance(message, str) else websocket.send_bytes(message))
                    self._count(-len(message))
            await websocket.close(GOING_AWAY, "the gateway is shutting down")


class _Request:
    """A request: the receiver of its outcomes."""

    __slots__ = ("_session", "ask", "call", "deadline", "size", "timeout")

    def __init__(self, session: Session, ask: Ask, timeout: float) -> None:
        self._session = session
        self.ask = ask
        self.timeout = timeout
        self.deadline = monotonic() + timeout
        self.size = sum(map(len, ask.body))
        self.call: Call | None = None

    def put(self, outcome: Outcome) -> None:
        """Take in a part, the reply or the error."""
        self._session.answered(self, outcome)

    def cancel(self) -> None:
        """Cancel it at the broker."""
        if self.call is not None:
            self._session.client.cancel(self.call)

"""WebSockets at `/ws`: many requests over one connection (docs/gateways.md).

uvicorn hands over a connection whose client asks for an upgrade.  From then on `WebSocketConnection` owns the
transport, so that reading can be paused, and what a peer has not read can be counted.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any, Final, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader, InvalidUpgrade, SecurityError
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from ....mdp.errors import SettingError, ZmdpError
from ....mdp.http.connection import CONNECTION
from ....mdp.http.problems import Problem
from ....mdp.transport.reading import Reading
from ....mdp.wire import service_name
from ....mdp.wire.options import BROKERS
from ..conversation import Conversation
from ..effects import Begin
from .access import Caller
from .gateway import Gateway
from .problems import problem_of
from .websocket_messages import Ask
from .websocket_session import WebSocketSession

PATH: Final = "/ws"
SUBPROTOCOL: Final = "zmdp"
TOKEN_PREFIX: Final = "zmdp.token."  # noqa: S105 - not a secret
"""A subprotocol that carries a token, because scripts in a browser cannot set headers."""
_VERSION: Final = "Sec-WebSocket-Version"
MAX_OUTSTANDING: Final = 1000
"""Outstanding requests of one connection from which on nothing more is read from it."""
PING_SECONDS: Final = 20.0
"""Interval of PINGs.  A peer that has sent nothing for one interval after a PING is disconnected."""
LINGER_SECONDS: Final = 5.0
"""How long a peer may take to read the last messages and to close its side."""

log = logging.getLogger("zmdp.gateway")
_frames_log = logging.getLogger("zmdp.gateway.websocket")
_frames_log.setLevel(logging.WARNING)  # the codec logs the start and the end of every connection


def routes(gateway: Gateway) -> list[Route]:
    """Return the route that answers requests without an upgrade."""
    del gateway

    async def upgrade_required(request: HttpRequest) -> HttpResponse:
        del request
        headers = [(b"upgrade", b"websocket"), (b"connection", b"upgrade")]
        raise Problem("upgrade-required", "open it as a WebSocket", headers=headers)

    return [Route(PATH, upgrade_required, methods=["GET"])]


def protocol(gateway: Gateway) -> Callable[..., asyncio.Protocol]:
    """Return what uvicorn's setting `ws` must be."""
    return partial(WebSocketConnection, gateway)


class WebSocketConnection(asyncio.Protocol):
    """One connection, from its handshake on.  The other arguments are those that uvicorn passes."""

    def __init__(self, gateway: Gateway, config: Any, server_state: Any, app_state: Any) -> None:
        del config
        self._gateway = gateway
        self._connections: set[Any] = server_state.connections
        connection = app_state.get(CONNECTION)  # of which this takes over the transport
        self._certificate: tuple[str, ...] = () if connection is None else connection.certificate
        self._frames = ServerProtocol(
            max_size=gateway.settings.max_body, select_subprotocol=_select_subprotocol, logger=_frames_log
        )
        self.opened = asyncio.get_running_loop().time()
        """When it became a WebSocket."""
        self.role = ""
        """The role of its peer; empty if everybody may do everything."""
        self._opened: tuple[WebSocketSession, Conversation] | None = None
        """Once the handshake is done."""
        self._heard = False
        """Whether anything has arrived since the last PING."""
        self._congested = False
        """Much is left unread."""
        self._read = 0
        """Bytes that the peer had read at the last PING."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def outstanding(self) -> int:
        """Number of its requests that have not ended."""
        return 0 if self._opened is None else self._opened[1].outstanding

    # ── called by asyncio and uvicorn ────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over a connection."""
        self.transport = cast(asyncio.Transport, transport)
        self._peer = _Peer(self.transport, self._gateway)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Take in bytes: first the HTTP request, then frames."""
        self._heard = True
        if self._opened is not None:
            self._opened[1].received(data)
        elif not self._peer.closing:
            self._shake_hands(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel everything."""
        del exc
        self._connections.discard(self)
        self._peer.forget()
        if self._timer is not None:
            self._timer.cancel()
        if self._opened is not None:
            self._opened[1].lost()

    def pause_writing(self) -> None:
        """The peer reads more slowly than it is answered: read nothing from it."""
        self._congest(True)

    def resume_writing(self) -> None:
        """The peer has read."""
        self._peer.count(0)
        self._congest(False)

    def _congest(self, is_so: bool) -> None:
        self._congested = is_so
        if self._opened is not None:
            self._opened[1].congested(is_so)

    def shutdown(self) -> None:
        """Finish the outstanding requests, then close: the server is stopping."""
        if self._opened is None:
            self.transport.close()
        else:
            session, conversation = self._opened
            session.drain()
            conversation.act()

    # ── the handshake ────────────────────────────────────────────────────────────────────────────────────────────────

    def _shake_hands(self, data: bytes) -> None:
        self._frames.receive_data(data)
        requests = [each for each in self._frames.events_received() if isinstance(each, Request)]
        if self._frames.handshake_exc is not None:
            self._refuse(_not_opened(self._frames.handshake_exc))
        for request in requests:
            try:
                policy = self._admit(request)
            except Problem as problem:
                self._refuse(problem)
                return
            response = self._frames.accept(request)
            if self._frames.handshake_exc is not None:
                self._refuse(_not_opened(self._frames.handshake_exc))
                return
            self._frames.send_response(response)
            self.transport.write(b"".join(self._frames.data_to_send()))
            self._open(policy)

    def _admit(self, request: Request) -> "_Policy":
        """Return what the peer may do.  Raises `Problem`."""
        path = request.path.partition("?")[0]
        if path != PATH:
            raise Problem("not-found", f"WebSockets are at {PATH}")
        for origin in request.headers.get_all("Origin"):
            self._gateway.check_origin(origin.encode("latin-1", "replace"))
        given = request.headers.get_all("Authorization")
        authorization = given[0].encode("latin-1", "replace") if given else None
        for offered in _offered(request.headers):
            if offered.startswith(TOKEN_PREFIX):
                authorization = b"Bearer " + offered.removeprefix(TOKEN_PREFIX).encode("latin-1", "replace")
        return _Policy(self._gateway, authorization, self._certificate)

    def _refuse(self, problem: Problem) -> None:
        status, headers, body = problem.response()
        fields = Headers([(name.decode(), value.decode("latin-1")) for name, value in headers])
        fields["Connection"] = "close"
        response = Response(status, HTTPStatus(status).phrase, fields, body)
        self.transport.write(response.serialize())
        self._peer.close()

    def _open(self, policy: "_Policy") -> None:
        self.role = policy.role
        session = WebSocketSession(self._frames, policy)
        host, port, *_ = self.transport.get_extra_info("peername") or ("a peer", 0)
        conversation = Conversation(
            session, self._peer, self._gateway.upstream, name=f"WebSocket from {host}:{port}",
            max_outstanding=MAX_OUTSTANDING, max_unread_bytes=self._gateway.settings.max_unread,
        )  # fmt: skip
        self._opened = session, conversation
        self._check_alive(session, conversation)

    def _check_alive(self, session: WebSocketSession, conversation: Conversation) -> None:
        """Disconnect a peer that has neither sent anything nor answered a PING, or that reads nothing."""
        read, before = self._peer.read_bytes(), self._read
        self._read = read
        if self._congested:
            if read == before:
                self.transport.abort()
        elif self._heard:
            self._heard = False
            session.ping()
        elif not self._peer.paused:  # nothing is read from a peer that is paused
            session.close(CloseCode.INTERNAL_ERROR, "no answer to a PING")
        conversation.act()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PING_SECONDS, self._check_alive, session, conversation)


class _Peer:
    """The transport, as a conversation uses it."""

    def __init__(self, transport: asyncio.Transport, gateway: Gateway) -> None:
        self._transport = transport
        self._gateway = gateway
        self._written = 0
        """Bytes that were written in all."""
        self._unread = 0
        """Bytes that the peer has not read, as far as they count as memory of the gateway."""
        self._reading = Reading(transport)
        self.closing = False
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        self._written += len(data)
        self.count(self.unread_bytes())
        if self._gateway.memory > self._gateway.settings.max_memory:
            self.abort()

    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def read_bytes(self) -> int:
        return self._written - self.unread_bytes()

    def count(self, unread: int) -> None:
        self._gateway.memory += unread - self._unread
        self._unread = unread

    @property
    def paused(self) -> bool:
        return self._reading.paused

    def pause(self) -> None:
        self._reading.pause()

    def resume(self) -> None:
        self._reading.resume()

    def close(self) -> None:
        """Send what was written and the end of the stream, then wait for the peer's.

        Closing at once would send a reset if the peer has sent something that was not read, and the peer might then
        lose the last messages.
        """
        if self.closing:
            return
        self.closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.resume()
        else:
            self._transport.close()
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    def forget(self) -> None:
        """The connection is closed."""
        self.count(0)
        self._reading.stop()
        if self._timer is not None:
            self._timer.cancel()


class _Policy:
    """What a peer may do: its role is that of the token or certificate with which it connected."""

    def __init__(self, gateway: Gateway, authorization: bytes | None, certificate: tuple[str, ...]) -> None:
        self._gateway = gateway
        self._credentials = (authorization, certificate)
        self._access = gateway.access
        self._caller: Caller = gateway.identify(*self._credentials)
        self.role = self._caller.role or ""
        self._held = 0
        self._due: dict[int, float] = {}
        """When the timeout of each outstanding request passes."""

    def begin(self, number: int, ask: Ask) -> Begin:
        gateway, service, timeout = self._gateway, ask.service, ask.timeout
        if self._access is not gateway.access:  # it was read again
            self._caller = gateway.identify(*self._credentials)
            self._access = gateway.access
        try:
            gateway.check_call(self._caller, service_name(service))
        except SettingError as error:
            raise Problem("invalid", str(error)) from None
        settings = gateway.settings
        if timeout is not None and timeout > settings.max_timeout:
            raise Problem("invalid", f"timeout must be at most {settings.max_timeout:g} seconds", service=service)
        if len(ask.body) > settings.max_parts:
            raise Problem("too-large", f"a body has at most {settings.max_parts} frames", service=service)
        options = ask.options
        if options is not None and not BROKERS.isdisjoint(options):
            names = ", ".join(sorted(BROKERS))
            raise Problem("invalid", f"options may not have these, which gateway and broker set: {names}")
        own = gateway.options(self._caller)
        gateway.enter(_size(ask))
        timeout = settings.timeout if timeout is None else timeout
        self._due[number] = monotonic() + timeout
        return Begin(
            number, service, ask.body, timeout, ask.wait, ask.headers,
            {**(options or {}), **own} if own else options,
        )  # fmt: skip

    def end(self, number: int, ask: Ask) -> None:
        del self._due[number]
        self._gateway.leave(_size(ask))

    def problem(self, number: int, error: ZmdpError, ask: Ask) -> Problem:
        return problem_of(error, ask.service, overdue=monotonic() >= self._due[number])

    def hold(self, size: int) -> None:
        grown = size - self._held
        if grown > 0:
            try:
                self._gateway.charge(grown)
            except Problem:
                self.hold(0)
                raise
        else:  # what is released must never be refused, however much others hold
            self._gateway.memory += grown
        self._held = size


def _not_opened(error: Exception) -> Problem:
    """Return the problem for an error of the codec in the handshake."""
    text = f"the WebSocket cannot be opened: {error}"
    if isinstance(error, SecurityError) or isinstance(error.__cause__, SecurityError):
        return Problem("headers-too-large", text)
    if isinstance(error, InvalidUpgrade) or (isinstance(error, InvalidHeader) and error.name == _VERSION):
        headers = [(b"upgrade", b"websocket"), (b"sec-websocket-version", b"13")]
        return Problem("upgrade-required", text, headers=headers)
    return Problem("invalid", text)


def _size(ask: Ask) -> int:
    return sum(map(len, ask.body))


def _offered(headers: Headers) -> list[str]:
    return [name.strip() for value in headers.get_all("Sec-WebSocket-Protocol") for name in value.split(",")]


def _select_subprotocol(frames: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Select `zmdp` if it is offered: browsers fail if a server selects none of those that they offer."""
    del frames
    return Subprotocol(SUBPROTOCOL) if SUBPROTOCOL in offered else None

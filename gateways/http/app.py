"""The ASGI application: `POST /services/NAME` without any framework, everything else through Starlette's routes."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...clients.calls.reply import Outcome, Reply
from ...clients.json_values import encoded
from ...clients.x1.broker_connection import Call
from ...mdp.errors import BrokerUnreachable, RequestTimeout, ZmdpError
from ...mdp.http.problems import Problem, RawHeaders
from ...mdp.services import About
from . import jobs, metrics, openapi, stream
from .accept import preferred
from .gateway import Gateway, Scope, on_disconnect
from .problems import problem_of
from .request_body import read_body
from .rows import own_types, stream_types, values
from .service_list import list_services
from .translation import AS_DATA, EVENT_STREAM, LINES, PREFIX, Asked, body_of, frames_of, service_of

READY_TIMEOUT_SECONDS: Final = 5.0
_ALLOW: Final = [(b"allow", b"POST")]
_KINDS: Final[Mapping[int, str]] = {404: "not-found", 405: "method-not-allowed"}
"""The problems for errors that Starlette reports."""

_Response = tuple[int, RawHeaders, bytes]
"""Status, headers and body."""

log = logging.getLogger("zmdp.gateway")


class Application:
    """The gateway as an ASGI application."""

    def __init__(self, gateway: Gateway, more: Sequence[BaseRoute]) -> None:
        self._gateway = gateway
        self._client = gateway.upstream.client
        self._routes = Starlette(
            routes=[
                Route("/services", self._services, methods=["GET"]),
                Route("/livez", self._livez, methods=["GET"]),
                Route("/readyz", self._readyz, methods=["GET"]),
                *more,
            ],
            exception_handlers={
                Problem: _answer,
                ZmdpError: _answer,
                HTTPException: _answer,
                Exception: _answer,
                ClientDisconnect: _ignore,
            },
        )

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["raw_path"].startswith(PREFIX):
            await self._call(scope, receive, send)
        else:
            with suppress(Exception):  # it has been answered, and logged
                await self._routes(scope, receive, send)

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request for a service."""
        try:
            if scope["method"] != "POST":
                raise Problem("method-not-allowed", "services are called with POST", headers=_ALLOW)
            await self._perform(scope, receive, send)
        except (ClientDisconnect, stream.BrokenOff):
            pass  # the server closes the connection, so the client sees that the response is not complete
        except Exception as error:  # noqa: BLE001 - the last resort: it is logged and answered
            await _respond(send, *_problem(error, scope["method"], scope["path"]).response())

    async def _perform(self, scope: Scope, receive: Any, send: Any) -> None:
        """Call a service and answer with its reply."""
        gateway, settings = self._gateway, self._gateway.settings
        asked = Asked(scope["headers"], settings.timeout, settings.max_timeout)
        caller = gateway.caller(scope)
        service = service_of(scope["raw_path"])
        gateway.check_call(caller, service)
        body = await read_body(receive)
        frames = frames_of(asked, body, settings.max_parts)
        options = gateway.options(caller)
        gateway.enter(len(body))
        outcome = _Outcome(gateway, asked)
        try:
            about = await gateway.descriptions.of(service.decode(), asked.timeout)
            asked.timeout = outcome.time_left()
            if asked.json:
                outcome.about, frames = about, encoded(about, frames[0])
            events = self._streamed(service.decode(), asked, about)
            if events is not None:
                await self._stream(receive, send, service, frames, asked, options, events)
                return
            outcome.call = self._client.begin(
                outcome, service, *frames, timeout=asked.timeout, wait=asked.wait, headers=asked.headers,
                options=options,
            )  # fmt: skip
            with on_disconnect(receive, outcome.disconnected):
                response = await outcome.future
            if response is not None:
                await _respond(send, *response)
        finally:
            gateway.leave(len(body) + outcome.size)

    def _streamed(self, service: str, asked: Asked, about: About) -> stream.Events | None:
        """Return the receiver of a reply that is passed on as it arrives, or None; select the type of the reply.

        Raises `Problem` if it has no type that the client accepts.
        """
        gateway = self._gateway
        if about.codec and about.part is not None:
            if not asked.stream:
                kind = preferred(asked.accept, stream_types(about), EVENT_STREAM)
                return values(gateway, service, asked.timeout, about, kind)
        elif own := own_types(about):
            kind = own[0] if asked.stream else preferred(asked.accept, own, EVENT_STREAM)
            asked.headers = {**(asked.headers or {}), "accept": kind.decode()}
            asked.label = kind
            if kind in LINES and not asked.stream:
                return values(gateway, service, asked.timeout, About(codec="json"), kind)
        return stream.Events(gateway, service, asked.timeout, about if asked.json else None) if asked.stream else None

    async def _stream(
        self,
        receive: Any,
        send: Any,
        service: bytes,
        frames: Sequence[bytes],
        asked: Asked,
        options: Mapping[str, Any] | None,
        events: stream.Events,
    ) -> None:
        """Answer with events, or with lines."""
        try:
            events.call = self._client.begin(
                events, service, *frames, timeout=asked.timeout, wait=asked.wait, headers=asked.headers,
                options=options,
            )  # fmt: skip
            with on_disconnect(receive, events.disconnected):
                await stream.write(events, send)
        finally:
            events.disconnected()

    # ── the others ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _services(self, request: Request) -> Response:
        """Return the services that exist now and that the caller may know of."""
        return JSONResponse(await list_services(self._gateway, self._gateway.caller(request.scope)))

    async def _livez(self, request: Request) -> Response:
        """Return that the event loop turns, without access control.  Whatever else is wrong, a restart is no help."""
        del request
        return JSONResponse({"live": True})

    async def _readyz(self, request: Request) -> Response:
        """Return whether the broker answers and there is room for a request, without access control."""
        del request
        reasons = []
        try:
            with self._gateway.admit():
                await self._client.request("mmi.service", b"mmi.service", timeout=READY_TIMEOUT_SECONDS)
        except Problem as problem:
            reasons.append(problem.detail)
        except (BrokerUnreachable, RequestTimeout):
            reasons.append(f"the broker at {self._client.endpoint} does not answer")
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


class _Outcome:
    """The receiver of the outcome of a request whose PARTIALs do not count.

    Args:
        gateway: The gateway.
        asked: What the headers of the request say.
    """

    __slots__ = ("_asked", "_deadline", "_gateway", "about", "call", "future", "size")

    def __init__(self, gateway: Gateway, asked: Asked) -> None:
        self._gateway = gateway
        self._asked = asked
        self._deadline = monotonic() + asked.timeout
        self.call: Call | None = None
        self.about: About | None = None
        """What workers say of the service, if values are to be JSON."""
        self.future: asyncio.Future[_Response | None] = asyncio.get_running_loop().create_future()
        """The response, or None if the client has disconnected.  Never an exception, which would keep the reply."""
        self.size = 0
        """Bytes of the reply, which count as memory of the gateway until the response is written."""

    def time_left(self) -> float:
        """Return how many seconds the reply may still take."""
        return max(self._deadline - monotonic(), 0.001)

    def put(self, outcome: Outcome) -> None:
        if self.future.done():
            return
        if not isinstance(outcome, Reply):
            self.future.set_result(problem_of(outcome, overdue=monotonic() >= self._deadline).response())
        elif outcome.final:
            self.future.set_result(self._accept(outcome))

    def _accept(self, reply: Reply) -> _Response:
        size = sum(map(len, reply))
        try:
            self._gateway.charge(size)  # replies arrive as fast as the broker sends them
        except Problem as problem:
            return problem.response()
        self.size = size
        kind, content = body_of(reply, self._asked, self.about)
        return 200, [(b"content-type", kind), (b"content-length", b"%d" % len(content)), *AS_DATA], content

    def disconnected(self) -> None:
        """Cancel the request: its client is gone."""
        if not self.future.done():
            if self.call is not None:
                self._gateway.upstream.client.cancel(self.call)
            self.future.set_result(None)


def _problem(error: Exception, method: str, path: str) -> Problem:
    """Return the problem that an exception is to a client."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ZmdpError):
        return problem_of(error)
    if isinstance(error, HTTPException):
        headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
        kind = _KINDS.get(error.status_code)
        return Problem(
            kind or "http", f"{method} {path}: {error.detail}", headers=headers,
            status=None if kind else error.status_code, title=None if kind else error.detail,
        )  # fmt: skip
    log.error("%s %s failed", method, path, exc_info=error)
    return Problem("internal", f"an error of the gateway, which its log shows: {type(error).__name__}")


async def _respond(send: Any, status: int, headers: RawHeaders, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def _answer(request: Request, error: Exception) -> Response:
    """Return the response for an exception: Starlette's handler for all of them."""
    status, headers, body = _problem(error, request.method, request.url.path).response()
    response = Response(body, status)
    response.raw_headers = list(headers)
    return response


async def _ignore(request: Request, error: Exception) -> Response:
    """Return a response that nobody gets: the client is gone."""
    del request, error
    return Response()


def application(gateway: Gateway) -> Any:
    """Return the application with the routes of all modules."""
    parts = (jobs, metrics, openapi)
    found = Application(gateway, [route for each in parts for route in each.routes(gateway)])
    if not gateway.settings.allow_origins:
        return found
    return CORSMiddleware(  # what browsers require of responses to pages of other origins
        found, gateway.settings.allow_origins, ("GET", "POST", "DELETE"), ("*",),
        expose_headers=("location", "retry-after"),
    )  # fmt: skip

"""Jobs: requests that Titanic stores, and whose replies it keeps (docs/how-to/gateways.md).

POST /jobs/NAME      store a request: 202 with its Location; with Prefer: wait=N, 200 and the reply if it is in time
GET /jobs/UUID       200 and the reply, or 202 if it is not there yet; as text/event-stream, its PARTIALs as well
DELETE /jobs/UUID    204: deleted, and cancelled if it was running
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ....clients.calls.reply import Reply
from ....mdp.errors import BrokerUnreachable, InvalidUUID, RequestTimeout, ServiceError, UnknownTicket, ZmdpError
from ....mdp.http.asgi import on_disconnect, read_body
from ....mdp.http.problems import Problem, problem_of
from ....titanic.api.client import AsyncTicket, AsyncTitanic
from ...gateway import Gateway
from ..services.stream import COMMENT, HEADERS, KEEP_ALIVE_SECONDS, error_event, event
from ..services.translation import AS_DATA, Asked, body_of, frames_of, service_of
from ..services.translation import PREFIX as SERVICES
from .query import KEY_OPTION, idempotency_key, options_of
from .titanic_client import TitanicClients

PREFIX: Final = "/jobs/"
_RAW_PREFIX: Final = PREFIX.encode()
PENDING_SECONDS: Final = 1
"""The Retry-After of a job without a reply, in seconds."""
LAST_EVENT: Final = "end"
"""The id of the last event of a job."""


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of jobs."""
    jobs = _Jobs(gateway)
    path = PREFIX + "{name:path}"
    return [
        Route(path, jobs.submit, methods=["POST"]),
        Route(path, jobs.fetch, methods=["GET"]),
        Route(path, jobs.delete, methods=["DELETE"]),
    ]


class _Jobs:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._titanics = TitanicClients(gateway)

    async def submit(self, request: Request) -> Response:
        """Store a request."""
        gateway = self._gateway
        caller, asked = gateway.caller(request.scope), self._asked(request)
        raw_path = request.scope["raw_path"]
        if not raw_path.startswith(_RAW_PREFIX):  # such as /%6Aobs/echo, whose name begins elsewhere
            raise Problem("not-found", f"jobs are at {PREFIX}")
        service = service_of(SERVICES + raw_path[len(_RAW_PREFIX) :])
        gateway.check_call(caller, service)
        options = options_of(request.query_params.multi_items())
        key = idempotency_key(request.headers.getlist("idempotency-key"))
        if key is not None:
            # Titanic keeps the keys of roles apart if the broker knows the roles; otherwise this does.
            options[KEY_OPTION] = key if gateway.on_behalf or caller.role is None else f"{caller.role}:{key}"
        body = await read_body(request.receive)
        with gateway.admit(len(body)):
            frames = frames_of(asked, body, gateway.settings.max_parts)
            ticket = await self._titanics.of(caller).submit(service, *frames, headers=asked.headers, **options)
        reply = await self._wait(ticket, asked, request)
        return _pending(ticket) if reply is None else _done(reply, asked, ticket)

    async def fetch(self, request: Request) -> Response:
        """Return the reply of a job."""
        gateway = self._gateway
        caller, asked = gateway.caller(request.scope), self._asked(request)
        ticket = _ticket(self._titanics.of(caller), request)
        if asked.stream:
            return await self._stream(ticket, request.headers.get("last-event-id", ""))
        with gateway.admit():
            reply = await _reply_within(0, ticket)
        if reply is None:
            reply = await self._wait(ticket, asked, request)
        return _pending(ticket) if reply is None else _done(reply, asked, ticket)

    async def delete(self, request: Request) -> Response:
        """Delete a job."""
        ticket = _ticket(self._titanics.of(self._gateway.caller(request.scope)), request)
        with self._gateway.admit():
            await ticket.close()
        return Response(status_code=204)

    async def _stream(self, ticket: AsyncTicket[Reply, Reply], last_event: str) -> Response:
        """Return PARTIALs and reply as events, from the one after `last_event` on."""
        if last_event == LAST_EVENT:
            return Response(status_code=204)  # an EventSource then stops reconnecting
        if last_event and not (last_event.isdecimal() and last_event.isascii() and len(last_event) <= 9):
            raise Problem("invalid", "Last-Event-ID must be the id of an event of this job")
        with suppress(ServiceError):  # the last event will tell it
            await _reply_within(0, ticket)
        return _EventStream(self._gateway, _with_comments(_events(ticket, int(last_event) + 1 if last_event else 0)))

    async def _wait(self, ticket: AsyncTicket[Reply, Reply], asked: Asked, request: Request) -> Reply | None:
        """Wait for a reply if the client asked for it, while it is connected."""
        if not asked.wait:
            return None
        with self._gateway.admit():
            waiting = asyncio.ensure_future(_reply_within(asked.timeout, ticket))
            try:
                with on_disconnect(request.receive, partial(_cancel, waiting)):
                    await asyncio.wait({waiting})
            finally:
                waiting.cancel()
            return None if waiting.cancelled() else waiting.result()

    def _asked(self, request: Request) -> Asked:
        settings = self._gateway.settings
        return Asked(request.scope["headers"], settings.timeout, settings.max_timeout)


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ticket(titanic: AsyncTitanic, request: Request) -> AsyncTicket[Reply, Reply]:
    try:
        return titanic.ticket(request.path_params["name"])
    except InvalidUUID as error:
        raise _unknown(str(error)) from None


async def _reply_within(seconds: float, ticket: AsyncTicket[Reply, Reply]) -> Reply | None:
    """Return the reply of a job, or None if it does not arrive in time.  Raises the job's error."""
    try:
        return await ticket.result(seconds)
    except UnknownTicket as error:
        raise _unknown(str(error)) from None
    except BrokerUnreachable:
        raise
    except RequestTimeout:
        return None


def _cancel(waiting: asyncio.Future[Reply | None]) -> None:
    waiting.cancel()


def _pending(ticket: AsyncTicket[Reply, Reply]) -> Response:
    where = PREFIX + ticket.uuid
    headers = {"location": where, "retry-after": str(PENDING_SECONDS), "cache-control": "no-store"}
    return JSONResponse({"uuid": ticket.uuid, "location": where}, 202, headers)


def _done(reply: Reply, asked: Asked, ticket: AsyncTicket[Reply, Reply]) -> Response:
    label, body = body_of(reply, asked)
    headers = {"content-type": label.decode("latin-1"), "location": PREFIX + ticket.uuid, "cache-control": "no-store"}
    response = Response(body, 200, headers)
    response.raw_headers += AS_DATA
    return response


def _unknown(text: str) -> Problem:
    return Problem("unknown-job", text)


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _EventStream(StreamingResponse):
    """A response with events; its request counts as outstanding until it ends."""

    def __init__(self, gateway: Gateway, content: AsyncGenerator[bytes, None]) -> None:
        super().__init__(content)
        self.raw_headers = list(HEADERS)
        self._content = content
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette does not close the generator, and treats a client that has left as an error.
        with self._gateway.admit(), suppress(ClientDisconnect):
            async with aclosing(self._content):
                await super().__call__(scope, receive, send)


async def _events(ticket: AsyncTicket[Reply, Reply], start: int) -> AsyncGenerator[bytes, None]:
    """Yield the PARTIALs of a job from number `start` on, then its reply or its error."""
    number = start
    try:
        async with aclosing(ticket.partials(start)) as parts:
            async for part in parts:
                yield b"id: %d\n%s" % (number, event("partial", part))
                number += 1
        reply = await ticket.result(0)
    except ZmdpError as error:
        problem = _unknown(str(error)) if isinstance(error, UnknownTicket) else problem_of(error)
        last = error_event(problem)
    except Problem as problem:
        last = error_event(problem)
    else:
        last = event("final", reply)
    yield b"id: %s\n%s" % (LAST_EVENT.encode(), last)


async def _with_comments(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the events, and comments in between, so that proxies keep the connection open."""
    async with aclosing(events):
        following: asyncio.Future[bytes] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(events))
                await asyncio.wait({following}, timeout=KEEP_ALIVE_SECONDS)
                if not following.done():
                    yield COMMENT
                    continue
                arrived, following = following, None
                try:
                    data = arrived.result()
                except StopAsyncIteration:
                    return
                finally:
                    del arrived  # its exception has a traceback with this frame
                yield data
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait({following})

"""Calls of services: POST /services/NAME, without a framework, because this is what the gateway is for."""

import asyncio
from time import monotonic
from typing import Any, Final

from ....clients.calls.call import Call, Outcome
from ....clients.calls.reply import Reply
from ....clients.values import encoded
from ....mdp.http.asgi import on_disconnect, read_body, respond
from ....mdp.http.problems import Problem, RawHeaders, problem_of
from ....mdp.services import About
from ...gateway import Gateway, Scope
from . import stream
from .rows import own_types, stream_types, values
from .translation import AS_DATA, EVENT_STREAM, LINES, Asked, body_of, frames_of, preferred, service_of

_ALLOW: Final = [(b"allow", b"POST")]

_Response = tuple[int, RawHeaders, bytes]
"""Status, headers and body."""


class ServiceCalls:
    """The ASGI application for calls.  Raises `Problem` and `ZmdpError`, which are to be answered."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._client = gateway.upstream.client

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Call a service and answer with its reply."""
        if scope["method"] != "POST":
            raise Problem("method-not-allowed", "services are called with POST", headers=_ALLOW)
        gateway, settings = self._gateway, self._gateway.settings
        asked = Asked(scope["headers"], settings.timeout, settings.max_timeout)
        caller = gateway.caller(scope)
        service = service_of(scope["raw_path"])
        gateway.check_call(caller, service)
        body = await read_body(receive)
        frames = frames_of(asked, body, settings.max_parts)
        gateway.enter(len(body))
        outcome = _Outcome(gateway, asked)
        try:
            about = await gateway.descriptions.of(service.decode(), asked.timeout)
            asked.timeout = outcome.time_left()
            if asked.json:
                outcome.about, frames = about, encoded(about, frames[0])
            events = self._streamed(service.decode(), asked, about)
            receiver: _Outcome | stream.Events = outcome if events is None else events
            response = None
            try:
                receiver.call = self._client.begin(
                    receiver, service, *frames, timeout=asked.timeout, wait=asked.wait, headers=asked.headers,
                    options=gateway.options(caller),
                )  # fmt: skip
                with on_disconnect(receive, receiver.disconnected):
                    if events is None:
                        response = await outcome.future
                    else:
                        await stream.write(events, send)
            finally:
                receiver.disconnected()  # without effect after a complete reply
            if response is not None:
                await respond(send, *response)
        finally:
            gateway.leave(len(body) + outcome.size)

    def _streamed(self, service: str, asked: Asked, about: About) -> stream.Events | None:
        """Choose the type of the reply; return its receiver if it is passed on as it arrives, otherwise None.

        Raises `Problem` if the client accepts none of its types.
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


class _Outcome:
    """The receiver of the outcome of a request whose PARTIALs are ignored.

    Args:
        gateway: The gateway.
        asked: The headers of the request.
    """

    __slots__ = ("_asked", "_deadline", "_gateway", "about", "call", "future", "size")

    def __init__(self, gateway: Gateway, asked: Asked) -> None:
        self._gateway = gateway
        self._asked = asked
        self._deadline = monotonic() + asked.timeout
        self.call: Call | None = None
        self.about: About | None = None
        """The description of the service, if values are to be JSON."""
        self.future: asyncio.Future[_Response | None] = asyncio.get_running_loop().create_future()
        """The response; None if the client has disconnected.  Not an exception: its traceback would keep the reply."""
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

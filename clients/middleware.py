"""Middleware of clients: called with each request and with the function that sends it and returns the reply.

    def traced(request, call_next):                     # async def, for an AsyncClient
        request.headers["tenant"] = tenant.get()
        began = time.monotonic()
        try:
            return call_next(request)                   # return await call_next(request)
        finally:
            log.info("%s took %.3f s", request.service, time.monotonic() - began)

    client = Client(middleware=[traced])

The result is a `Reply`; of `stream`, an iterator of its parts.  Middleware may change the request, raise, return
another reply, or call `call_next` again.  It is called for each row of `map`, too.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final

from ..mdp import wire
from ..mdp.errors import ClosedError, SettingError
from ..mdp.program.arguments import name_of, surrounded, underlying
from .blocking import BlockingDialog
from .calls.ask import Ask, checked_body
from .calls.reply import Reply, closed_error
from .calls.settings import ConnectionSettings

MAX_THREADS: Final = 64
"""Maximum number of threads in which the middleware of a `Client` runs for futures, and for the rows of `map`."""


@dataclass(slots=True)
class OutgoingRequest:
    """A request as middleware sees it, before it is sent."""

    service: str
    body: list[bytes]
    headers: dict[str, str]
    options: dict[str, Any]


CallNext = Callable[[OutgoingRequest], Any]
ClientMiddleware = Callable[[OutgoingRequest, CallNext], Any]
AsyncClientMiddleware = Callable[[OutgoingRequest, CallNext], Coroutine[Any, Any, Any]]


def checked_middleware(middleware: Iterable[ClientMiddleware], *, asynchronous: bool) -> list[ClientMiddleware]:
    """Return the middleware of a client of this kind.  Raises `SettingError` for middleware that it cannot call."""
    found = [*middleware]
    for each in found:
        if not callable(each):
            raise SettingError(f"middleware {each!r:.100} is not a function of a request and call_next")
        if inspect.iscoroutinefunction(underlying(each)) is not asynchronous:
            needed = "is a def: an AsyncClient needs async def" if asynchronous else "is async: a Client needs a def"
            raise SettingError(f"middleware {name_of(each)} {needed}")
    return found


class MiddlewareDialog(BlockingDialog):
    """A dialog whose requests are surrounded by middleware, except those of the Guide's lower level.

    A future is that of a thread which runs the middleware, so it cannot be cancelled once that has begun.
    """

    def __init__(self, settings: ConnectionSettings, middleware: Sequence[ClientMiddleware]) -> None:
        super().__init__(settings)
        self._middleware = middleware
        self._closed = False
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="zmdp-middleware")

    def request(self, ask: Ask) -> Reply:
        """Send a request and return the whole reply."""
        reply: Reply = self._call(ask, super().request)
        return reply

    def stream(self, ask: Ask) -> Generator[Reply, None, None]:
        """Send a request and yield each part of the reply as it arrives, the FINAL last."""
        yield from self._call(ask, super().stream)

    def submit(self, ask: Ask, convert: Callable[[Reply], Any] | None = None) -> "Future[Any]":
        """Send a request and return the future of its reply, or of the value that `convert` makes of it."""

        def call() -> Any:
            self._check_open()
            reply = self.request(ask)
            return reply if convert is None else convert(reply)

        self._check_open()
        return self._executor.submit(copy_context().run, call)

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()

    def _call(self, ask: Ask, send: Callable[[Ask], Any]) -> Any:
        def call_next(request: OutgoingRequest) -> Any:
            return send(changed(ask, request))

        return surrounded(call_next, self._middleware)(outgoing(ask))

    def for_map(self) -> AsyncClientMiddleware:
        """Return middleware for the event loop in which `map` sends its rows: this one, in threads."""

        async def around(request: OutgoingRequest, call_next: CallNext) -> Any:
            loop, sent, ended = asyncio.get_running_loop(), list[Future[Any]](), False

            def send(request: OutgoingRequest) -> Any:
                if ended:
                    raise ClosedError("the call of map() has ended")
                sent.append(asyncio.run_coroutine_threadsafe(call_next(request), loop))
                return sent[-1].result()

            try:
                call = surrounded(send, self._middleware)
                return await loop.run_in_executor(self._executor, copy_context().run, call, request)
            finally:
                ended = True
                for future in sent:
                    future.cancel()  # its thread gets an exception

        return around

    def close(self) -> None:
        """Cancel every outstanding request, close the connection, and end the threads."""
        self._closed = True
        super().close()
        self._executor.shutdown(wait=False)  # the threads end by themselves; one of them may be closing the client


def outgoing(ask: Ask) -> OutgoingRequest:
    """Return a request as middleware sees it."""
    return OutgoingRequest(ask.service.decode(), [*ask.body], {**(ask.headers or {})}, {**(ask.options or {})})


def changed(ask: Ask, request: OutgoingRequest) -> Ask:
    """Return the request as middleware has left it.  Raises `SettingError` if it is invalid."""
    name, body = wire.service_name(request.service), checked_body(request.body)
    return Ask(
        name, body, ask.timeout, ask.silence, ask.retries, ask.stream, ask.wait, request.headers, request.options,
        ask.retry,
    )  # fmt: skip

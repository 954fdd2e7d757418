"""Handlers of frames, as workers call them, around the functions of services and their middleware.

Middleware is called with each request and with what comes next, which returns the handler's result.

    def timed(request, call_next):                      # async def, for coroutine functions
        began = time.monotonic()
        try:
            return call_next(request)                   # return await call_next(request)
        finally:
            log.info("%s took %.3f s", request.service, time.monotonic() - began)

    services = Services(middleware=[timed])

The request is a `zmdp.workers.Request`, whose body has not been decoded.  For a stream, the result is an iterator.
Middleware may raise `ServiceError` instead, or return another value.
"""

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from ...mdp.errors import CodecError, ServiceError, SettingError
from ...mdp.program.arguments import is_async, name_of, surrounded
from ...mdp.services.misfits import Misfit
from ..handling import Last, Unreadable, check_result
from ..session.request import Request, State
from .batching import Batcher
from .offered import AnyOffered, CallNext, Middleware

MISFIT = 422
"""Code of the `ServiceError` for a request whose value is not of the declared type."""


def middleware_of(offered: AnyOffered) -> list[Middleware]:
    """Return the middleware around a service.  Raises `SettingError` if it is not of the function's kind."""
    found = [each for group in offered.group.around() for each in group.middleware]
    for each in found:
        if is_async(each) is not offered.runs_async:
            one, other = ("an async def", "a def") if is_async(each) else ("a def", "an async def")
            raise SettingError(
                f"middleware {name_of(each)} is {one}, and cannot wrap service {offered.name}, which runs as {other}: "
                "declare services of each kind in a Services with middleware of its own, and include() both in one "
                "without middleware"
            )
    return found


def handler_of(offered: AnyOffered, state: State) -> Callable[[Request], Any]:
    """Return the handler of a service for a worker of its kind.

    It decodes and validates the value, calls the function within its middleware, and encodes what that returns.
    `state` is what the lifespan yields.  Raises `SettingError` for middleware that does not fit.
    """
    endpoint = surrounded(_endpoint(offered), middleware_of(offered))
    if offered.signature.streaming:
        return (_async_stream if offered.signature.asynchronous else _stream)(offered, endpoint, state)
    encode = offered.reply.encode
    if offered.runs_async:

        async def handle_async(request: Request) -> list[bytes]:
            request.state = state
            result = await endpoint(request)
            check_result(result)
            return encode(result)

        return handle_async

    def handle(request: Request) -> list[bytes]:
        request.state = state
        result = endpoint(request)
        check_result(result)
        return encode(result)

    return handle


def _endpoint(offered: AnyOffered) -> CallNext:
    """Return what calls the function with the value of a request."""
    function, decode = offered.function, offered.request.decode
    takes_value, has_default = bool(offered.signature.argument), offered.signature.has_default
    if offered.batch is not None:
        function = Batcher(offered, *offered.batch)

    def endpoint(request: Request) -> Any:
        try:
            value = decode(request)
        except Misfit as error:
            raise ServiceError(MISFIT, str(error)) from None
        except CodecError as error:
            raise Unreadable(str(error)) from None
        if takes_value and not (has_default and (value is None or request == [b""])):
            return function(value)
        return function()

    async def streaming(request: Request) -> Any:  # so that middleware can await every service
        return endpoint(request)

    return streaming if offered.signature.streaming and offered.signature.asynchronous else endpoint


def _stream(offered: AnyOffered, endpoint: CallNext, state: State) -> Callable[[Request], Any]:
    encode, nothing = offered.reply.encode, offered.reply.nothing

    def handle(request: Request) -> Generator[list[bytes], None, list[bytes]]:
        request.state = state
        for part in endpoint(request):
            if isinstance(part, Last):
                return encode(part.value)
            yield encode(part)
        return nothing

    return handle


def _async_stream(offered: AnyOffered, endpoint: CallNext, state: State) -> Callable[[Request], Any]:
    encode, nothing = offered.reply.encode, offered.reply.nothing

    async def handle(request: Request) -> AsyncGenerator[Any, None]:
        request.state = state
        parts = endpoint(request)
        while not hasattr(parts, "__aiter__"):
            parts = await parts  # also of middleware that does not await call_next()
        try:
            async for part in parts:
                if isinstance(part, Last):
                    yield Last(encode(part.value))
                    return
                yield encode(part)
            yield Last(nothing)
        finally:
            if hasattr(parts, "aclose"):
                await parts.aclose()

    return handle

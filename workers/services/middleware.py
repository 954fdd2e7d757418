"""Middleware of services: called with each request and with what comes next, which returns the handler's result.

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

from collections.abc import Callable
from typing import Any

from ...mdp.errors import SettingError
from ...mdp.program.functions import is_async, name_of
from ..session.request import Request
from .offered import AnyOffered

CallNext = Callable[[Request], Any]
"""Takes a request, and returns a handler's result, or a coroutine of it."""
Middleware = Callable[[Request, CallNext], Any]


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

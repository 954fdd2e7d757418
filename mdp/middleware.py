"""Middleware of services and of clients: functions that surround a function of a request."""

from collections.abc import Callable, Sequence
from typing import Any

CallNext = Callable[[Any], Any]
"""Takes a request, and returns its result, or an awaitable of it."""


def surrounded(call_next: CallNext, middleware: Sequence[Callable[[Any, CallNext], Any]]) -> CallNext:
    """Return `call_next` with the middleware around it, the first outermost."""
    for each in reversed(middleware):
        call_next = _around(each, call_next)
    return call_next


def _around(middleware: Callable[[Any, CallNext], Any], call_next: CallNext) -> CallNext:
    return lambda request: middleware(request, call_next)

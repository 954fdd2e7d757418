"""Arguments that users pass: of what kind a function is, what surrounds it, and which names were probably meant."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any


def is_async(function: object) -> bool:
    """Return whether `function` is a coroutine function, an async generator function, or an object with such a call."""
    called = underlying(function)
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def underlying(function: Any) -> Any:
    """Return the function that is run: that of a `partial`, or the `__call__` of an object."""
    if isinstance(function, partial):
        return underlying(function.func)
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004 - this inspects it, callable() would not


def name_of(function: object) -> str:
    """Return the name of a function, for logs and error messages."""
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


CallNext = Callable[[Any], Any]
"""Takes a request, and returns its result, or an awaitable of it."""


def surrounded(call_next: CallNext, middleware: Sequence[Callable[[Any, CallNext], Any]]) -> CallNext:
    """Return `call_next` with the middleware around it, the first outermost."""
    for each in reversed(middleware):
        call_next = _around(each, call_next)
    return call_next


def _around(middleware: Callable[[Any, CallNext], Any], call_next: CallNext) -> CallNext:
    return lambda request: middleware(request, call_next)


def spelling_hint(name: str, known: Sequence[str]) -> str:
    """Return which of the `known` names is probably meant, or else all of them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def check_known(what: str, settings: Iterable[str], known: Sequence[str]) -> None:
    """Raise `TypeError` for the first setting that is not `known`, with the one that is probably meant."""
    for name in settings:
        if name not in known:
            raise TypeError(f"{what} has no setting {name!r}: {spelling_hint(name, known)}")

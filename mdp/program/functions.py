"""What kind of function somebody has passed, and what it is called."""

import inspect
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

"""The contexts of requests: what one request sets in a `ContextVar`, no other sees."""

import sys
from contextvars import Context as TaskContext
from contextvars import copy_context
from typing import Any


class RequestContexts:
    """Makes a context for each request, a copy of the one in which the worker was started.

    What a lifespan has set in that context, every handler sees; what a handler sets is gone with its request.

    A program that has used `decimal` has a `decimal.Context` in it, which handlers do not replace but change, as in
    `decimal.getcontext().prec = 6`.  So each request also gets a copy of that.

    Args:
        base: The context that is copied; by default the current one.
    """

    def __init__(self, base: TaskContext | None = None) -> None:
        self.base = copy_context() if base is None else base
        self._decimal: Any = sys.modules.get("decimal")
        self._arithmetic = None if self._decimal is None else _first(self.base, self._decimal.Context)

    def new(self) -> TaskContext:
        """Return the context for a request."""
        context = self.base.copy()
        if self._arithmetic is not None:
            context.run(self._decimal.setcontext, self._arithmetic.copy())
        return context

    def renewed(self, snapshot: TaskContext) -> TaskContext:
        """Prepare the current context, in which a request has set nothing, for another.

        `snapshot` is a copy of the context that the request was given; returned is one of what the next is given.
        """
        if self._arithmetic is None:
            return snapshot
        self._decimal.setcontext(self._arithmetic.copy())
        return copy_context()


def _first(context: TaskContext, kind: type) -> Any:
    return next((value for value in context.values() if isinstance(value, kind)), None)

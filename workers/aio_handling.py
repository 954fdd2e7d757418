"""Calls an asyncio handler, and sends what it yields."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context as TaskContext
from types import CoroutineType
from typing import Any, Final, Protocol, cast

from ..mdp import process
from ..mdp.tracing import current, handling, opentelemetry_trace
from .forked import end_if_forked
from .handling import HandlerAdapter, Last, Outcome, failed
from .request import Request

AsyncHandler = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any, None]]
"""A coroutine function or an async generator function of a request; with a codec, of a value."""

EAGER: Final = sys.version_info >= (3, 12)
"""Whether tasks begin when they are made."""


class HandlerTask(asyncio.Task[None]):
    """A task that handles requests.  It knows whether its own handler has cancelled it."""

    cancelled_itself = False

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it; asyncio and handlers call this."""
        if asyncio.current_task() is self:
            self.cancelled_itself = True
        return super().cancel(msg)

    def uncancel(self) -> int:
        """Take a `cancel` back, as `asyncio.timeout` and task groups do."""
        left = super().uncancel()
        if not left:
            self.cancelled_itself = False
        return left


def begin_task(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, context: TaskContext) -> HandlerTask:
    """Return a task of the running `loop` that runs `work`.

    From Python 3.12 on, it has already begun, and ended if it did not wait for anything.
    """
    if sys.version_info >= (3, 12):  # mypy knows this, but not EAGER
        task = HandlerTask(work, loop=loop, context=context, eager_start=True)
    else:
        task = HandlerTask(work, loop=loop, context=context)
    return task


class Holder(Protocol):
    """What holds the requests that are handled: a connection."""

    async def send_partial(self, request: Request, frames: list[bytes]) -> None:
        """Send what the handler has yielded, as a PARTIAL of the request."""

    def handled(self, request: Request, outcome: Outcome | None) -> None:
        """End a request with its FINAL or its failure; the outcome is None if the task was cancelled."""

    def crashed(self, request: Request, error: BaseException) -> None:
        """End a request after an error in our own code."""


class HandlerCalls:
    """The calls of a worker's handler in an event loop.

    Args:
        handler: The worker's handler.
        adapter: Converts its argument and its results.
        holder: Holds the requests, and learns what becomes of them.
    """

    def __init__(self, handler: AsyncHandler, adapter: HandlerAdapter, holder: Holder) -> None:
        self._handler = handler
        self._adapter = adapter
        self._holder = holder
        self._pid = process.pid

    async def handle(self, request: Request) -> None:
        """Handle `request`: the work of a task of its own, whose context is that of the request.

        Most requests come here, so what they need is in one coroutine.
        """
        outcome: Outcome | None
        try:
            try:
                if opentelemetry_trace() is not None:
                    with handling(request):
                        outcome = await self._reply(self._handler(self._adapter.argument(request)), request)
                else:
                    current.set(request)
                    result = self._handler(self._adapter.argument(request))
                    if type(result) is CoroutineType:
                        outcome = self._adapter.frames(await result)
                    else:
                        outcome = await self._reply(result, request)
            except asyncio.CancelledError as error:
                task = cast("HandlerTask", asyncio.current_task())
                if task.cancelling() and not task.cancelled_itself:
                    self._holder.handled(request, None)
                    raise
                # The handler has cancelled itself, as it would at another worker; or something that it awaited was.
                outcome = failed(error, request)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises, even SystemExit, the worker goes on
                end_if_forked(self._pid, request, error)
                outcome = failed(error, request)
            else:
                end_if_forked(self._pid, request)
            self._holder.handled(request, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, no request may be held in silence
            self._holder.crashed(request, error)

    async def _reply(self, result: Awaitable[Any] | AsyncGenerator[Any, None], request: Request) -> list[bytes]:
        """Return the FINAL; what an async generator yields before it is sent as PARTIALs."""
        last = await self._stream(result, request) if isinstance(result, AsyncGenerator) else await result
        return self._adapter.frames(last)

    async def _stream(self, parts: AsyncGenerator[Any, None], request: Request) -> Any:
        """Send what an async generator yields as PARTIALs.  Return the `Last` that it yields, or None."""
        try:
            async for part in parts:
                if isinstance(part, Last):
                    return part
                await self._holder.send_partial(request, self._adapter.frames(part))
        finally:
            await parts.aclose()
        return None

"""Calls an asyncio handler, sends what it yields, and notices when handlers block the event loop."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context as TaskContext
from contextvars import copy_context
from pathlib import Path
from types import CoroutineType
from typing import Any, Final, Protocol, cast

from ..mdp.program import process
from ..mdp.tracing import OPENTELEMETRY, current, handling
from .connection import SEND_RETRY_SECONDS
from .handling import HandlerAdapter, Last, Outcome, RequestContexts, end_forked, failed
from .session.request import Request

AsyncHandler = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any, None]]
"""A coroutine function or an async generator function of a request; with a codec, of a value."""

MAX_TURN_SECONDS: Final = 0.005
"""Time after which other callbacks of the event loop get their turn."""
EAGER: Final = sys.version_info >= (3, 12)
"""Whether tasks begin when they are made."""


class HandlerTask(asyncio.Task[Any]):
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


class Source(Protocol):
    """A connection, which holds the requests that are handled."""

    stalled: bool
    """Whether the broker does not keep up with what is sent."""

    def partial(self, request: Request, frames: list[bytes]) -> object:
        """Send what the handler has yielded, as a PARTIAL of the request."""

    def handled(self, request: Request, outcome: Outcome | None) -> bool:
        """End a request with its FINAL or its failure; the outcome is None if the task was cancelled.

        Return whether its task may handle another request, because the handler has not waited for anything.
        """

    def crashed(self, request: Request, error: BaseException) -> None:
        """End a request after an error in our own code."""

    def begin_in(self, task: HandlerTask, until: float, /) -> Request | None:
        """Return the next request for a handler, which `task` is about to call; None from the time `until` on."""


class HandlerCalls:
    """The calls of a worker's handler in an event loop.

    Args:
        handler: The worker's handler.
        adapter: Converts its argument and its results.
    """

    def __init__(self, handler: AsyncHandler, adapter: HandlerAdapter) -> None:
        self._handler = handler
        self._adapter = adapter
        self._plain = adapter.plain
        self._pid = process.pid

    async def handle_all(self, source: Source, contexts: RequestContexts) -> None:
        """Handle requests, one after the other, until a handler has waited, none is left, or the turn is over."""
        until = time.monotonic() + MAX_TURN_SECONDS
        task = cast("HandlerTask", asyncio.current_task())
        current.set(None)
        context = copy_context()
        while (request := source.begin_in(task, until)) is not None:
            if not await self.handle(request, source):
                break  # the task was its own
            current.set(None)
            if task.cancelling() or not _is_unchanged(context):
                break  # the next request must not see that
            context = contexts.renewed(context)

    async def handle(self, request: Request, source: Source) -> bool:
        """Handle `request`, in a task whose context is that of the request.

        Return what `Source.handled` returns.  Coroutines are awaited here: through `_reply`, a request would cost 10 %
        more.
        """
        outcome: Outcome | None
        try:
            try:
                if OPENTELEMETRY in sys.modules:
                    with handling(request):
                        outcome = await self._reply(self._handler(self._adapter.argument(request)), request, source)
                else:
                    current.set(request)
                    result = self._handler(request if self._plain else self._adapter.argument(request))
                    if type(result) is CoroutineType:
                        outcome = self._adapter.frames(await result)
                    else:
                        outcome = await self._reply(result, request, source)
            except asyncio.CancelledError as error:
                task = cast("HandlerTask", asyncio.current_task())
                if task.cancelling() and not task.cancelled_itself:
                    source.handled(request, None)
                    raise
                # The handler has cancelled itself, as it would at another worker; or something that it awaited was.
                outcome = failed(error, request)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises, even SystemExit, the worker goes on
                if process.pid != self._pid:
                    end_forked(request, error)
                outcome = failed(error, request)
            else:
                if process.pid != self._pid:
                    end_forked(request)
            return source.handled(request, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, no request may be held in silence
            source.crashed(request, error)
            return False

    async def _reply(
        self, result: Awaitable[Any] | AsyncGenerator[Any, None], request: Request, source: Source
    ) -> list[bytes]:
        """Return the FINAL; what an async generator yields before it is sent as PARTIALs."""
        last = await self._stream(result, request, source) if isinstance(result, AsyncGenerator) else await result
        return self._adapter.frames(last)

    async def _stream(self, parts: AsyncGenerator[Any, None], request: Request, source: Source) -> Any:
        """Send what an async generator yields as PARTIALs.  Return the `Last` that it yields, or None."""
        try:
            async for part in parts:
                if isinstance(part, Last):
                    return part
                source.partial(request, self._adapter.frames(part))
                # Let the connection send, and receive a CANCEL; wait for a broker that does not keep up.
                await asyncio.sleep(SEND_RETRY_SECONDS if source.stalled else 0)
                while source.stalled:
                    await asyncio.sleep(SEND_RETRY_SECONDS)
        finally:
            await parts.aclose()
        return None


def _is_unchanged(context: TaskContext) -> bool:
    """Return whether the variables of the current context have the values that they have in `context`."""
    try:
        return copy_context() == context
    except Exception:  # noqa: BLE001 - values of any type are compared
        return False


CHECK_SECONDS: Final = 0.1
"""Interval of the checks while there are requests."""
BLOCKED_SECONDS: Final = 0.1
"""Delay of a check from which on the event loop was blocked."""
WARNING_SECONDS: Final = 60.0
"""Minimum time between two warnings."""

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")

log = logging.getLogger("zmdp.worker")


def processor_wait() -> float:
    """Return how many seconds this thread has been ready to run but waited for a processor; 0 if the system (other
    than Linux) does not tell."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class BlockingWatch:
    """Warns when the event loop is blocked while a worker handles requests.

    A check that runs late shows it.  The time for which the thread waited for a processor is subtracted: a busy machine
    delays checks as well, and that is not the handlers' fault.

    Args:
        loop: The event loop, which is the current one.
        handler: The name of the handler, for the log.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, service: str, handler: str) -> None:
        self._loop = loop
        self._service = service
        self._handler = handler
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._waited = 0.0
        self._used = False
        self._silent_until = 0.0
        self._unreported = 0

    @property
    def active(self) -> bool:
        """Whether there will be a check."""
        return self._timer is not None

    def note(self) -> None:
        """Record that requests are being handled."""
        self._used = True
        if self._timer is None:
            self._arm()

    def close(self) -> None:
        """End the checks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._waited = processor_wait()
        self._due = time.monotonic() + CHECK_SECONDS
        self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        if now - self._due >= BLOCKED_SECONDS:
            self.checked(now - self._due, processor_wait() - self._waited, now)
        if self._used:  # else the worker is idle
            self._used = False
            self._arm()

    def checked(self, late: float, waited: float, now: float) -> None:
        """Warn if a check came `late` for another reason than that the thread has `waited` for a processor."""
        blocked = late - waited
        if blocked < BLOCKED_SECONDS:
            return
        if now < self._silent_until:
            self._unreported += 1
            return
        self._silent_until = now + WARNING_SECONDS
        more, self._unreported = self._unreported, 0
        log.warning(
            "%s: the event loop was blocked for %.1f s while requests were handled%s, so other requests and heartbeats "
            "had to wait. The handler %s must not block: call what blocks with `await asyncio.to_thread(…)`, or serve "
            "a plain function with a Worker",
            self._service, blocked, f" (and {more} times since the last such line)" if more else "", self._handler,
        )  # fmt: skip

"""Calls an asyncio handler: for a request, or for the rows of a pack, and sends what it yields."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context as TaskContext
from contextvars import copy_context
from types import CoroutineType
from typing import Any, Final, Protocol

from ..mdp.rows import Outcome
from ..mdp.tracing import current, handling, opentelemetry_trace
from .handling import HandlerAdapter, Last, failed
from .pack_middleware import NOT_CALLED, PackMiddleware, failed_pack
from .request import Request
from .rows import Pack, is_pack

AsyncHandler = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any, None]]
"""A coroutine function or an async generator function of a request; with a codec, of a value."""

EAGER: Final = sys.version_info >= (3, 12)
"""Whether tasks begin when they are made."""
MAX_PACK_TURN_SECONDS: Final = 0.002
"""Time after which other callbacks get their turn while the rows of a pack are begun."""


def begin_task(
    work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, context: TaskContext
) -> "asyncio.Task[None]":
    """Return a task of the running `loop` that runs `work`.

    From Python 3.12 on, it has already begun, and ended if it did not wait for anything.
    """
    if sys.version_info >= (3, 12):  # mypy knows this, but not EAGER
        task = asyncio.Task(work, loop=loop, context=context, eager_start=True)
    else:
        task = loop.create_task(work, context=context)
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
        whole_packs: Whether the handler gets all rows of a pack at once.
        concurrency: The maximum number of rows that are handled concurrently.
        pack_middleware: What surrounds packs of rows.
    """

    def __init__(
        self,
        handler: AsyncHandler,
        adapter: HandlerAdapter,
        holder: Holder,
        *,
        whole_packs: bool = False,
        concurrency: int = 1,
        pack_middleware: PackMiddleware | None = None,
    ) -> None:
        self._handler = handler
        self._adapter = adapter
        self._holder = holder
        self._whole_packs = whole_packs
        self._pack_middleware = pack_middleware
        self._context = copy_context()
        self._row_slots = asyncio.Semaphore(concurrency)

    async def handle(self, request: Request) -> None:
        """Handle `request`: the work of a task of its own, whose context is that of the request.

        Most requests come here, so what they need is in one coroutine.
        """
        outcome: Outcome | None
        try:
            try:
                if self._whole_packs:
                    outcome = await self._handle_whole(request)
                elif is_pack(request):
                    outcome = await self._handle_pack(request)
                elif opentelemetry_trace() is not None:
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
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this is a task
                    self._holder.handled(request, None)
                    raise
                outcome = failed(error, request)  # something that the handler awaited was cancelled, not the handler
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises, even SystemExit, the worker goes on
                outcome = failed(error, request)
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

    # ── packs ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _handle_pack(self, request: Request) -> Outcome:
        """Call the handler for each row of a pack, within the middleware.  Return the end of the reply."""
        if self._pack_middleware is None:
            return await self._handle_rows(request, self._handler, self._context)
        around, row_handler = self._pack_middleware
        outcome: Outcome | None = None

        async def call_next(pack: Request) -> None:
            nonlocal outcome
            outcome = await self._handle_rows(pack, row_handler, copy_context())

        failure = NOT_CALLED
        try:
            with handling(request):
                await around(request, call_next)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if outcome is not None:
                raise
            failure = failed(error, request)
        if outcome is None:
            failed_rows = failed_pack(request, failure)
            await self._send_groups(failed_rows, request)
            outcome = failed_rows.last()
        return outcome

    async def _handle_rows(self, request: Request, handler: AsyncHandler, base: TaskContext) -> Outcome:
        """Call a handler for each row of a pack, concurrently.  Return the end of the reply."""
        pack = Pack(request)
        running: set[asyncio.Task[None]] = set()
        crashes: list[BaseException] = []
        slots, loop = self._row_slots, asyncio.get_running_loop()
        until = time.monotonic() + MAX_PACK_TURN_SECONDS

        def ended(task: "asyncio.Task[None]") -> None:
            slots.release()
            running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                crashes.append(error)

        try:
            for index, row in enumerate(pack):
                await slots.acquire()
                task = begin_task(self._handle_row(handler, pack, index, row), loop, base.copy())
                if task.done():
                    ended(task)
                else:
                    running.add(task)
                    task.add_done_callback(ended)
                if pack.groups:
                    await self._send_groups(pack, request)
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + MAX_PACK_TURN_SECONDS
            while running:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                await self._send_groups(pack, request)
        finally:
            left = list(running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if crashes:
            raise crashes[0]
        await self._send_groups(pack, request)
        return pack.last()

    async def _handle_row(self, handler: AsyncHandler, pack: Pack, index: int, row: Request) -> None:
        outcome: Outcome
        try:
            with handling(row):
                result = handler(self._adapter.argument(row))
                if type(result) is not CoroutineType and isinstance(result, AsyncGenerator):
                    outcome = await self._collect(result)
                else:
                    outcome = self._adapter.frames(await result)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this is a task
                raise
            outcome = failed(error, row)
        except BaseException as error:  # noqa: BLE001 - only this row fails
            outcome = failed(error, row)
        pack.record(index, outcome)

    async def _collect(self, parts: AsyncGenerator[Any, None]) -> list[bytes]:
        """Return the frames of a stream that replies to a row."""
        frames: list[bytes] = []
        try:
            async for part in parts:
                frames += self._adapter.frames(part)
                if isinstance(part, Last):
                    return frames
        finally:
            await parts.aclose()
        return frames + self._adapter.frames(None)

    async def _handle_whole(self, request: Request) -> Outcome:
        """Call a handler of whole packs.  Return the end of the reply."""
        pack = Pack(request, coded=self._adapter.coded)
        with handling(request):
            results: Any = []
            if values := pack.values(self._adapter):
                result: Any = self._handler(values)
                results = [part async for part in result] if isinstance(result, AsyncGenerator) else await result
            pack.record_all(results, self._adapter)
        await self._send_groups(pack, request)
        return pack.last()

    async def _send_groups(self, pack: Pack, request: Request) -> None:
        """Send the groups that are ready."""
        while pack.groups:
            await self._holder.send_partial(request, pack.groups.popleft())

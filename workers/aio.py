"""The asyncio worker, whose handlers are coroutines or async generators."""

import asyncio
import logging
import math
import time
from contextvars import Context as TaskContext
from contextvars import copy_context
from typing import Final, Self, cast

from ..mdp.errors import RequestCancelled, SettingError
from ..mdp.functions import name_of
from ..mdp.loading import check_not_importing
from ..mdp.logs import fields_of
from ..mdp.tracing import current
from ..mdp.transport.polling import add_reader, remove_reader
from ..mdp.transport.sockets import Context
from .aio_handling import EAGER, AsyncHandler, HandlerCalls, HandlerTask, begin_task
from .base import AsyncSource, BaseWorker
from .blocking import BlockingWatch
from .connection import FLUSH_SECONDS, SEND_RETRY_SECONDS, WorkerConnection
from .contexts import RequestContexts
from .handling import Outcome, failed
from .request import Request

DEFAULT_CONCURRENCY: Final = 64
"""Maximum number of concurrent requests: handlers that await should not queue behind each other."""
MAX_TURN_SECONDS: Final = 0.005
"""Time after which other callbacks of the event loop get their turn."""

log = logging.getLogger("zmdp.worker")


class AsyncWorker(BaseWorker[AsyncHandler]):
    """Offers `service` through a broker, with an asyncio handler.

    A coroutine's return value is sent as the FINAL.  An async generator's yields are sent as PARTIALs, followed by an
    empty FINAL, unless its last one is `yield Last(...)`.  Each is one frame (`bytes`), several (a list of `bytes`),
    or None for one empty frame; with a `codec`, any value.

        worker = AsyncWorker("fetch", concurrency=100)

        @worker
        async def fetch(request):
            return await download(request[0].decode())

        asyncio.run(worker.run())

    `concurrency` is the maximum number of concurrent requests (default 64), over one connection; with 0.2 and 0.1, over
    one connection each.  When a request is cancelled or its connection is lost, the handler's task is cancelled: a
    handler that waits for something has a task of its own, while those that do not share one.
    Handlers must not block the event loop, which also sends the heartbeats: a worker whose handlers block it for more
    than 0.1 s says so in its log.

    Args:
        service: The name of the service.
        handler: A coroutine function or async generator function; it can be set later, as above.
        broker: Endpoint of the broker, or several, as for `Worker`.
        arguments: All other settings are those of `Worker`.

    Raises:
        SettingError: A setting is invalid.
        TypeError: There is no such setting.
    """

    default_concurrency = DEFAULT_CONCURRENCY
    _asyncio = True
    _wrong_handler = "not a coroutine function or async generator function: a plain function needs a Worker"

    def _reset(self) -> None:
        super()._reset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[AsyncSource] = []

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until `stop` is called or this task is cancelled, then finish the requests in progress.

        On Ctrl-C, `asyncio.run` cancels its task and, once that has ended, raises `KeyboardInterrupt`:

            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(worker.run())
        """
        self.start()
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.stop()
            await self.wait()
            raise

    def start(self) -> None:
        """Serve in the running event loop, and return immediately.  Call `stop` and `wait` afterwards.

            worker.start()
            ...
            worker.stop()
            await worker.wait()

        Raises:
            SettingError: There is no handler or no event loop.
            ClosedError: The worker was started before.
        """
        check_not_importing()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            text = "an AsyncWorker serves in a running event loop: asyncio.run(worker.run()) makes one"
            raise SettingError(text) from None
        handler = self._begin_start()
        self._loop = loop
        try:
            for number in range(self._connection_count):
                connection = self._connect(number, handler, self._loop)
                self._connections.append(connection)
                connection.open()
        except BaseException:
            for connection in self._connections:
                connection.abort()
            self._end_context()
            raise
        if self._stopping:
            self._leave()

    def _connect(self, number: int, handler: AsyncHandler, loop: asyncio.AbstractEventLoop) -> AsyncSource:
        """Return a connection that is about to be opened."""
        return _AsyncConnection(self, handler, loop, self._open_context(), first=not number)

    def stop(self) -> None:
        """Take no more requests.

            worker.stop()

        `run` and `wait` return when those in progress are finished.  Thread-safe.
        """
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)

    def abort(self) -> None:
        """End without finishing the requests in progress: cancel their handlers.

            worker.abort()
            await worker.wait()

        Call it in the event loop.  Other workers get the requests.
        """
        self._stopping = True
        for connection in self._connections:
            connection.abort()

    def _leave(self) -> None:
        for connection in self._connections:
            connection.leave()

    async def wait(self) -> None:
        """Wait until everything has ended.

            worker.stop()
            await worker.wait()

        Without `stop`, it waits for ever.
        """
        for connection in self._connections:
            await connection.done.wait()
        if self._own_context is not None:
            await asyncio.to_thread(self._end_context)  # it waits until the last messages are out

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await self.wait()


class _AsyncConnection(WorkerConnection):
    """A connection in an event loop, and the handlers of the requests that it holds."""

    def __init__(
        self,
        worker: AsyncWorker,
        handler: AsyncHandler,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        *,
        first: bool,
    ) -> None:
        level = logging.WARNING if first else logging.DEBUG  # connections are mostly lost together: warn once
        settings = worker.settings
        super().__init__(worker._session(), context, settings.keys, level)
        self.done = asyncio.Event()
        """Set when the connection and all handlers have ended."""
        self._calls = HandlerCalls(handler, worker._adapter, self)
        self._loop = loop
        self._contexts = RequestContexts()
        self._watch = BlockingWatch(loop, worker.service.decode(), name_of(handler))
        self._running: dict[int, HandlerTask] = {}
        """The tasks of handlers that wait for something, by the id() of their requests."""
        self._latest: tuple[HandlerTask, Request] | None = None
        """The latest handler to begin, unless it has ended or is known to wait."""
        self._handlers_wait = False
        """Whether the latest handler had to wait."""
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def opened(self, descriptor: int) -> None:
        """Watch a new descriptor."""
        add_reader(self._loop, descriptor, self._report if descriptor == self.monitor_descriptor else self._turn)
        self._schedule()

    def closing(self, descriptor: int) -> None:
        """Stop watching a descriptor that is about to be closed."""
        remove_reader(self._loop, descriptor)

    def _report(self) -> None:
        self.monitor_reported = True
        self._turn()

    def leave(self) -> None:
        """Take no more requests, and end when those in progress are finished."""
        self.disconnect(time.monotonic())
        self._turn()

    def abort(self) -> None:
        """End immediately: cancel the handlers, and close the socket without telling the broker."""
        now = time.monotonic()
        self._note_waiting()
        self.session.close("closed", now)
        self.tell(now)
        self.close()
        self._settle()

    # ── turns of the event loop ──────────────────────────────────────────────────────────────────────────────────────

    def _schedule(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._turn, context=self._contexts.base)

    def _turn(self) -> None:
        """Send, receive, and begin what has arrived, until nothing is left to do or the turn is over."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        now = time.monotonic()
        until = now + MAX_TURN_SECONDS
        try:
            while True:
                self._note_waiting()
                self.step(now)
                waiting = self.session.to_begin
                if not waiting:
                    break
                self._begin(waiting)
                now = time.monotonic()
                if not EAGER or now >= until:
                    self._schedule()  # that turn comes after the first step of the tasks
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, no request may be held in silence
            self.reset(error, now)
        self._settle()

    def _begin(self, waiting: int) -> None:
        """Begin requests: one task handles them in turn, as long as their handlers end without waiting for anything.

        A task for each would take longer than most handlers do.  If the latest handler had to wait, each request gets
        a task at once.
        """
        self._watch.note()
        try:
            for _ in range(waiting if self._handlers_wait else 1):
                begin_task(self._handle_requests(), self._loop, self._contexts.new())
        except Exception as error:  # noqa: BLE001 - the callers get it
            while (request := self._next()) is not None:
                self.crashed(request, error)

    async def _handle_requests(self) -> None:
        """Handle requests, one after the other, until a handler has waited, none is left, or the turn is over."""
        until = time.monotonic() + MAX_TURN_SECONDS
        task = cast("HandlerTask", asyncio.current_task())
        current.set(None)
        context = copy_context()
        while (request := self._next()) is not None:
            self._note_waiting()
            self._latest = task, request
            await self._calls.handle(request)
            if self._latest is None or self._latest[0] is not task:
                break  # it has waited, so that the task was its own
            self._latest, self._handlers_wait = None, False
            current.set(None)
            if time.monotonic() >= until:
                break
            if task.cancelling() or not _is_unchanged(context):
                break  # the next request must not see that
            context = self._contexts.renewed(context)

    def _next(self) -> Request | None:
        """Return the next request to begin."""
        now = time.monotonic()
        try:
            if now - self.flushed_at >= FLUSH_SECONDS:
                self.flush(now)
            return self.session.begin(now)
        except Exception as error:  # noqa: BLE001 - as in a turn
            self.reset(error, now)
            return None

    def _note_waiting(self) -> None:
        """Note that the latest handler waits, if it has begun and has not ended."""
        if self._latest is not None:
            task, request = self._latest
            if not task.done():  # else it was cancelled, although its handler has not waited
                self._running[id(request)] = task
            self._latest, self._handlers_wait = None, True

    def cancelled(self, request: Request) -> None:
        """Cancel the task that handles `request`."""
        task = self._running.get(id(request))
        if task is not None and not task.cancelling():  # only once: it may be cleaning up
            task.cancel()

    def stuck(self, request: Request) -> None:
        """Log that a handler has exceeded its time, and cancel it."""
        log.error(
            "%s: a handler has neither returned nor yielded for %g s: cancelling it; its request goes to another "
            "worker",
            request.service, self.session.settings.handler_timeout, extra=fields_of(request),
        )  # fmt: skip
        self.cancelled(request)

    def _settle(self) -> None:
        """Set the timer, or end if there is nothing left to do."""
        if self.ended and not self._running:
            self._watch.close()
            if self._timer is not None:
                self._timer.cancel()
            self.done.set()
            return
        due = self.due()
        if due >= self._wakes_at or due == math.inf:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._wake, context=self._contexts.base)

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        self._turn()

    # ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def handled(self, request: Request, outcome: Outcome | None) -> None:
        """End a request whose handler has ended; the outcome is None if its task was cancelled."""
        now = time.monotonic()
        waited = self._forget(request)
        if outcome is not None:
            self.finish(request, outcome, now)
        elif request.cancelled:
            self.finish(request, failed(RequestCancelled("cancelled"), request), now)
        else:
            # The handler exceeded its time, or the program is being shut down.
            self.session.abandon(request, now, ended=True)
        if waited:
            if now - self.flushed_at >= FLUSH_SECONDS:  # else with the replies of other handlers
                self.flush(now)
            self._schedule()

    def crashed(self, request: Request, error: BaseException) -> None:
        """End a request after an error in our own code."""
        self._forget(request)
        super().crashed(request, error)
        self._schedule()

    def _forget(self, request: Request) -> bool:
        """Forget the task of a handler that has ended.  Return whether it has waited for something."""
        latest = self._latest
        if latest is not None and latest[1] is request:
            return False
        self._running.pop(id(request), None)
        return True

    async def send_partial(self, request: Request, frames: list[bytes]) -> None:
        """Send what a handler has yielded, as a PARTIAL, and wait if the broker does not keep up."""
        self.session.partial(request, frames, time.monotonic())
        self._schedule()
        # Let the connection send, and receive a CANCEL; wait for a broker that does not keep up.
        await asyncio.sleep(SEND_RETRY_SECONDS if self.stalled else 0)
        while self.stalled:
            await asyncio.sleep(SEND_RETRY_SECONDS)


def _is_unchanged(context: TaskContext) -> bool:
    """Return whether the variables of the current context have the values that they have in `context`."""
    try:
        return copy_context() == context
    except Exception:  # noqa: BLE001 - values of any type are compared
        return False

"""The asyncio worker: coroutines and async generators behind a service."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import copy_context
from types import CoroutineType, TracebackType
from typing import Any, Final, Self, TypeVar

import zmq

from ..mdp import wire
from ..mdp.codecs import Codec
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import ClosedError, RequestCancelled, SettingError
from ..mdp.transport.sockets import Context, checked_endpoint, end, own_context
from . import handling as h
from .capacity import Capacity
from .connection import FLUSH, RETRY, Connection, ready_options
from .eager import Starter
from .request import Request
from .session import WorkerSession

AsyncHandler = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any, None]]
"""A coroutine function or an async generator function of a request; with a codec, of a value."""
H = TypeVar("H", bound=AsyncHandler)

CONCURRENCY: Final = 64
"""Requests handled at a time, unless told otherwise: handlers that await should not queue behind each other."""
TURN: Final = 0.005
"""Seconds after which other callbacks of the event loop get their turn."""

log = logging.getLogger("zmdp.worker")


class AsyncWorker:
    """Offers `service` through a broker, with an asyncio handler.

    What a coroutine returns is the FINAL; what an async generator yields are PARTIALs, and an empty FINAL follows,
    unless it ends with `yield Final(...)`.  Each is one frame (`bytes`), several (a list of `bytes`), or None for an
    empty one; with a `codec`, any value.

        worker = AsyncWorker("fetch", concurrency=100)

        @worker
        async def fetch(request):
            return await download(request[0].decode())

        asyncio.run(worker.run())

    `concurrency` is how many requests are handled at a time, over one connection (before X1 each over its own), or
    `max_concurrency` if that is given.  When a request is cancelled, or its connection is lost, the handler's task is
    cancelled.  A handler must not block the event loop: heartbeats come from there, too, and a worker whose handlers
    block it is given fewer requests.  With `dialect`, requests of MDP/0.1 and 0.2 clients have an option `dialect`.
    Everything else is as with `Worker`.

    Raises `SettingError` for a setting out of range.
    """

    def __init__(
        self,
        service: str | bytes,
        handler: AsyncHandler | None = None,
        *,
        broker: str = DEFAULT_ENDPOINT,
        concurrency: int = CONCURRENCY,
        max_concurrency: int | None = None,
        heartbeat: float = 1.0,
        liveness: int = 5,
        handler_timeout: float | None = None,
        codec: str | Codec | None = None,
        protocol: str = "X1",
        name: str = "",
        dialect: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        h.check_settings(concurrency, handler_timeout)
        if max_concurrency is not None and max_concurrency < concurrency:
            raise SettingError(f"max_concurrency is {max_concurrency!r}: it must be {concurrency} or more")
        self.service = wire.service_name(service)
        self.broker = checked_endpoint(broker)
        self.concurrency = concurrency
        self.max_concurrency = max_concurrency
        self.heartbeat = heartbeat
        self.liveness = liveness
        self.handler_timeout = handler_timeout
        self._handling = h.Handling(codec)
        self._handler: AsyncHandler | None = None
        if handler is not None:
            self(handler)
        self.protocol = protocol
        self.name = name
        self.dialect = dialect
        self._context = context
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[_AsyncConnection] = []
        self._stopping = False
        self._session()  # checks the settings

    def __call__(self, handler: H) -> H:
        """Make `handler` this worker's handler; returns it unchanged."""
        if not h.is_async(handler):
            raise SettingError(
                f"the handler of {self.service.decode()!r} is no coroutine function or async generator function: "
                "a plain function takes a Worker"
            )
        self._handler = handler
        return handler

    @property
    def credit(self) -> int:
        """The number of requests handled at a time."""
        return self.max_concurrency or self.concurrency

    def _session(self) -> WorkerSession:
        return WorkerSession(
            self.service, protocol=self.protocol, heartbeat=self.heartbeat, liveness=self.liveness,
            capacity=Capacity(self.credit) if self.protocol == "X1" else None,
            handler_timeout=self.handler_timeout, options=ready_options(self.name, dialect=self.dialect),
        )  # fmt: skip

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until `stop` is called or this task is cancelled; requests that have begun are finished first."""
        self.start()
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.stop()
            await self.wait()
            raise

    def start(self) -> None:
        """Serve in the running event loop, and return at once.  Call `stop` and `wait` afterwards."""
        if self._loop is not None:
            raise ClosedError("this worker is running, or has run: make another")
        if self._handler is None:
            raise SettingError(
                f"worker for {self.service.decode()!r} has no handler: pass one, or decorate it with the worker"
            )
        self._loop = asyncio.get_running_loop()
        context = self._context
        if context is None:
            context = self._own_context = own_context()
        try:
            for number in range(1 if self.protocol == "X1" else self.credit):
                connection = _AsyncConnection(self, self._handler, self._loop, context, first=not number)
                self._connections.append(connection)
                connection.open()
        except BaseException:
            for connection in self._connections:
                connection.abort()
            if self._own_context is not None:
                end(self._own_context)
            raise
        if self._stopping:
            self._leave()

    @property
    def started(self) -> bool:
        """Whether it serves, or has served."""
        return self._loop is not None

    def stop(self) -> None:
        """Take no more requests; `run` and `wait` return when those that have begun are finished.  Thread-safe."""
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        for connection in self._connections:
            connection.leave()

    async def wait(self) -> None:
        """Wait until all has ended after `stop`."""
        for connection in self._connections:
            await connection.done.wait()
        context, self._own_context = self._own_context, None
        if context is not None:
            await asyncio.to_thread(end, context)  # it waits until the last messages are out

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        await self.wait()


class _AsyncConnection(Connection):
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
        # The connections of a worker are mostly lost together, and one warning is enough.
        level = logging.WARNING if first else logging.DEBUG
        super().__init__(worker._session(), checked_endpoint(worker.broker), context, level)
        self.done = asyncio.Event()
        """The connection has ended, and all handlers have."""
        self._handler = handler
        self._handling = worker._handling
        self._loop = loop
        self._context_of_worker = copy_context()
        self._starter = Starter(loop, self._stepped)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The tasks of handlers that wait for something, by the id() of their requests."""
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._in_turn = False

    def opened(self, descriptor: int) -> None:
        """There is a new socket with this descriptor."""
        self._loop.add_reader(descriptor, self._turn)
        self._schedule()

    def closing(self, descriptor: int) -> None:
        """The socket with this descriptor is about to be closed."""
        self._loop.remove_reader(descriptor)

    def leave(self) -> None:
        """Take no more requests, and end when those that have begun are done."""
        self.session.leave(time.monotonic())
        self._turn()

    def abort(self) -> None:
        """End at once."""
        self.session.leaving = True
        self.close()
        self._settle()

    # ── turns of the event loop ──────────────────────────────────────────────────────────────────────────────────────

    def _schedule(self) -> None:
        if self._soon is None and not self._in_turn:
            self._soon = self._loop.call_soon(self._turn, context=self._context_of_worker)

    def _turn(self) -> None:
        """Send, take in what has arrived, and begin it, until nothing is left to do or the turn is over."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._in_turn = True
        try:
            now = time.monotonic()
            until = now + TURN
            while True:
                self.step(now)
                self._look()
                request = self.session.begin(now)
                if request is None:
                    break
                now = self._begin_all(request, now, until)
                if now >= until:
                    self.flush(now)
                    self._soon = self._loop.call_soon(self._turn, context=self._context_of_worker)
                    break
        finally:
            self._in_turn = False
        self._settle()

    def _begin_all(self, request: Request | None, now: float, until: float) -> float:
        """Begin this request and those that wait.  Returns the time."""
        session, start, base = self.session, self._starter.start, self._context_of_worker
        while request is not None:
            task = start(self._handle(request), base.copy())
            if task is not None:
                self._tasks[id(request)] = task
            began, now = now, time.monotonic()
            session.stepped(now - began)
            if now - self.flushed_at >= FLUSH:
                self.flush(now)
            if now >= until:
                break
            request = session.begin(now)
        return now

    def _look(self) -> None:
        """Cancel the handlers whose requests nobody waits for, or that have exceeded their time."""
        session = self.session
        for request in session.stuck:
            log.error(
                "%s: a handler has neither returned nor yielded for %g s: it is cancelled, and its request goes to "
                "another worker",
                request.service, session.handler_timeout,
            )  # fmt: skip
        for request in (*session.stuck, *session.cancelled):
            task = self._tasks.get(id(request))
            if task is not None and not task.cancelling():  # once is enough: it may have something to clean up
                task.cancel()
        session.stuck.clear()
        session.cancelled.clear()

    def _settle(self) -> None:
        """Set the timer; or end, when there is nothing left to do."""
        if self.ended and not self._tasks:
            self._starter.close()
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
        self._timer = self._loop.call_later(
            max(0.0, due - time.monotonic()), self._wake, context=self._context_of_worker
        )

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        self._turn()

    # ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stepped(self, seconds: float) -> None:
        """A handler has kept the event loop for so long, after it had waited for something."""
        self.session.stepped(seconds)
        if self.session.unsent:  # a change of the credit
            self._schedule()

    async def _handle(self, request: Request) -> None:
        """Handle `request`, from the first to the last."""
        outcome: list[bytes] | h.Failed
        try:
            with h.handling(request):
                result = self._handler(self._handling.argument(request))
                if type(result) is not CoroutineType and isinstance(result, AsyncGenerator):
                    last = await self._stream(result, request)
                else:
                    last = await result
                outcome = self._handling.frames(last)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this is a task
                self._handled(request, None)
                raise
            outcome = h.failed(error, request)  # something that the handler waited for was cancelled, not the handler
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, SystemExit too, the worker goes on
            outcome = h.failed(error, request)
        self._handled(request, outcome)

    def _handled(self, request: Request, outcome: list[bytes] | h.Failed | None) -> None:
        """The handler has ended, with that, or because its task was cancelled."""
        session, now = self.session, time.monotonic()
        self._tasks.pop(id(request), None)
        if outcome is None and not request.cancelled:
            # It has exceeded its time, or whoever cancelled the task is ending this program.
            session.abandon(request, now, ended=True)
        else:
            if outcome is None:
                outcome = h.failed(RequestCancelled("cancelled"), request)
            self.finish(request, outcome, now)
        if not self._in_turn:
            if not self._tasks:  # else others may have something to say in this turn of the event loop
                self.flush(now)
            self._schedule()

    async def _stream(self, parts: AsyncGenerator[Any, None], request: Request) -> Any:
        """Send what an async generator yields as PARTIALs; returns what is the FINAL."""
        try:
            async for part in parts:
                if isinstance(part, h.Final):
                    return part
                self.session.partial(request, self._handling.frames(part), time.monotonic())
                self._schedule()
                # The broker, and whoever waits for CANCEL, get their turn; a broker that does not keep up is waited
                # for.
                await asyncio.sleep(RETRY if self.stalled else 0)
                while self.stalled:
                    await asyncio.sleep(RETRY)
        finally:
            await parts.aclose()
        return None

"""The asyncio worker: coroutines and async generators behind a service."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import zmq

from ..mdp import wire
from ..mdp.codecs import Codec
from ..mdp.errors import ClosedError, RequestCancelled, SettingError
from ..mdp.multipart import receive, send
from ..mdp.server import DEFAULT_ENDPOINT
from ..mdp.sockets import checked_endpoint, dealer, end, own_context
from ..mdp.wire import Message
from . import handling as h
from .connection import LINGER
from .session import Request, WorkerSession

AsyncHandler = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any, None]]
"""A coroutine function or an async generator function of a request; with a codec, of a value."""
H = TypeVar("H", bound=AsyncHandler)

SHRINK: Final = 10.0
"""Seconds for which connections beyond `concurrency` must have been idle to be given up."""
SIBLINGS: Final = 1.0
"""Seconds within which lost connections are told of once."""
RETRY: Final = 0.01
"""Seconds until a message that the broker does not take yet is tried again."""

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

    `concurrency` is how many requests are handled at a time, each over a connection of its own; with `max_concurrency`,
    that many are kept ready, and more are opened while none is idle.  When a request is cancelled, or its connection is
    lost, the handler's task is cancelled.  A handler must not block the event loop:
    heartbeats come from there, too.  All else is as with `Worker`.

    Raises `SettingError` for a setting out of range.
    """

    def __init__(
        self,
        service: str | bytes,
        handler: AsyncHandler | None = None,
        *,
        broker: str = DEFAULT_ENDPOINT,
        concurrency: int = 1,
        max_concurrency: int | None = None,
        heartbeat: float = 1.0,
        liveness: int = 5,
        handler_timeout: float | None = None,
        codec: str | Codec | None = None,
        protocol: str = "X1",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        h.check_settings(concurrency, handler_timeout)
        if max_concurrency is not None and max_concurrency < concurrency:
            raise SettingError(f"max_concurrency is {max_concurrency!r}: it takes concurrency ({concurrency}) or more")
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
        self._context = context
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: list[_Slot] = []
        self._busy = 0
        """Slots whose request is worked on."""
        self._least_idle = 0
        """The fewest that were idle since the last look at whether there are too many."""
        self._told_at = -SIBLINGS
        """When a lost connection was last logged as a warning."""
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

    def _session(self) -> WorkerSession:
        return WorkerSession(self.service, protocol=self.protocol, heartbeat=self.heartbeat, liveness=self.liveness)

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Serve until `stop` is called or this task is cancelled; what is worked on is finished first."""
        self.start()
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.stop()
            await self.wait()
            raise

    def start(self) -> None:
        """Serve in the running event loop, and return at once.  To be followed by `stop` and `wait`."""
        if self._loop is not None:
            raise ClosedError("this worker is running, or has run: make another")
        if self._handler is None:
            raise SettingError(
                f"worker for {self.service.decode()!r} has no handler: pass one, or decorate it with the worker"
            )
        self._loop = asyncio.get_running_loop()
        if self._context is None:
            self._context = self._own_context = own_context()
        try:
            for _ in range(self.concurrency):
                self._slots.append(self._slot(self._context, self._handler))
        except BaseException:
            self._stopping = True
            self._stop_slots()
            if self._own_context is not None:
                end(self._own_context)
            raise
        if self._stopping:
            self._stop_slots()
        if self.max_concurrency is not None:
            self._loop.call_later(SHRINK, self._shrink)

    def _slot(self, context: zmq.Context[zmq.Socket[bytes]], handler: AsyncHandler) -> "_Slot":
        return _Slot(self, self._session(), context, handler, self._handling)

    def _taken(self) -> None:
        """A slot has a request: one at least should be ready for the next."""
        self._busy += 1
        idle = len(self._slots) - self._busy
        self._least_idle = min(self._least_idle, idle)
        if idle > 0 or self._stopping or self.max_concurrency is None:
            return
        try:
            for _ in range(min(self.concurrency, self.max_concurrency - len(self._slots))):
                self._slots.append(self._slot(self._context, self._handler))  # type: ignore[arg-type]  # `start` had both
        except (zmq.ZMQError, SettingError) as error:  # no file descriptor left, for example
            log.warning("%s: no more than %d at a time: %s", self.service.decode(), len(self._slots), error)

    def _freed(self) -> None:
        self._busy -= 1

    def _severity(self, now: float) -> int:
        """How a lost connection is logged: its siblings are mostly lost for the same reason, in the same second."""
        first = now >= self._told_at + SIBLINGS
        if first:
            self._told_at = now
        return logging.WARNING if first else logging.DEBUG

    def _shrink(self) -> None:
        """Give up the slots that nobody has needed for a while."""
        if self._stopping or self._loop is None:
            return
        surplus = min(self._least_idle - self.concurrency, len(self._slots) - self.concurrency)
        for slot in [slot for slot in self._slots if slot.idle][: max(0, surplus)]:
            slot.stop()
        self._slots = [slot for slot in self._slots if not slot.ended.is_set()]
        self._least_idle = len(self._slots) - self._busy
        self._loop.call_later(SHRINK, self._shrink)

    @property
    def started(self) -> bool:
        """Whether it serves, or has served."""
        return self._loop is not None

    def stop(self) -> None:
        """Take no more requests; `run` and `wait` return when those worked on are finished.  Any thread may call."""
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_slots)

    def _stop_slots(self) -> None:
        for slot in self._slots:
            slot.stop()

    async def wait(self) -> None:
        """Wait until all has ended after `stop`."""
        while serving := [slot for slot in self._slots if not slot.ended.is_set()]:
            await serving[0].ended.wait()
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


class _Slot:
    """One connection, and the task of the request that came over it."""

    def __init__(
        self,
        worker: AsyncWorker,
        session: WorkerSession,
        context: zmq.Context[zmq.Socket[bytes]],
        handler: AsyncHandler,
        handling: h.Handling,
    ) -> None:
        self.ended = asyncio.Event()
        self._worker = worker
        self._session = session
        self._endpoint = checked_endpoint(worker.broker)
        self._context = context
        self._handler = handler
        self._handling = handling
        self._handler_timeout = worker.handler_timeout
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[list[bytes] | h.Failed] | None = None
        self._cancelled = False
        """The task has been cancelled: once is enough, it may have something to clean up."""
        self._stuck: asyncio.TimerHandle | None = None
        self._unsent: list[Message] = []
        self._unsent_since = 0.0
        self._stopping = False
        self._open()
        self._set_timer()

    @property
    def idle(self) -> bool:
        """Whether it waits for a request."""
        return self._task is None and not self._stopping

    def stop(self) -> None:
        """End now, or when the request that is worked on is finished."""
        self._stopping = True
        if self._finished:
            self._end()

    @property
    def _finished(self) -> bool:
        """Whether it is to end, and what was worked on is done, and the broker has been sent all of it."""
        return self._stopping and self._task is None and not (self._unsent and self._session.lost is None)

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        self._socket = socket = dealer(self._context, self._endpoint, {zmq.LINGER: LINGER})
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._arrived)
        self._send(self._session.connected(time.monotonic()))

    def _drop(self, linger: int) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            self._loop.remove_reader(self._fd)
            socket.close(linger)
        self._unsent.clear()

    def _arrived(self) -> None:
        """The descriptor tells of changes only: take in all that is there."""
        now = time.monotonic()
        session = self._session
        while self._socket is not None and (message := self._receive(self._socket)) is not None:
            request = session.receive(message, now)
            if session.lost is not None:
                break
            if request is not None and not self._stopping:
                self._start(request)
            elif session.request is not None and session.request.cancelled:
                self._cancel()
        self._check_lost(now)

    def _receive(self, socket: zmq.Socket[bytes]) -> Message | None:
        try:
            return receive(socket)
        except zmq.ContextTerminated:
            log.warning("%s: the ZeroMQ context was terminated", self._session.service.decode())
            self._session.lose("the ZeroMQ context was terminated", time.monotonic())
            self._drop(0)
            self._cancel()
            self.stop()
            return None

    def _tick(self) -> None:
        self._timer = None
        self._arrived()  # first what has come, then the time
        now = time.monotonic()
        session = self._session
        if session.lost is None:
            self._send(session.tick(now))
            self._check_lost(now)
        elif now >= session.retry_at and self._task is None:
            try:
                self._open()
            except (zmq.ZMQError, SettingError) as error:  # no file descriptor left, for example
                session.lose(str(error), now)
                self._check_lost(now)
        if self._finished:
            self._end()
        elif not self.ended.is_set():
            self._set_timer()

    def _set_timer(self) -> None:
        due = self._session.deadline()
        now = time.monotonic()
        if self._session.lost is not None and self._task is not None:
            due = now + self._session.beat_interval  # it connects again when the handler has ended
        if self._unsent:
            due = min(due, now + RETRY)
        self._timer = self._loop.call_later(max(0.0, due - now), self._tick)

    def _hurry(self) -> None:
        """Look anew at what is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._set_timer()

    def _check_lost(self, now: float) -> None:
        session = self._session
        if session.lost is None or self._socket is None:
            return
        log.log(
            self._worker._severity(now), "%s: %s; connecting to %s again in %.1f s",
            session.service.decode(), session.lost, self._endpoint, max(0.0, session.retry_at - now),
        )  # fmt: skip
        self._drop(0)
        self._cancel()
        self._hurry()

    def _send(self, messages: list[Message]) -> None:
        """Send, or have it wait for the broker to take it."""
        if self._socket is None:
            return
        if not self._unsent:
            self._unsent_since = time.monotonic()
        self._unsent += messages
        while self._unsent and not send(self._socket, self._unsent[0]):
            del self._unsent[0]
            self._unsent_since = time.monotonic()
        # What arrived while this was sent is not told of by the descriptor any more.
        self._loop.call_soon(self._arrived)
        if self._unsent:
            if time.monotonic() - self._unsent_since > self._session.patience:
                self._session.lose("the broker takes nothing", time.monotonic())
            self._hurry()

    # ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, request: Request) -> None:
        self._cancelled = False
        self._task = self._loop.create_task(self._run(request))
        self._task.add_done_callback(partial(self._handled, request))
        self._watch(request)
        self._worker._taken()

    def _watch(self, request: Request) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        if self._handler_timeout is not None and self._session.request is request:
            self._stuck = self._loop.call_later(self._handler_timeout, self._give_up, request)

    def _give_up(self, request: Request) -> None:
        if self._session.request is not request or self._task is None:
            return
        log.error(
            "%s: the handler has not come back after %g s: it is cancelled, and its request goes to another worker",
            request.service, self._handler_timeout,
        )  # fmt: skip
        self._send(self._session.disconnect("the handler is stuck", time.monotonic()))
        self._drop(LINGER)
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    async def _run(self, request: Request) -> list[bytes] | h.Failed:
        """The frames of the FINAL, or how the handler failed."""
        try:
            with h.handling(request):
                result = self._handler(self._handling.argument(request))
                last = await (self._stream(result, request) if isinstance(result, AsyncGenerator) else result)
                return self._handling.frames(last)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this is a task
                raise
            return h.failed(error, request)  # something that the handler waited for was cancelled, not the handler
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, SystemExit too, the worker goes on
            return h.failed(error, request)

    def _handled(self, request: Request, task: asyncio.Task[list[bytes] | h.Failed]) -> None:
        """The handler has ended, by itself or because it was cancelled."""
        self._task = None
        self._worker._freed()
        if self._stuck is not None:
            self._stuck.cancel()
        now = time.monotonic()
        if not task.cancelled():
            outcome = task.result()
            if isinstance(outcome, h.Failed):
                messages = self._session.error(request, outcome.code, outcome.text, now, outcome.detail)
            else:
                messages = self._session.final(request, outcome, now)
        elif request.cancelled:
            code, text, detail = h.failed(RequestCancelled("cancelled"), request)
            messages = self._session.error(request, code, text, now, detail)
        else:  # whoever cancelled the task is ending this program: the request goes to another worker
            messages = self._session.disconnect("the handler's task was cancelled", now)
        self._send(messages)
        if self._session.lost is not None:
            self._drop(LINGER)
        if not messages:
            log.warning("%s: a reply came too late: the connection was lost meanwhile", request.service)
        if self._finished:
            self._end()
        elif self._session.lost is not None:
            self._hurry()  # it can connect again now

    async def _stream(self, parts: AsyncGenerator[Any, None], request: Request) -> Any:
        """Send what an async generator yields as PARTIALs; returns what is the FINAL."""
        try:
            async for part in parts:
                if isinstance(part, h.Final):
                    return part
                self._send(self._session.partial(request, self._handling.frames(part), time.monotonic()))
                self._watch(request)
                # The broker, and whoever waits for CANCEL, get their turn; a broker that does not keep up is waited
                # for.
                await asyncio.sleep(RETRY if self._unsent else 0)
                while self._unsent:
                    await asyncio.sleep(RETRY)
        finally:
            await parts.aclose()
        return None

    def _end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        if self._timer is not None:
            self._timer.cancel()
        heard = self._session.heard
        if self._socket is not None:
            for message in self._session.disconnect("closed", time.monotonic()):
                send(self._socket, message)
        # A broker that was never there will not take anything now.
        self._drop(LINGER if heard else 0)

"""The asyncio worker: coroutines and async generators behind a service."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import zmq

from ..mdp import wire
from ..mdp.codecs import Codec
from ..mdp.errors import ClosedError, RequestCancelled, SettingError
from ..mdp.server import DEFAULT_ENDPOINT
from ..mdp.sockets import checked_endpoint, end, own_context
from . import handling as h
from .link import RETRY, Link
from .request import Request
from .session import WorkerSession

AsyncHandler = Callable[[Any], Awaitable[Any] | AsyncGenerator[Any, None]]
"""A coroutine function or an async generator function of a request; with a codec, of a value."""
H = TypeVar("H", bound=AsyncHandler)

SHRINK: Final = 10.0
"""Seconds for which slots beyond `concurrency` must have been idle to be given up."""
SIBLINGS: Final = 1.0
"""Seconds within which lost connections are told of once."""

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

    `concurrency` is how many requests are handled at a time, all over one connection (before X1 each over its own);
    with `max_concurrency`, that many are kept ready, and more are taken while none is idle.  When a request is
    cancelled, or its connection is lost, the handler's task is cancelled.  A handler must not block the event loop:
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
        self._link: Link | None = None
        """That of all slots, where they share one."""
        self._links: dict[Link, None] = {}
        """All connections there are: before X1 each slot has one."""
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
                self._add_slot(self._context, self._handler)
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

    def _add_slot(self, context: zmq.Context[zmq.Socket[bytes]], handler: AsyncHandler) -> None:
        shared = self.protocol == "X1"
        link = self._link
        if link is None:
            endpoint = checked_endpoint(self.broker)
            link = Link(self.service.decode(), endpoint, context, shared=shared, severity=self._severity)
        session = self._slots[0].session.sibling() if shared and self._slots else self._session()
        slot = _Slot(self, session, link, handler)
        link.add(slot)
        self._links[link] = None
        if shared:
            self._link = link
        self._slots.append(slot)

    def _taken(self) -> None:
        """A slot has a request: one at least should be ready for the next."""
        self._busy += 1
        if self.max_concurrency is None:
            return
        idle = len(self._slots) - self._busy
        self._least_idle = min(self._least_idle, idle)
        if idle > 0 or self._stopping:
            return
        try:
            for _ in range(min(self.concurrency, self.max_concurrency - len(self._slots))):
                self._add_slot(self._context, self._handler)  # type: ignore[arg-type]  # `start` had both
        except (zmq.ZMQError, SettingError) as error:  # no file descriptor left, for example
            log.warning("%s: no more than %d at a time: %s", self.service.decode(), len(self._slots), error)

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
        self._links = {link: None for link in self._links if not link.gone.is_set()}
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
        # Last the one that the broker has perhaps just given a request: then it finds none of the others idle any more.
        for slot in sorted(self._slots, key=lambda slot: slot.freed, reverse=True):
            slot.stop()

    async def wait(self) -> None:
        """Wait until all has ended after `stop`."""
        while serving := [slot for slot in self._slots if not slot.ended.is_set()]:
            await serving[0].ended.wait()
        for link in self._links:  # until the broker has read what they said last
            await link.gone.wait()
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
    """Takes one request at a time over a link, and has the task in which it is handled."""

    def __init__(self, worker: AsyncWorker, session: WorkerSession, link: Link, handler: AsyncHandler) -> None:
        self.ended = asyncio.Event()
        self.session = session
        self.freed = 0
        self._worker = worker
        self._link = link
        self._handler = handler
        self._handling = worker._handling
        self._handler_timeout = worker.handler_timeout
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        """What the task is for."""
        self._cancelled = False
        """The task has been cancelled: once is enough, it may have something to clean up."""
        self._stuck: asyncio.TimerHandle | None = None
        self._stopping = False

    @property
    def busy(self) -> bool:
        """Whether the handler is at work."""
        return self._task is not None

    @property
    def idle(self) -> bool:
        """Whether it waits for a request."""
        return self._task is None and not self._stopping

    def stop(self) -> None:
        """End now, or when the request that is worked on is finished."""
        self._stopping = True
        self.settle()
        if not self.ended.is_set():
            self._link.wake()

    def settle(self) -> None:
        """End, if that is to be, and what was worked on is done, and the broker has been sent all of it."""
        if not self._stopping or self._task is not None or self.ended.is_set():
            return
        if not self._link.may_leave(self):
            self._link.ending = True
            return
        self.ended.set()
        self._link.remove(self)

    # ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, request: Request) -> None:
        """Have the handler work on `request`."""
        if self._stopping:
            return
        self._cancelled = False
        self._request = request
        self._task = self._loop.create_task(self._run(request))
        if self._handler_timeout is not None:
            self._watch(request)
        self._link.working += 1
        self._worker._taken()

    def cancel(self) -> None:
        """Nobody waits any more for what the handler works on, if it does."""
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()
            self._task.add_done_callback(lambda _: self.look())

    def _watch(self, request: Request) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        if self._handler_timeout is not None and self.session.request is request:
            self._stuck = self._loop.call_later(self._handler_timeout, self._give_up, request)

    def _give_up(self, request: Request) -> None:
        if self.session.request is not request or self._task is None:
            return
        log.error(
            "%s: the handler has not come back after %g s: it is cancelled, and its request goes to another worker",
            request.service, self._handler_timeout,
        )  # fmt: skip
        self._link.leave(self, "the handler is stuck")
        self.cancel()

    async def _run(self, request: Request) -> None:
        """Handle `request`, from the first to the last."""
        outcome: list[bytes] | h.Failed
        try:
            with h.handling(request):
                result = self._handler(self._handling.argument(request))
                last = await (self._stream(result, request) if isinstance(result, AsyncGenerator) else result)
                outcome = self._handling.frames(last)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this is a task
                self._link.context.run(self._handled, request, None)
                raise
            outcome = h.failed(error, request)  # something that the handler waited for was cancelled, not the handler
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, SystemExit too, the worker goes on
            outcome = h.failed(error, request)
        # The next request is not to be handled in the context of this one.
        self._link.context.run(self._handled, request, outcome)

    def look(self) -> None:
        """See to a task that was cancelled before its first step: nothing of it has run."""
        if self._task is not None and self._task.done() and self._request is not None:
            self._handled(self._request, None)

    def _handled(self, request: Request, outcome: list[bytes] | h.Failed | None) -> None:
        """The handler has ended, with that, or because its task was cancelled."""
        session, link = self.session, self._link
        self._task = None
        self._worker._busy -= 1
        link.freed(self)
        if self._stuck is not None:
            self._stuck.cancel()
        if session.request is not request:
            log.warning("%s: a reply came too late: the connection was lost meanwhile", request.service)
        elif outcome is None and not request.cancelled:
            # Whoever cancelled the task is ending this program: the request goes to another worker.
            link.leave(self, "the handler's task was cancelled")
        else:
            if outcome is None:
                outcome = h.failed(RequestCancelled("cancelled"), request)
            now = time.monotonic()
            if isinstance(outcome, h.Failed):
                link.send(session.error(request, outcome.code, outcome.text, now, outcome.detail))
            else:
                link.send(session.final(request, outcome, now))
        if self._stopping:
            self.settle()

    async def _stream(self, parts: AsyncGenerator[Any, None], request: Request) -> Any:
        """Send what an async generator yields as PARTIALs; returns what is the FINAL."""
        link = self._link
        try:
            async for part in parts:
                if isinstance(part, h.Final):
                    return part
                link.send(self.session.partial(request, self._handling.frames(part), time.monotonic()))
                self._watch(request)
                # The broker, and whoever waits for CANCEL, get their turn; a broker that does not keep up is waited
                # for.
                await asyncio.sleep(RETRY if link.stalled else 0)
                while link.stalled:
                    await asyncio.sleep(RETRY)
        finally:
            await parts.aclose()
        return None

"""Servers that clients call directly, without a broker (FLP, C46): `FreelanceWorker` and `AsyncFreelanceWorker`."""

import asyncio
import logging
import math
import select
import socket as sockets
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, cast

import zmq

from ..mdp.access import Access
from ..mdp.codecs import Codec
from ..mdp.loading import check_not_importing
from ..mdp.rows import Failed
from ..mdp.tracing import handling
from ..mdp.transport.multipart import milliseconds
from ..mdp.transport.sockets import Context, checked_endpoint
from .aio import AsyncHandler, AsyncWorker, _AsyncConnection
from .freelance_connection import FreelanceServerConnection, public_endpoint
from .freelance_session import FreelanceServerSession
from .handling import Last, failed
from .mdworker import Handler, Worker
from .request import Request
from .threaded import ThreadedConnection

DEFAULT_SERVICE = "freelance"
"""The name that requests show to the handler, and that the log shows."""

log = logging.getLogger("zmdp.worker")


class FreelanceWorker(Worker):
    """A server that clients call directly, without a broker.

    It is used like a `Worker`, and has the same handlers:

        worker = FreelanceWorker("tcp://127.0.0.1:5555", lambda request: request)
        worker.run()

    A client gets one reply: what a generator yields arrives together with its return value.  A handler's failure is
    sent as a reply that our clients recognize, and that others receive as three frames.

    Args:
        endpoint: The public endpoint, by which clients know this server, and to which they connect.
        bind: Where it listens, if not there: for example `"tcp://*:5555"`, or an address behind a proxy.
        service: The name that requests show to the handler.
        concurrency: Threads that run the handler (default 1).
        codec: As in `Worker`.
        name: As in `Worker`.
        access: Admit only the keys that this access file lists (`zmdp.mdp.access.load`), whose `secret_key` is that of
            the server.
        insecure: Admit everybody, even if other machines can connect.
        context: ZeroMQ context to use, needed for `inproc://` endpoints.

    Raises `SettingError` if a setting is invalid, and when it starts, `BindError` if it cannot listen.
    """

    def __init__(
        self,
        endpoint: str,
        handler: Handler | None = None,
        *,
        bind: str | None = None,
        service: str | bytes = DEFAULT_SERVICE,
        concurrency: int | None = None,
        codec: str | Codec | None = None,
        name: str = "",
        access: Access | None = None,
        insecure: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint = public_endpoint(endpoint)
        self.bind = self.endpoint if bind is None else checked_endpoint(bind)
        self.access = access
        self.insecure = insecure
        super().__init__(service, handler, concurrency=concurrency, codec=codec, name=name, context=context)
        self.broker = self.endpoint

    def copy(self, *, broker: Any = None) -> Self:
        """Return a server with the same handler and settings that has not been started; `broker` is its endpoint."""
        return type(self)(
            self.endpoint if broker is None else broker, self._handler, bind=self.bind if broker is None else None,
            service=self.service, concurrency=self.concurrency, codec=self.codec, name=self.name, access=self.access,
            insecure=self.insecure, context=self._context,
        )  # fmt: skip

    def _open(self, number: int) -> None:
        """Listen, and start the I/O thread."""
        session = FreelanceServerSession(self.service, concurrency=self.concurrency)
        server = _ThreadedServer(
            session, self.endpoint, self.bind, self._open_context(), access=self.access, insecure=self.insecure
        )
        self._connections.append(cast("ThreadedConnection", server))  # it has the methods that `Worker` uses
        if self._stopping:
            server.stop()
        self._start(f"{self.service.decode()}-io-{number}", server.watch)


class _ThreadedServer(FreelanceServerConnection):
    """A server's socket, the threads that run handlers, and an I/O thread that receives, under one lock."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.stopping = False
        self.watched = False
        """Whether the I/O thread has begun."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._wake_out, select.POLLIN)
        try:
            super().__init__(*arguments, **settings)
        except BaseException:
            self.dispose()
            raise
        for descriptor in self.descriptors:
            self._poller.register(descriptor, select.POLLIN)

    def receive(self, until: float = math.inf) -> Request | None:
        """Wait for a request.  Return None at the time `until`, or when no more requests will arrive."""
        with self._lock:
            while True:
                request = None if self.stopping else self.session.begin()
                if request is not None:
                    return request
                left = until - time.monotonic()
                if left <= 0 or self.stopping or self.closed:
                    return None
                self._idle.wait(None if left == math.inf else left)

    def partial(self, request: Request, body: Sequence[bytes]) -> bool:
        """Keep a PARTIAL for the reply.  Return False if nobody waits for it."""
        with self._lock:
            return self.session.partial(request, body)

    def end(self, request: Request, outcome: list[bytes] | Failed) -> None:
        """Send the reply to `request`."""
        with self._lock:
            if not self.closed:
                self.session.finish(request, outcome)
                if self._step() or self.session.ended:
                    self.wake()

    def fail(self, request: Request, error: BaseException) -> None:
        """End `request` after an error in our own code."""
        with self._lock:
            if not self.closed:
                self.crashed(request, error)
        self.wake()

    def abandon(self, request: Request) -> None:
        """End `request` without a reply, so that its client tries another server."""
        with self._lock:
            self.session.abandon(request)
        self.wake()

    def watch(self) -> None:
        """Run the I/O thread, until the last request has ended after `stop`."""
        with self._lock:
            self.watched = True
            try:
                while not self.session.ended:
                    if self.stopping and not self.session.leaving:
                        self.session.leave()
                        self._idle.notify_all()
                    more = self._step()
                    if not self.session.ended:
                        self._poll(0.0 if more else self.log_at - time.monotonic())
            except zmq.ContextTerminated:
                log.warning("%s: the ZeroMQ context was terminated", self.session.service.decode())
            except Exception:
                log.exception("%s: unexpected error in the I/O thread: stopping", self.session.service.decode())
            finally:
                self.stopping = True
                self.close()
                self._idle.notify_all()

    def stop(self) -> None:
        """Take no more requests, and end when those that have begun are finished.  Safe in a signal handler."""
        self.stopping = True
        self.wake()

    def wake(self) -> None:
        """Interrupt the I/O thread while it waits for messages."""
        with suppress(OSError):
            self._wake_in.send(b"!")

    def abort(self) -> None:
        """Close the socket immediately."""
        with self._lock:
            self.stopping = True
            self.close(0)
            self._idle.notify_all()

    def dispose(self) -> None:
        """Close the last descriptors, after all threads have ended."""
        self._wake_in.close()
        self._wake_out.close()

    def _step(self) -> bool:
        more = self.step(time.monotonic())
        self._idle.notify(self.session.waiting)
        return more

    def _poll(self, seconds: float) -> None:
        """Wait for messages with the lock released."""
        self._lock.release()
        try:
            ready = self._poller.poll(milliseconds(seconds))
        finally:
            self._lock.acquire()
        if any(descriptor == self._wake_out.fileno() for descriptor, _ in ready):
            self._wake_out.recv(4096)


class AsyncFreelanceWorker(AsyncWorker):
    """A server that clients call directly, without a broker, with an asyncio handler.

    It is used like an `AsyncWorker`, and has the same handlers.  They must not block the event loop, which also answers
    PINGs.  The settings are those of `FreelanceWorker`; `concurrency` is the maximum number of concurrent requests
    (default 64).
    """

    def __init__(
        self,
        endpoint: str,
        handler: AsyncHandler | None = None,
        *,
        bind: str | None = None,
        service: str | bytes = DEFAULT_SERVICE,
        concurrency: int | None = None,
        codec: str | Codec | None = None,
        name: str = "",
        access: Access | None = None,
        insecure: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint = public_endpoint(endpoint)
        self.bind = self.endpoint if bind is None else checked_endpoint(bind)
        self.access = access
        self.insecure = insecure
        super().__init__(service, handler, concurrency=concurrency, codec=codec, name=name, context=context)
        self.broker = self.endpoint

    def copy(self, *, broker: Any = None) -> Self:
        """Return a server with the same handler and settings that has not been started; `broker` is its endpoint."""
        return type(self)(
            self.endpoint if broker is None else broker, self._handler, bind=self.bind if broker is None else None,
            service=self.service, concurrency=self.concurrency, codec=self.codec, name=self.name, access=self.access,
            insecure=self.insecure, context=self._context,
        )  # fmt: skip

    def start(self) -> None:
        """Serve in the running event loop, and return immediately.  Call `stop` and `wait` afterwards.

        Raises `BindError` if it cannot listen, `SettingError` without a handler, `ClosedError` if it was started
        before.
        """
        check_not_importing()
        handler = self._begin_start()
        self._loop = asyncio.get_running_loop()
        try:
            server = _AsyncServer(self, handler, self._loop, self._open_context())
        except BaseException:
            self._end_context()
            raise
        self._connections.append(cast("_AsyncConnection", server))  # it has the methods that `AsyncWorker` uses
        if self._stopping:
            self._leave()


class _AsyncServer(FreelanceServerConnection):
    """A server's socket in an event loop, and the handlers of its requests."""

    def __init__(
        self, worker: AsyncFreelanceWorker, handler: AsyncHandler, loop: asyncio.AbstractEventLoop, context: Context
    ) -> None:
        session = FreelanceServerSession(worker.service, concurrency=worker.concurrency)
        super().__init__(session, worker.endpoint, worker.bind, context, access=worker.access, insecure=worker.insecure)
        self.done = asyncio.Event()
        """Set when the socket is closed and all handlers have ended."""
        self._handler = handler
        self._adapter = worker._adapter
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        for descriptor in self.descriptors:
            loop.add_reader(descriptor, self._turn)
        self._schedule()

    def leave(self) -> None:
        """Take no more requests, and end when those that have begun are finished."""
        if not self.closed:
            self.session.leave()
            self._turn()

    def abort(self) -> None:
        """End immediately: cancel the handlers, and close the socket."""
        if not self.closed:
            self.session.leave()
            self._end()
        for task in list(self._tasks):
            task.cancel()

    def _schedule(self) -> None:
        if self._soon is None and not self.closed:
            self._soon = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Receive, start what has arrived, and send."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self.closed:
            return
        try:
            more = self.step(time.monotonic())
        except zmq.ContextTerminated:
            log.warning("%s: the ZeroMQ context was terminated", self.session.service.decode())
            self._end()
            return
        while (request := self.session.begin()) is not None:
            task = self._loop.create_task(self._handle(request))
            self._tasks.add(task)
            task.add_done_callback(partial(self._task_ended, request))
        if more:
            self._schedule()
        elif self.session.ended:
            self._end()
        elif self.log_at != math.inf and self._timer is None:
            self._timer = self._loop.call_later(self.log_at - time.monotonic(), self._timer_fired)

    def _task_ended(self, request: Request, task: "asyncio.Task[None]") -> None:
        """End `request` if its task did not: it was cancelled before it began, or there is an error in our own code."""
        self._tasks.discard(task)
        if task.cancelled():
            self.session.abandon(request)
        elif (error := task.exception()) is not None:
            self.crashed(request, error)
        else:
            return
        self._schedule()

    def _timer_fired(self) -> None:
        self._timer = None
        self._turn()

    def _end(self) -> None:
        for descriptor in self.descriptors:
            self._loop.remove_reader(descriptor)
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self.close()
        self.done.set()

    async def _handle(self, request: Request) -> None:
        outcome: list[bytes] | Failed
        try:
            with handling(request):
                result = self._handler(self._adapter.argument(request))
                last = await (self._collect(result, request) if isinstance(result, AsyncGenerator) else result)
                outcome = self._adapter.frames(last)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # this is a task
                raise
            outcome = failed(error, request)  # something that the handler awaited was cancelled, not the handler
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, even SystemExit, the server goes on
            outcome = failed(error, request)
        self.session.finish(request, outcome)
        self._schedule()

    async def _collect(self, parts: AsyncGenerator[Any, None], request: Request) -> Any:
        """Keep what an async generator yields for the reply.  Return the `Last` that it yields, or None."""
        try:
            async for part in parts:
                if isinstance(part, Last):
                    return part
                self.session.partial(request, self._adapter.frames(part))
        finally:
            await parts.aclose()
        return None


def freelance_worker(
    worker: Worker | AsyncWorker,
    endpoint: str,
    *,
    bind: str | None = None,
    access: Access | None = None,
    insecure: bool = False,
) -> FreelanceWorker | AsyncFreelanceWorker:
    """Return a server with the handler of `worker`, which has not been started.  `FreelanceWorker` has the settings."""
    kind = AsyncFreelanceWorker if isinstance(worker, AsyncWorker) else FreelanceWorker
    return kind(
        endpoint, worker._handler, bind=bind, service=worker.service, concurrency=worker.concurrency,
        codec=worker.codec, name=worker.name, access=access, insecure=insecure, context=worker._context,
    )  # fmt: skip

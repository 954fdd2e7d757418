"""The asyncio client: any number of requests at once over one connection."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

import zmq

from ..mdp import tracing, wire
from ..mdp.codecs import Codec, Coder
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import ClosedError, RequestTimeout, SettingError, ZmdpError
from ..mdp.transport.sockets import end, own_context
from .arguments import (
    check_plain,
    checked_body,
    checked_endpoints,
    checked_most,
    checked_protocol,
    checked_timeout,
)
from .connection import Connection
from .inbox import Inbox
from .mdclient import MAX_OUTSTANDING
from .pirates import Pirates
from .reply import Reply
from .session import Call, ClientSession, Outcome

DEFAULT_TIMEOUT: Final = 15.0
_DEFAULT: Final[Any] = object()


class AsyncClient:
    """Calls services through a broker, from asyncio.

    `broker` is an endpoint or several; each time the connection is lost the next is tried.  `timeout` (seconds, or None
    for no end) is the default of `request` and `call`: the time in which it must be finished; it travels with the
    request.  `codec` is what `call` uses.  `heartbeat` (seconds) and `liveness` (intervals) say how soon a silent
    broker is left, while a request is outstanding; what is outstanding is then sent again, so a service may see a
    request more than once.  At most `max_outstanding` requests are; more wait for a place.  `context` is the ZeroMQ
    context, needed only for `inproc://` endpoints.

        async with AsyncClient("tcp://127.0.0.1:5555") as client:
            await client.request("echo", b"hello")                  # [b'hello']
            await asyncio.gather(*(client.call("sum", [n, 1]) for n in range(500)))

    It belongs to the event loop in which it is first used.  Cancelling a task that awaits a reply cancels the request,
    at the broker and at the worker.  Everything raised is in `zmdp.mdp.errors`.

    `protocol` is `"X1"` (docs/x1.md), or for brokers that do not speak that, `"0.2"` or `"0.1"`: then each outstanding
    request has a connection of its own, a request is sent once, there are no headers and no options, and silence may be
    the only sign of a failure.  With `envelope`, a 0.2 client works behind a ROUTER–DEALER proxy (X1 and 0.1 always
    do): its messages begin with an empty frame.
    """

    def __init__(
        self,
        broker: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        protocol: str = "X1",
        envelope: bool = False,
        codec: str | Codec = "json",
        heartbeat: float = 1.0,
        liveness: int = 5,
        max_outstanding: int = MAX_OUTSTANDING,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        endpoints = checked_endpoints(broker)
        self.protocol = checked_protocol(protocol)
        self._timeout = None if timeout is None else checked_timeout(timeout)
        self._coder = Coder(codec)
        self._max_outstanding = checked_most(max_outstanding)
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._own_context = context is None
        self._context = own_context() if context is None else context
        self._watched: zmq.Socket[bytes] | None = None
        """The socket whose descriptors the event loop watches."""
        self._descriptors: tuple[int, int] = (-1, -1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_is_due = False
        """`_flush` will be called in this turn of the event loop or in the next."""
        self._step_again = False
        """There is more to receive."""
        self._places: deque[asyncio.Future[None]] = deque()
        """Those who wait because `max_outstanding` requests are outstanding."""
        self._pirates: Pirates | None = None
        try:
            self._session = ClientSession(heartbeat=heartbeat, liveness=liveness)
            if protocol == "X1":
                self._connection = Connection(self._session, endpoints, self._context, self._deliver)
                self._connection.before_drop = self._unwatch
            else:
                self._pirates = Pirates(endpoints, self._context, protocol, max_outstanding, envelope=envelope)
        except BaseException:
            if self._own_context:
                end(self._context)
            raise

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def request(
        self,
        service: str | bytes,
        *frames: bytes,
        timeout: float | None = _DEFAULT,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Call `service` with `frames` (none: one empty frame) and return the frames of its reply.

        If the service streams, they are the frames of all PARTIALs, then those of the FINAL.  `timeout` (seconds, None
        for no end) is the request's deadline, which travels with it as its ttl.  Without `wait` it fails at once if
        nobody offers the service.  `headers` reach the handler; `options` are the service's own (docs/x1.md).

        Raises `RequestTimeout` (a `TimeoutError`), `BrokerUnreachable`, `ServiceNotFound`, `ServiceError` if the
        handler failed, `RetryLater`, `WorkerLost`, `RequestRejected`, `SettingError` for arguments that cannot be sent.
        """
        name, body = wire.service_name(service), checked_body(frames)
        limit = self._timeout if timeout is _DEFAULT else None if timeout is None else checked_timeout(timeout)
        if self._pirates is not None:
            self._check_open()
            check_plain(wait, headers, options)
            return await self._pirates.request(name, body, limit)
        headers, finish = tracing.calling(name.decode(), headers)
        call: Call | None = None
        try:
            loop = self._check_open()
            session = self._session
            if session.outstanding >= self._max_outstanding:
                limit = await self._await_place(name, limit)
            future: asyncio.Future[Reply] = loop.create_future()
            call = session.request(
                name, body, monotonic(), timeout=limit, wait=wait, headers=headers, options=options, taker=future
            )
            self._send()
            if future.done():
                await asyncio.sleep(0)  # a caller that always finds its reply there must not keep all others waiting
            reply = await future
        except BaseException as error:
            if call is not None:
                self._cancel(call)
            finish(error)
            raise
        if finish is not tracing.untraced:
            finish(None)
        return reply

    async def stream(
        self,
        service: str | bytes,
        *frames: bytes,
        timeout: float | None = None,
        deadline: float | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """Call `service` and yield the frames of each PARTIAL as it comes, then those of the FINAL.

        The request is sent when the first part is asked for; closing the generator early cancels it.  `timeout`
        (seconds) is how long nothing may come; `deadline` (seconds) is the time for the whole of it, as its ttl.  By
        default there is neither: a stream lasts as long as it lasts.  It is only sent again while no part has come.

        Raises `StreamInterrupted` for what goes wrong after a part, else as `request`.
        """
        name, body = wire.service_name(service), checked_body(frames)
        for seconds in (timeout, deadline):
            if seconds is not None:
                checked_timeout(seconds)
        if self._pirates is not None:
            self._check_open()
            check_plain(wait, headers, options, deadline)
            async with aclosing(self._pirates.stream(name, body, timeout)) as parts:
                async for part in parts:
                    yield part
            return
        headers, finish = tracing.calling(name.decode(), headers)
        inbox = _Inbox()
        call: Call | None = None
        try:
            self._check_open()
            if self._session.outstanding >= self._max_outstanding:
                deadline = await self._await_place(name, deadline, timeout)
            call = self._session.request(
                name, body, monotonic(), timeout=deadline, silence=timeout, stream=True, wait=wait, headers=headers,
                options=options, taker=inbox,
            )  # fmt: skip
            self._send()
            while True:
                part = await inbox.get()
                yield part
                if part.final:
                    break
        except BaseException as error:
            if call is not None:
                self._cancel(call)
            finish(error if isinstance(error, ZmdpError) else None)
            raise
        finish(None)

    async def call(
        self, service: str | bytes, value: Any = None, *, codec: str | Codec | None = None, **settings: Any
    ) -> Any:
        """Call `service` with a value and return the value it replies with.

        Both are encoded by `codec` (default: the client's, which is `json`), which the worker must use as well.  What
        the service streams before its FINAL is left out: see `call_stream`.  `settings` are those of `request`.

        Raises `CodecError` for what cannot be encoded or decoded, else as `request`.
        """
        coder = self._coder if codec is None else Coder(codec)
        reply = await self.request(service, *coder.encode(value), **settings)
        return coder.decode(reply[reply.collected :])

    async def call_stream(
        self, service: str | bytes, value: Any = None, *, codec: str | Codec | None = None, **settings: Any
    ) -> AsyncGenerator[Any, None]:
        """Call `service` with a value and yield each value as it comes; that of the FINAL unless it is None.

        `settings` are those of `stream`.  Raises as `call` and `stream`.
        """
        coder = self._coder if codec is None else Coder(codec)
        parts = self.stream(service, *coder.encode(value), **settings)
        try:
            async for part in parts:
                decoded = coder.decode(part)
                if decoded is not None or not part.final:
                    yield decoded
        finally:
            await parts.aclose()

    async def available(self, service: str | bytes, *, timeout: float | None = _DEFAULT) -> bool:
        """Whether at least one worker offers `service` now (`mmi.service`).  Raises as `request`."""
        return await self.request("mmi.service", wire.service_name(service), timeout=timeout) == [b"200"]

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _await_place(self, service: bytes, timeout: float | None, silence: float | None = None) -> float | None:
        """Wait until one more request may be outstanding, and return what is left of its `timeout`."""
        limit = timeout or silence
        began = monotonic()
        try:
            async with asyncio.timeout(limit):
                while self._session.outstanding >= self._max_outstanding:
                    await self._next_place()
                    self._check_open()
        except TimeoutError:
            text = f"{self._max_outstanding} requests were outstanding for {limit:g} s: see max_outstanding"
            raise RequestTimeout(text, service=service.decode()) from None
        return None if timeout is None else max(began + timeout - monotonic(), 0.001)

    async def _next_place(self) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places.append(place)
        try:
            await place
        except BaseException:
            if place.cancelled() or not place.done():
                with suppress(ValueError):
                    self._places.remove(place)
            else:  # it was given to this one, which does not want it any more
                self._give_places()
            raise

    def _give_places(self) -> None:
        free = self._max_outstanding - self._session.outstanding
        while self._places and free > 0:
            place = self._places.popleft()
            if not place.done():
                place.set_result(None)
                free -= 1

    def _cancel(self, call: Call) -> None:
        if not call.ended:
            self._session.cancel(call)
            if not self._closed:
                self._flush_soon()

    def _check_open(self) -> asyncio.AbstractEventLoop:
        """The running event loop, which is this client's."""
        if self._closed:
            raise ClosedError("this client was closed")
        if os.getpid() != self._process:
            raise ClosedError("this client belongs to the process that made it: make one after fork()")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise SettingError("this client belongs to another event loop: make one in each asyncio.run()")
            self._loop = loop
        return loop

    def _send(self) -> None:
        """Send a new request: at once if it is the only one, else at the end of this turn of the event loop.

        What a turn brings then goes out as one message.
        """
        if self._flush_is_due:
            return
        if self._session.outstanding == 1:
            self._step()
        else:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_is_due and self._loop is not None:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._session.unsent or self._step_again or self._session.lost is not None:
            self._step()

    def _ring(self) -> None:
        """The monitor's descriptor is readable: the connection may have ended."""
        self._connection.rung = True
        self._step()

    def _step(self) -> None:
        if self._closed or self._loop is None:
            return
        connection, session = self._connection, self._session
        self._step_again = connection.step(monotonic())
        if self._step_again:
            self._flush_soon()
        if self._watched is not connection.socket or self._watched is None:
            self._watch()
        if self._places:
            self._give_places()
        due = session.deadline()
        if due is not None and (self._timer is None or due < self._timer_at):
            self._set_timer(due)

    def _deliver(self, events: list[tuple[Call, Outcome]]) -> None:
        for call, outcome in events:
            taker = call.taker
            if call.stream:
                taker.put(outcome)
            elif not taker.done():
                if isinstance(outcome, Reply):
                    taker.set_result(outcome)
                else:
                    taker.set_exception(outcome)
        # Called after the tasks that this wakes, and in the same turn: what they ask for goes out without another turn.
        if (self._session.outstanding or len(events) > 1) and not self._closed:
            self._flush_soon()

    def _set_timer(self, due: float) -> None:
        """Step again when something is due.  A timer that rings too early does no harm, so it is seldom set."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer_at = due
            self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._due)

    def _due(self) -> None:
        self._timer = None
        self._step()

    def _watch(self) -> None:
        """Watch the connection's present sockets."""
        self._unwatch()
        socket, monitor, loop = self._connection.socket, self._connection.monitor, self._loop
        if socket is not None and monitor is not None and loop is not None:
            self._watched = socket
            self._descriptors = int(socket.get(zmq.FD)), int(monitor.get(zmq.FD))
            loop.add_reader(self._descriptors[0], self._step)
            loop.add_reader(self._descriptors[1], self._ring)
            self._step_again = True  # the descriptors report changes only
            self._flush_soon()

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None and self._loop is not None and not self._loop.is_closed():
            for descriptor in self._descriptors:
                self._loop.remove_reader(descriptor)

    async def close(self) -> None:
        """Cancel what is outstanding and close the connection.  Harmless when repeated."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self._pirates is not None:
            self._pirates.close()
        else:
            self._session.close(_closed)
            if self._loop is not None and self._loop.is_closed():
                self._session.events.clear()  # nobody waits any more
            self._connection.close(monotonic())
            if self._timer is not None:
                self._timer.cancel()
            for place in self._places:
                if not place.done() and not place.get_loop().is_closed():
                    place.set_result(None)
        if self._own_context:
            await asyncio.to_thread(end, self._context)  # it waits until the last messages are out

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _Inbox(Inbox):
    """An inbox that can be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, outcome: Outcome) -> None:
        self.add(outcome)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Reply:
        while not self:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take()


def _closed() -> ZmdpError:
    return ClosedError("this client was closed")

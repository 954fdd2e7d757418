"""X1 for asyncio: any number of requests at once over one connection, whose descriptors the event loop watches."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from ..mdp import tracing
from ..mdp.errors import ClosedError, RequestTimeout, ZmdpError
from ..mdp.transport.polling import add_reader, remove_reader
from .call import Call, Outcome
from .connection import ClientConnection
from .inbox import Inbox
from .reply import Reply
from .retry import Retry
from .session import ClientSession
from .settings import ConnectionSettings


class Receiver(Protocol):
    """Gets what a request made with `begin` results in."""

    def put(self, outcome: Outcome) -> None:
        """Take a part, the reply (a `Reply` whose `final` is true) or the error.  Nothing follows the last two."""


class X1AsyncDialog:
    """Requests over X1, made by the tasks of one event loop."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._session = ClientSession(settings.endpoints, heartbeat=settings.heartbeat, liveness=settings.liveness)
        self._connection = ClientConnection(self._session, settings.context, self._deliver, settings.keys)
        self._connection.before_drop = self._unwatch
        self.max_outstanding = settings.max_outstanding
        """Maximum number of outstanding requests; `begin` exceeds it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._watched = -1
        """The connection's `changes` when the event loop began to watch its descriptors; -1 if it does not."""
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_is_due = False
        """`_flush` will be called in this turn of the event loop or in the next."""
        self._step_again = False
        """There is more to receive."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Requests that wait because `max_outstanding` others are outstanding."""
        self._granted: set[asyncio.Future[None]] = set()
        """Those whose turn it is, and whose tasks are about to begin them: nobody may overtake them."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._connection.endpoint

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def request(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""
        finish: tracing.Finish = tracing.untraced
        if tracing.concerns_calls():
            headers, finish = tracing.calling(service.decode(), headers, timeout)
        call: Call | None = None
        try:
            while (call := self.start(service, body, timeout, wait, headers, options, retry)) is None:
                timeout = await self._await_slot(service, timeout)  # then it begins, before any other task runs
            if call.receiver.done():
                await asyncio.sleep(0)
            reply: Reply = await call.receiver
        except BaseException as error:
            if call is not None:
                self.cancel(call)
            finish(error)
            raise
        finish(None)
        return reply

    def start(
        self,
        service: bytes,
        body: Sequence[bytes],
        timeout: float | None,
        wait: bool,
        headers: Mapping[str, str] | None,
        options: Mapping[str, Any] | None,
        retry: Retry | None,
    ) -> Call | None:
        """Send a request, and return it; its `receiver` is the future of the reply.  Return None if it has to wait for
        others to end: then `request` does.

        If the reply is already there, the caller must let other tasks run, since awaiting it would not.  A caller that
        stops waiting has to `cancel` the request.
        """
        loop = self.open()
        session = self._session
        if session.outstanding + len(self._granted) >= self.max_outstanding:
            return None
        call = session.request(
            service, body, monotonic(), timeout=timeout, wait=wait, headers=headers, options=options, retry=retry,
            receiver=asyncio.Future(loop=loop),
        )  # fmt: skip
        self._send()
        return call

    async def stream(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        deadline: float | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """Send a request and yield each part of the reply as it arrives.  Raises the request's error."""
        headers, finish = tracing.calling(service.decode(), headers, deadline)
        inbox = _AsyncInbox()
        call: Call | None = None
        try:
            self.open()
            if self._session.outstanding + len(self._granted) >= self.max_outstanding:
                deadline = await self._await_slot(service, deadline, timeout)
            call = self._session.request(
                service, body, monotonic(), timeout=deadline, silence=timeout, stream=True, wait=wait, headers=headers,
                options=options, retry=retry, receiver=inbox,
            )  # fmt: skip
            self._send()
            while True:
                part = await inbox.get()
                yield part
                if part.final:
                    break
        except BaseException as error:
            if call is not None:
                self.cancel(call)
            finish(error if isinstance(error, ZmdpError) else None)
            raise
        finish(None)

    def begin(
        self,
        receiver: Receiver,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
        stream: bool = True,
    ) -> Call:
        """Send a request, however many others are outstanding, and return it.  `receiver` gets each outcome: each part
        if it is a `stream`, otherwise the whole reply.
        """
        self.open()
        call = self._session.request(
            service, body, monotonic(), timeout=timeout, stream=stream, wait=wait, headers=headers, options=options,
            retry=retry, receiver=receiver,
        )  # fmt: skip
        self._flush_soon()  # callers that have no task of their own begin many requests in one turn
        return call

    def cancel(self, call: Call) -> None:
        """Cancel a request, unless it has ended.  Its receiver gets nothing more."""
        call.receiver = None
        if not call.ended:
            self._session.cancel(call)
            if not self._closed:
                self._grant_slots()
                self._flush_soon()

    async def _await_slot(self, service: bytes, timeout: float | None, silence: float | None = None) -> float | None:
        """Wait until another request may be outstanding, and return what is left of its `timeout`."""
        limit = timeout or silence
        began = monotonic()
        try:
            async with asyncio.timeout(limit):
                while self._session.outstanding + len(self._granted) >= self.max_outstanding:
                    await self._take_slot()
                    self.open()
        except TimeoutError:
            text = (
                f"the request to service {service.decode()!r} was not sent: {self.max_outstanding} others "
                f"(max_outstanding) were outstanding for {limit:g} s"
            )
            raise RequestTimeout(text, service=service.decode()) from None
        return None if timeout is None else max(began + timeout - monotonic(), 0.001)

    async def _take_slot(self) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await slot
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove(slot)
            self._granted.discard(slot)
            self._grant_slots()  # it may have been this request's turn
            raise
        self._granted.discard(slot)

    def _grant_slots(self) -> None:
        free = self.max_outstanding - self._session.outstanding - len(self._granted)
        while self._waiting and free > 0:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                self._granted.add(slot)
                free -= 1

    def open(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, which at first is the running one.  Raises `ClosedError`."""
        if self._closed:
            raise ClosedError("this client was closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        """Send a new request: immediately if it is the only one, otherwise at the end of this turn of the event loop.

        All requests of a turn then go out as one message.
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
        if self._step_again or self._connection.unsent:
            self._step()

    def _monitor_reported(self) -> None:
        """The monitor's descriptor is readable: the connection may have ended."""
        self._connection.monitor_reported = True
        self._step()

    def _step(self) -> None:
        if self._closed or self._loop is None:
            return
        connection, session = self._connection, self._session
        self._step_again = connection.step(monotonic())
        if self._step_again:
            self._flush_soon()
        if self._watched != connection.changes:
            self._watch()
        if self._waiting:
            self._grant_slots()
        due = session.deadline()
        if due is not None and (self._timer is None or due < self._timer_at):
            self._set_timer(due)

    def _deliver(self, events: list[tuple[Call, Outcome]]) -> None:
        delivered = events[:]
        events.clear()  # none again, even if a receiver raises SystemExit
        for call, outcome in delivered:
            receiver = call.receiver
            if receiver is None:
                continue  # it was cancelled by another receiver, a moment ago
            if type(receiver) is not asyncio.Future:
                if call.ended and (not isinstance(outcome, Reply) or outcome.final):
                    call.receiver = None  # which may refer to the call: bodies must not wait for the garbage collector
                self._put(receiver, outcome)
            elif not receiver.done():
                if isinstance(outcome, Reply):
                    receiver.set_result(outcome)
                else:
                    receiver.set_exception(outcome)
        # Called after the tasks that this wakes, and in the same turn: their next requests go out without another turn.
        if (self._session.outstanding or len(delivered) > 1) and not self._closed:
            self._flush_soon()

    def _put(self, receiver: Receiver, outcome: Outcome) -> None:
        try:
            receiver.put(outcome)
        except Exception as error:  # noqa: BLE001 - it must not keep the others from getting their outcomes
            context = {"message": f"{receiver!r} raised an exception", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _set_timer(self, due: float) -> None:
        """Step again at the time `due`.  A timer that fires too early is harmless, so it is rarely replaced."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer_at = due
            self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._step()

    def _watch(self) -> None:
        """Watch the connection's current sockets."""
        self._unwatch()
        loop = self._loop
        if loop is None:
            return
        self._watched = self._connection.changes
        descriptor, monitor, others = self._connection.descriptors()
        self._descriptors = [each for each in (descriptor, monitor, *others) if each >= 0]
        for each in self._descriptors:
            add_reader(loop, each, self._monitor_reported if each == monitor else self._step)
        if self._descriptors:
            self._step_again = True  # the descriptors report changes only
            self._flush_soon()

    def _unwatch(self) -> None:
        self._watched = -1
        descriptors, self._descriptors = self._descriptors, []
        if descriptors and self._loop is not None and not self._loop.is_closed():
            for each in descriptors:
                remove_reader(self._loop, each)

    def close(self) -> None:
        """Cancel every outstanding request and close the connection."""
        self._closed = True
        self._session.close(_closed_error)
        if self._loop is not None and self._loop.is_closed():
            self._session.take_events()  # no task is waiting for them
        self._connection.close(monotonic())
        if self._timer is not None:
            self._timer.cancel()
        for slot in self._waiting:
            if not slot.done() and not slot.get_loop().is_closed():
                slot.set_result(None)


class _AsyncInbox(Inbox):
    """An inbox that a task can await."""

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


def _closed_error() -> ZmdpError:
    return ClosedError("this client was closed")

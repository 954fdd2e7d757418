"""X1 in an event loop: any number of requests at once over one connection, whose descriptors the loop watches."""

import asyncio
import logging
from asyncio import Future
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import zmq

from ...mdp.errors import ClosedError
from ...mdp.transport.polling import add_reader, remove_reader
from ..calls.ask import Ask, Receiver, deliver
from ..calls.reply import Outcome, Reply
from ..calls.retry import Retry
from ..calls.settings import ConnectionSettings
from ..x1.broker_connection import Call
from .client_connection import ClientConnection
from .session import ClientSession

log = logging.getLogger("zmdp.client")


class X1Dialog:
    """Requests over X1, made in one event loop: see `Dialog`."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._session = ClientSession(
            settings.endpoints,
            heartbeat=settings.heartbeat,
            liveness=settings.liveness,
            max_outstanding=settings.max_outstanding,
        )
        self._connection = ClientConnection(self._session, settings.context, self._deliver, settings.keys)
        self._connection.before_drop = self._unwatch
        self.max_outstanding = settings.max_outstanding
        """Maximum number of outstanding requests; others wait until some have ended."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop, once it is known."""
        self._closed = ""
        """Why the dialog can no longer be used."""
        self._watched = -1
        """The connection's `changes` when the event loop began to watch its descriptors; -1 if it does not."""
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_is_due = False
        """`_flush` will be called in this turn of the event loop or in the next."""
        self._step_again = False
        """There is more to receive."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._connection.endpoint

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, receiver: "Receiver | asyncio.Future[Any]", ask: Ask, options: bytes) -> Call:
        """Send a request and return it: at the end of this turn of the event loop, with all others of the turn.

        If it is the only one, it is sent immediately.
        """
        self.open()
        session = self._session
        call = session.request(
            ask.service, ask.body, monotonic(), timeout=ask.timeout, silence=ask.silence, stream=ask.stream,
            options=options, retry=ask.retry, receiver=receiver,
        )  # fmt: skip
        if not self._flush_is_due:
            if session.outstanding == 1:
                self._exchange(self._connection.exchange)
            else:
                self._flush_soon()
        return call

    def begin_row(
        self, row: Receiver, service: bytes, body: bytes, timeout: float, options: bytes, retry: Retry | None
    ) -> Call:
        """Do the same for `clients/rows`, which knows no `Ask`."""
        return self.begin(row, Ask(service, (body,), timeout, retry=retry), options)

    def cancel(self, call: Call) -> None:
        """Cancel a request, unless it has ended.  Its receiver gets nothing more."""
        call.receiver = None
        if not call.ended:
            self._session.cancel(call)
            self._flush_soon()

    def open(self) -> None:
        """Belong to the running event loop from now on.  Raises `ClosedError`."""
        if self._closed:
            raise ClosedError(self._closed)
        if self.loop is None:
            self.loop = asyncio.get_running_loop()

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _flush_soon(self) -> None:
        if not self._flush_is_due and self.loop is not None and not self._closed:
            self._flush_is_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the commands of this turn of the event loop."""
        self._flush_is_due = False
        if self._step_again or self._connection.unsent:
            self._step()

    def _monitor_reported(self) -> None:
        """The monitor's descriptor is readable: the connection may have ended."""
        self._connection.monitor_reported = True
        self._step()

    def _step(self) -> None:
        self._exchange(self._connection.step)

    def _exchange(self, step: Callable[[float], bool]) -> None:
        """Call `step` or `exchange` of the connection, and plan the next step."""
        if self._closed or self.loop is None:
            return
        connection, session = self._connection, self._session
        try:
            self._step_again = step(monotonic()) or bool(session.events)
        except Exception as error:
            if not isinstance(error, zmq.ContextTerminated):
                log.exception("the client's connection failed")
            self._end(f"the client's connection failed: {error}")
            return
        if self._step_again:
            self._flush_soon()
        if self._watched != connection.changes:
            self._watch()
        due = session.deadline()
        if due is not None and (self._timer is None or due < self._timer_at):
            self._set_timer(due)

    def _deliver(self, events: list[tuple[Call, Outcome]]) -> None:
        delivered = events[:]
        events.clear()  # so that none is delivered twice, even if a receiver raises SystemExit
        tasks = False
        for call, outcome in delivered:
            receiver = call.receiver
            tasks |= type(receiver) is Future
            if receiver is None:
                continue  # another receiver has just cancelled it
            if call.ended and (not isinstance(outcome, Reply) or outcome.final):
                call.receiver = None  # it may refer to the call: bodies must not wait for the garbage collector
            deliver(receiver, outcome)
        # Called after the tasks that this wakes, and in the same turn: their next requests go out without another turn.
        if tasks and (self._session.outstanding or len(delivered) > 1):
            self._flush_soon()

    def _set_timer(self, due: float) -> None:
        """Step again at the time `due`.  A timer that fires too early is harmless, so it is rarely replaced."""
        if self._timer is not None:
            self._timer.cancel()
        if self.loop is not None:
            self._timer_at = due
            self._timer = self.loop.call_later(max(0.0, due - monotonic()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._step()

    def _watch(self) -> None:
        """Watch the connection's current sockets."""
        self._unwatch()
        loop = self.loop
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
        if descriptors and self.loop is not None and not self.loop.is_closed():
            for each in descriptors:
                remove_reader(self.loop, each)

    def close(self) -> None:
        """Cancel every outstanding request and close the connection."""
        if not self._closed:
            self._end("this client was closed")

    def _end(self, reason: str) -> None:
        self._closed = reason
        self._session.close(partial(ClosedError, reason))
        if self.loop is not None and self.loop.is_closed():
            self._session.take_events()  # no task is waiting for them
        self._connection.close(monotonic())
        if self._timer is not None:
            self._timer.cancel()

"""MDP/0.2 and 0.1 in an event loop: each outstanding request has a connection of its own (C4)."""

import asyncio
import math
import time
from typing import Any, Final

import zmq

from ...mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestRejected,
    RequestTimeout,
    ServiceError,
    StreamInterrupted,
    ZmdpError,
)
from ...mdp.transport.failover import Failover
from ...mdp.transport.multipart import receive, send
from ...mdp.transport.polling import add_reader, remove_reader
from ...mdp.transport.reach import why_unreachable
from ...mdp.transport.sockets import dealer
from ...mdp.wire import Message
from ..calls.arguments import check_legacy
from ..calls.ask import Ask, Receiver, deliver
from ..calls.reply import Outcome, Reply, closed_error
from ..calls.settings import ConnectionSettings
from .session import LegacySession, Resend

MAX_CONNECTIONS: Final = 500
"""A ZeroMQ context has 1023 sockets, and many processes may open only 1024 files; a socket takes two."""
LINGER_MS: Final = 100
"""How long the last requests may take to leave after the client is closed."""


class LegacyCall:
    """One request, from when it is made until its FINAL."""

    __slots__ = ("receiver", "task")

    task: "asyncio.Task[None]"
    """Sends the request and receives its reply."""

    def __init__(self, receiver: Any) -> None:
        self.receiver = receiver
        """Gets the outcomes; None once no more are delivered."""

    def put(self, outcome: Outcome) -> None:
        """Deliver an outcome."""
        receiver = self.receiver
        if receiver is not None:
            if not isinstance(outcome, Reply) or outcome.final:
                self.receiver = None
            deliver(receiver, outcome)


class LegacyDialog:
    """Requests over MDP/0.2 or 0.1, made in one event loop: see `Dialog`.  Idle connections are kept for later ones.

    A legacy broker does not report failures, so silence is the only sign of one.  After each silence the request, or
    the next request if all tries were used, goes to the next broker, as `Failover` says.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._failover = Failover(settings.endpoints)
        self._failovers = 0
        """Number of failovers.  A connection that was opened before the last one leads to a broker no longer in use."""
        self._answered = False
        """The broker in use has replied since the last failover."""
        self._idle: list[zmq.Socket[bytes]] = []
        self._busy: dict[zmq.Socket[bytes], asyncio.Event] = {}
        """The connections with an outstanding request, and the event that something has arrived there."""
        self._calls: set[LegacyCall] = set()
        """The requests whose tasks have not ended."""
        self._diagnoses: dict[str, asyncio.Future[str | None]] = {}
        """Running diagnoses of endpoints that do not answer."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop, once it is known."""
        self._closed = False
        self._connections = asyncio.Semaphore(min(settings.max_outstanding, MAX_CONNECTIONS))
        self._idle.append(self._open(self.endpoint))  # raises SettingError if that is impossible

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._failover.endpoint

    def begin(self, receiver: "Receiver | asyncio.Future[Any]", ask: Ask, options: bytes) -> LegacyCall:
        """Begin a request and return it.  With a timeout, it is sent only once."""
        timeout = ask.timeout
        check_legacy(options, ask.retry, ask.stream and timeout)
        if self._closed:
            raise closed_error()
        self.loop = asyncio.get_running_loop()
        session = LegacySession(self._settings.protocol, envelope=self._settings.envelope)
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        limit = ask.silence if timeout is None else timeout
        session.request(
            ask.service, ask.body, now, timeout=math.inf if limit is None else limit, retries=ask.retries,
            stream=ask.stream, deadline=deadline,
        )  # fmt: skip
        call = LegacyCall(receiver)
        self._calls.add(call)
        call.task = self.loop.create_task(self._perform(call, session, limit))
        return call

    def cancel(self, call: LegacyCall) -> None:
        """Abandon a request.  Its receiver gets nothing more."""
        call.receiver = None
        call.task.cancel()

    async def _perform(self, call: LegacyCall, session: LegacySession, limit: float | None) -> None:
        """Make a request, and deliver its outcomes."""
        endpoint, failovers = self.endpoint, self._failovers
        try:
            try:
                async with asyncio.timeout(limit):
                    await self._connections.acquire()
            except TimeoutError:
                error = await self._error(session, endpoint, failovers)
                raise error if isinstance(error, BrokerUnreachable) else _not_sent(error.service, limit) from None
            try:
                while not await self._try(call, session):
                    pass
            finally:
                self._connections.release()
        except asyncio.CancelledError:
            call.put(closed_error())
            raise
        except ZmdpError as error:
            call.put(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - its caller must not wait for ever
            call.put(ClosedError(f"the client's connection failed: {type(error).__name__}: {error}"))
        finally:
            self._calls.discard(call)

    async def _try(self, call: LegacyCall, session: LegacySession) -> bool:
        """Send the session's request over a connection, and deliver its replies.

        Return False if it has to be sent again, to the next broker (C5).
        """
        if self._closed:
            raise closed_error()
        endpoint, failovers = self.endpoint, self._failovers
        socket = self._take_idle() or self._open(endpoint)
        arrived = self._busy[socket] = asyncio.Event()
        descriptor = int(socket.get(zmq.FD))
        add_reader(asyncio.get_running_loop(), descriptor, arrived.set)
        finished = False
        try:
            for message in session.take_messages():
                send(socket, message)
            while not finished:
                received = await self._receive(socket, arrived, session.deadline())
                if received is None:
                    session.tick(time.monotonic())
                else:
                    session.receive(received, time.monotonic())
                for event in session.take_events():
                    if isinstance(event, Resend):
                        self._fail_over(failovers)
                        return False
                    if isinstance(event, RequestRejected):
                        raise event
                    if not isinstance(event, Reply):
                        raise await self._error(session, endpoint, failovers)
                    in_use = failovers == self._failovers
                    self._answered |= in_use
                    if event.final:
                        finished = True
                        self._release(socket, descriptor, keep=in_use)
                    call.put(event if event.failure is None else ServiceError(*event.failure, service=event.service))
        finally:
            if not finished:  # a reply to this request may still arrive: the next one must not take it for its own
                self._release(socket, descriptor, keep=False)
        return True

    def _take_idle(self) -> zmq.Socket[bytes] | None:
        """Return an idle connection, after discarding late messages (C3); None if there is none."""
        if not self._idle:
            return None
        socket = self._idle.pop()
        while receive(socket) is not None:
            pass
        return socket

    async def _receive(self, socket: zmq.Socket[bytes], arrived: asyncio.Event, until: float | None) -> Message | None:
        """Return the next message, or None if none arrives before the time `until`."""
        late = False
        while True:
            if self._closed:
                raise closed_error()
            arrived.clear()  # before receiving, because the descriptor reports changes only
            message = receive(socket)
            if message is not None or late:
                return message
            try:
                async with asyncio.timeout(None if until is None else until - time.monotonic()):
                    await arrived.wait()
            except TimeoutError:
                late = True  # look once more: the event loop may have been blocked since a reply arrived

    async def _error(self, session: LegacySession, endpoint: str, failovers: int) -> RequestTimeout | StreamInterrupted:
        """Fail over from `endpoint`, and return the error of a request that got no reply there."""
        self._fail_over(failovers)
        if session.streamed:
            return session.error(endpoint, None)
        diagnosis = self._diagnoses.get(endpoint)
        if diagnosis is None:  # one for all requests that have timed out
            diagnosis = asyncio.ensure_future(asyncio.to_thread(why_unreachable, endpoint, self._settings.keys))
            self._diagnoses[endpoint] = diagnosis
            diagnosis.add_done_callback(lambda _: self._diagnoses.pop(endpoint, None))
        return session.error(endpoint, await asyncio.shield(diagnosis))

    def _fail_over(self, failovers: int) -> None:
        """Make the next request go to the next broker, unless another request has already done so."""
        if failovers == self._failovers and self._failover.several:
            self._failovers += 1
            self._failover.lost("", time.monotonic(), of_use=self._answered)
            self._answered = False
            self._close_idle()

    def _close_idle(self) -> None:
        for socket in self._idle:
            socket.close(0)
        self._idle.clear()

    def _open(self, endpoint: str) -> zmq.Socket[bytes]:
        return dealer(self._settings.context, endpoint, {zmq.LINGER: 0}, keys=self._settings.keys)

    def _release(self, socket: zmq.Socket[bytes], descriptor: int, *, keep: bool) -> None:
        if self._busy.pop(socket, None) is None:
            return  # `close` has closed it
        remove_reader(asyncio.get_running_loop(), descriptor)
        if keep:
            self._idle.append(socket)
        else:
            socket.close(0)

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connections."""
        self._closed = True
        self._close_idle()
        busy, self._busy = self._busy, {}
        loop = None if self.loop is None or self.loop.is_closed() else self.loop
        for socket in busy:
            if loop is not None:
                remove_reader(loop, int(socket.get(zmq.FD)))
            socket.close(LINGER_MS)
        if loop is not None:
            for call in [*self._calls]:
                call.put(closed_error())
                call.task.cancel()


def _not_sent(service: str, seconds: float | None) -> RequestTimeout:
    text = f"the request to service {service!r} was not sent: all connections were in use for {seconds:g} s"
    return RequestTimeout(text, service=service)

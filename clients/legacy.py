"""MDP/0.2 and 0.1 for threads: one request at a time, sent again over a new connection after a silence (C4, C5)."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from ..mdp.errors import BusyError, ClosedError, RequestRejected, RequestTimeout, ServiceError, SettingError
from ..mdp.transport.multipart import milliseconds, receive, send
from ..mdp.transport.reach import why_unreachable
from ..mdp.transport.sockets import dealer
from ..mdp.wire import Message
from .arguments import check_legacy
from .dialog import Ask
from .legacy_session import LegacySession, Resend
from .reply import Reply
from .settings import ConnectionSettings


class LegacyDialog:
    """Requests over MDP/0.2 or 0.1: one at a time, and not from several threads at once.

    A legacy broker does not report failures, so silence is the only sign of one.  After each silence the request, or
    the next request if all attempts were used, goes to the next broker, as `Endpoints` says.
    """

    def __init__(self, settings: ConnectionSettings, *, linger: float) -> None:
        self._endpoints = settings.endpoints
        self._linger = linger
        self._keys = settings.keys
        self._session = LegacySession(settings.protocol, envelope=settings.envelope)
        self._context = settings.context
        self._socket: zmq.Socket[bytes] | None = None
        self._answered = False
        """The broker in use has replied since the last failover."""
        self._busy = False
        self._outstanding = 0
        """Requests made with `send` whose FINAL has not been received."""
        self._last_service = ""
        self._closed = False
        for endpoint in self._endpoints.all:  # raises SettingError if one is invalid
            dealer(self._context, endpoint, {zmq.LINGER: 0}, keys=self._keys).close(0)
        self._connect()

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._endpoints.current

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, ask: Ask) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""
        check_legacy(ask.wait, ask.headers, ask.options, ask.deadline, ask.retry)
        (reply,) = self._exchange(ask, stream=False)
        return reply

    def stream(self, ask: Ask) -> Generator[Reply, None, None]:
        """Send a request and yield each part of the reply as it arrives.  Raises the request's error."""
        check_legacy(ask.wait, ask.headers, ask.options, ask.deadline, ask.retry)
        return self._exchange(ask, stream=True)

    def submit(self, ask: Ask, convert: Callable[[Reply], Any] | None = None) -> "Future[Any]":
        """Raise `SettingError`: a legacy protocol allows one request at a time."""
        raise SettingError("submit() requires protocol X1: MDP/0.2 and 0.1 do not number requests")

    def _exchange(self, ask: Ask, *, stream: bool) -> Generator[Reply, None, None]:
        """Send a request and yield its replies, the FINAL last."""
        self._check_free()
        self._discard_late()
        self._last_service = ask.service.decode()
        session = self._session
        session.request(
            ask.service, ask.body, time.monotonic(), timeout=ask.timeout, retries=ask.retries, stream=stream
        )
        finished = False
        self._busy = True
        try:
            while not finished:
                until = session.deadline() or math.inf
                for message in session.take_messages():
                    self._send(message, until)
                arrived = self._receive(until)
                if arrived is None:
                    session.tick(time.monotonic())
                else:
                    session.receive(arrived, time.monotonic())
                for event in session.take_events():
                    if isinstance(event, Reply):
                        self._answered = True
                        if event.final:
                            finished, self._busy = True, False
                        _raise_failure(event)
                        yield event
                    elif isinstance(event, Resend):
                        self._disconnect()
                        self._fail_over()
                    elif isinstance(event, RequestRejected):
                        raise event
                    else:
                        reason = None if session.streamed else why_unreachable(self.endpoint, self._keys)
                        error = session.error(self.endpoint, reason)
                        self._fail_over()
                        raise error
        finally:
            if not finished:
                self._busy = False
                # A reply to this request may still arrive; a new connection cannot mistake it for another's.
                self._disconnect()

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: bytes, body: Sequence[bytes], *, timeout: float) -> None:
        """Send a request whose reply `recv` returns.  Raises `RequestTimeout` if it cannot be sent in `timeout`."""
        if self._busy:
            raise BusyError("this client is in the middle of a stream: finish or close it, or use a second client")
        if not self._outstanding:
            self._discard_late()
        self._last_service = service.decode()
        self._send(self._session.encode(service, body), time.monotonic() + timeout)
        self._outstanding += 1

    def recv(self, *, timeout: float) -> Reply:
        """Return the next reply, or part of one, to a request made with `send`."""
        if not self._outstanding:
            raise BusyError("nothing was sent: recv() returns the replies to send()")
        until = time.monotonic() + timeout
        while True:
            message = self._receive(until)
            if message is None:
                count = self._outstanding
                text = f"no reply through {self.endpoint} within {timeout:g} s; outstanding requests: {count}"
                raise RequestTimeout(text, service=self._last_service)
            reply = self._session.decode(message)
            if reply is not None:
                self._answered = True
                self._outstanding -= reply.final
                _raise_failure(reply)
                return reply

    def reset(self) -> None:
        """Abandon every request made with `send`: their replies go to a connection that is closed."""
        self._disconnect()

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _check_free(self) -> None:
        if self._busy:
            raise BusyError("this client is in the middle of another request: use one client for each thread or stream")
        if self._outstanding:
            count = self._outstanding
            raise BusyError(f"replies to send() are outstanding ({count}): receive them with recv(), or call reset()")

    def _discard_late(self) -> None:
        """Discard what has arrived since the last reply: it answers nothing that is outstanding (C3)."""
        while self._socket is not None and receive(self._socket) is not None:
            pass

    def _fail_over(self) -> None:
        """Make the next connection go to the next broker (C5)."""
        self._endpoints.fail_over(answered=self._answered)
        self._answered = False

    def _connect(self) -> zmq.Socket[bytes]:
        # There is no high-water mark: any number of replies to `send` may arrive before `recv` is called.
        self._socket = dealer(self._context, self.endpoint, {zmq.RCVHWM: 0}, keys=self._keys)
        return self._socket

    def _disconnect(self) -> None:
        self._outstanding = 0
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _open(self) -> zmq.Socket[bytes]:
        if self._closed:
            raise ClosedError("this client was closed")
        return self._connect() if self._socket is None else self._socket

    def _send(self, message: Message, until: float) -> None:
        socket = self._open()
        while send(socket, message):
            if not socket.poll(milliseconds(until - time.monotonic()), zmq.POLLOUT) and time.monotonic() >= until:
                text = f"the broker at {self.endpoint} accepts no more requests"
                raise RequestTimeout(text, service=self._last_service)

    def _receive(self, until: float) -> Message | None:
        """Return the next message, or None if none arrives before the time `until`."""
        socket = self._open()
        while True:
            now = time.monotonic()  # before the socket is read: what arrived before `until` is not late
            message = receive(socket)
            if message is not None or now >= until:
                return message
            socket.poll(milliseconds(until - now), zmq.POLLIN)

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        if self._socket is not None:
            # What `send` sent has the client's timeout to leave.
            self._socket.close(round(self._linger * 1000) if self._outstanding else 0)
            self._socket = None


def _raise_failure(reply: Reply) -> None:
    if reply.failure is not None:
        raise ServiceError(*reply.failure, service=reply.service)

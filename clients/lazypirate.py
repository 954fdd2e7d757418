"""The synchronous shell of MDP/0.2 and 0.1: one request at a time, sent again on a new connection (C4, C5)."""

import time
from collections.abc import Generator, Sequence

import zmq

from ..mdp.errors import (
    BrokerUnreachable,
    BusyError,
    ClosedError,
    RequestTimeout,
    ServiceError,
    StreamInterrupted,
)
from ..mdp.limits import Limits
from ..mdp.transport.multipart import milliseconds, receive, send
from ..mdp.transport.reach import why_unreachable
from ..mdp.transport.sockets import dealer
from ..mdp.wire import Message
from .pirate import GiveUp, PirateSession, Resend
from .reply import Reply


class LazyPirate:
    """Requests over MDP/0.2 or 0.1.  One at a time; not for several threads at once."""

    def __init__(
        self,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        protocol: str,
        envelope: bool = False,
        linger: float,
    ) -> None:
        self._endpoints = endpoints
        self._linger = linger
        self._session = PirateSession(protocol, envelope=envelope)
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._turn = 0
        self._busy = False
        self._outstanding = 0
        self._last_service = ""
        self._closed = False
        self._connect()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, service: bytes, body: Sequence[bytes], *, timeout: float, retries: int) -> Reply:
        """Send a request and wait for all of its reply; raises what it fails with."""
        (reply,) = self._dialog(service, body, timeout, retries, False)
        return reply

    def stream(
        self, service: bytes, body: Sequence[bytes], *, timeout: float, retries: int
    ) -> Generator[Reply, None, None]:
        """Send a request and yield each part of its reply as it comes; raises what it fails with."""
        return self._dialog(service, body, timeout, retries, True)

    def _dialog(
        self, service: bytes, body: Sequence[bytes], timeout: float, retries: int, stream: bool
    ) -> Generator[Reply, None, None]:
        """Send a request and yield what comes of it, the FINAL last."""
        self._check_free()
        self._last_service = service.decode()
        session = self._session
        finished = False
        self._busy = True
        try:
            now = time.monotonic()
            message = session.request(service, body, now, timeout=timeout, retries=retries, stream=stream)
            self._send(message, now + timeout)
            while True:
                arrived = self._receive(session.deadline() or now)
                now = time.monotonic()
                reply = session.receive(arrived, now) if arrived is not None else None
                if reply is not None:
                    if reply.final:
                        finished, self._busy = True, False
                    _raise_failure(reply)
                    yield reply
                    if finished:
                        return
                    continue
                step = session.tick(now)
                if isinstance(step, Resend):
                    self._connect()
                    self._send(step.message, now + timeout)
                elif isinstance(step, GiveUp):
                    error = self._gave_up(step, service.decode(), timeout, sum(map(len, body)))
                    self._turn += 1  # the next request tries the next broker
                    raise error
        finally:
            if not finished:
                self._busy = False
                # Replies to this request may still come; on a new connection they cannot be taken for another's.
                self._disconnect()

    def _gave_up(self, step: GiveUp, service: str, timeout: float, size: int) -> Exception:
        endpoint = self._endpoint
        if step.streamed:
            text = f"the stream of service {service!r} stopped: nothing came for {timeout:g} s after a part"
            return StreamInterrupted(text, service=service)
        tries = "1 try" if step.tries == 1 else f"{step.tries} tries"
        if service.startswith("mmi."):
            text = f"the broker at {endpoint} does not answer {service} ({tries}, {timeout:g} s each)"
        else:
            text = f"no reply from service {service!r} through {endpoint} ({tries}, {timeout:g} s each)"
        reason = why_unreachable(endpoint)
        if reason is not None:
            return BrokerUnreachable(f"{text}: {reason}", service=service)
        if size > Limits().max_message // 2:
            text += f"; the request has {size} bytes: is that more than the broker's max_message?"
        return RequestTimeout(text, service=service)

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: bytes, body: Sequence[bytes], timeout: float) -> None:
        """Send a request whose reply `recv` will take."""
        if self._busy:
            raise BusyError("this client is in the middle of a stream: finish or close it, or use a second client")
        self._last_service = service.decode()
        self._send(self._session.encode(service, body), time.monotonic() + timeout)
        self._outstanding += 1

    def recv(self, timeout: float) -> Reply:
        """The next reply, or part of one, to what `send` sent."""
        if not self._outstanding:
            raise BusyError("nothing was sent: recv() takes the replies to send()")
        until = time.monotonic() + timeout
        while True:
            message = self._receive(until)
            if message is None:
                text = f"no reply through {self._endpoint}; {self._outstanding} requests are outstanding"
                raise RequestTimeout(text, service=self._last_service)
            reply = self._session.decode(message)
            if reply is not None:
                self._outstanding -= reply.final
                _raise_failure(reply)
                return reply

    def reset(self) -> None:
        """Forget what is outstanding: replies to earlier `send`s will not be received."""
        self._disconnect()

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _endpoint(self) -> str:
        return self._endpoints[self._turn % len(self._endpoints)]

    def _check_free(self) -> None:
        if self._busy:
            raise BusyError("this client is in the middle of another request: use one client for each thread or stream")
        if self._outstanding:
            raise BusyError(f"{self._outstanding} replies to send() are outstanding: take them with recv(), or reset()")

    def _connect(self) -> zmq.Socket[bytes]:
        """Open a new connection, to the next endpoint if there was one before (C5)."""
        if self._socket is not None:
            self._disconnect()
            self._turn += 1
        # As many replies as were sent for may come before anybody calls `recv`.
        self._socket = dealer(self._context, self._endpoint, {zmq.RCVHWM: 0})
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
                text = f"the broker at {self._endpoint} takes no more requests"
                raise RequestTimeout(text, service=self._last_service)

    def _receive(self, until: float) -> Message | None:
        """The next message, or None if there is none at the time `until`."""
        socket = self._open()
        message = receive(socket)
        while message is None:
            now = time.monotonic()
            if now >= until:
                return None
            if socket.poll(milliseconds(until - now), zmq.POLLIN):
                return receive(socket)
        return message

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        if self._socket is not None:
            # What `send` sent has the client's timeout to get out.
            self._socket.close(round(self._linger * 1000) if self._outstanding else 0)
            self._socket = None


def _raise_failure(reply: Reply) -> None:
    if reply.failure is not None:
        raise ServiceError(*reply.failure, service=reply.service)

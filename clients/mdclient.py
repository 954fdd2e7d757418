"""The synchronous client."""

import math
import socket as sockets
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import zmq

from ..mdp import wire
from ..mdp.errors import (
    BrokerUnreachable,
    BusyError,
    ClosedError,
    RequestTimeout,
    ServiceError,
    SettingError,
    StreamInterrupted,
)
from ..mdp.limits import Limits
from ..mdp.multipart import milliseconds, receive, send
from ..mdp.server import DEFAULT_ENDPOINT
from ..mdp.wire import Message
from .session import ClientSession, GiveUp, Reply, Resend

DEFAULT_TIMEOUT: Final = 5.0
DEFAULT_RETRIES: Final = 2


class Client:
    """Calls services through a broker.

    `broker` is an endpoint or several; with several, each retry goes to the next.  `timeout` (seconds of silence
    before a request is sent again) and `retries` (how often it is) can be given anew with each request.  `protocol`
    is `"0.2"` or `"0.1"`.  `context` is the ZeroMQ context, needed only for `inproc://` endpoints.

        with Client("tcp://127.0.0.1:5555") as client:
            client.request("echo", b"hello")            # [b'hello']

    One request at a time: a client is not for several threads at once.  After any exception it can be used again.
    Everything raised is in `zmdp.mdp.errors`.
    """

    def __init__(
        self,
        broker: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        protocol: str = "0.2",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._endpoints = [broker] if isinstance(broker, str) else list(broker)
        if not self._endpoints:
            raise SettingError("broker is empty: it takes an endpoint such as tcp://127.0.0.1:5555, or several")
        self._timeout = _checked_timeout(timeout)
        self._retries = _checked_retries(retries)
        self._session = ClientSession(protocol)
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] | None = None
        self._turn = 0
        self._busy = False
        self._outstanding = 0
        self._last_service = ""
        self._closed = False
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(
        self, service: str | bytes, *frames: bytes, timeout: float | None = None, retries: int | None = None
    ) -> Reply:
        """Call `service` with `frames` (none: one empty frame) and return the frames of its reply.

        If the service streams, they are the frames of all PARTIALs, then those of the FINAL.  After `timeout` seconds
        without a message the request is sent again on a new connection, `retries` times, so the service may see it more
        than once (C5).

        Raises `RequestTimeout` (a `TimeoutError`), `BrokerUnreachable`, `ServiceError` if the handler failed,
        `BusyError` during a `stream` or between `send` and `recv`, `SettingError` for arguments that cannot be sent.
        """
        (reply,) = self._exchange(service, frames, timeout, retries, stream=False)
        return reply

    def stream(
        self, service: str | bytes, *frames: bytes, timeout: float | None = None, retries: int | None = None
    ) -> Iterator[Reply]:
        """Call `service` and yield the frames of each PARTIAL as it comes, then those of the FINAL.

        The request is sent when the first part is asked for.  It is only sent again while no part has come.

        Raises `StreamInterrupted` if more than `timeout` seconds pass after a part, else as `request`.
        """
        return self._exchange(service, frames, timeout, retries, stream=True)

    def available(self, service: str | bytes, *, timeout: float | None = None, retries: int | None = None) -> bool:
        """Whether at least one worker offers `service` now (`mmi.service`).  Raises as `request`."""
        return self.request("mmi.service", wire.service_name(service), timeout=timeout, retries=retries) == [b"200"]

    def _exchange(
        self,
        service: str | bytes,
        frames: tuple[bytes, ...],
        timeout: float | None,
        retries: int | None,
        *,
        stream: bool,
    ) -> Iterator[Reply]:
        name, body = wire.service_name(service), _body(frames)
        silence = self._timeout if timeout is None else _checked_timeout(timeout)
        again = self._retries if retries is None else _checked_retries(retries)
        return self._dialog(name, body, silence, again, stream)

    def _dialog(
        self, service: bytes, body: Sequence[bytes], timeout: float, retries: int, stream: bool
    ) -> Iterator[Reply]:
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

    def send(self, service: str | bytes, *frames: bytes) -> None:
        """Send a request and do not wait: any number may be sent before the replies are taken with `recv`.

        MDP/0.2 does not number requests: with several workers, replies come in the order of completion.  Nothing is
        sent again.  Raises `RequestTimeout` if the broker takes nothing for the client's `timeout`.
        """
        if self._busy:
            raise BusyError("this client is in the middle of a stream: finish or close it, or use a second client")
        name = wire.service_name(service)
        message = self._session.encode(name, _body(frames))
        self._last_service = name.decode()
        self._send(message, time.monotonic() + self._timeout)
        self._outstanding += 1

    def recv(self, timeout: float | None = None) -> Reply:
        """The next reply, or part of one (`.final` tells), to what `send` sent.

        Raises `RequestTimeout` if none comes within `timeout` seconds; `recv` can be called again.  Raises
        `ServiceError` if a handler failed.
        """
        if not self._outstanding:
            raise BusyError("nothing was sent: recv() takes the replies to send()")
        until = time.monotonic() + (self._timeout if timeout is None else _checked_timeout(timeout))
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
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.RCVHWM, 0)  # what can come is bounded by what was asked for
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise SettingError(f"{self._endpoint!r} is no endpoint ({error}): try tcp://127.0.0.1:5555") from None
        self._socket = socket
        return socket

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
        """Close the connection.  Harmless when repeated."""
        self._closed = True
        if self._socket is not None:
            # What `send` sent has the client's timeout to get out.
            self._socket.close(round(self._timeout * 1000) if self._outstanding else 0)
            self._socket = None
        if self._own_context:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def why_unreachable(endpoint: str) -> str | None:
    """What a connection to `endpoint` fails with and what to do about it; None if it works or cannot be told."""
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            sockets.create_connection((parts.hostname, parts.port), timeout=1).close()
        elif parts.scheme == "ipc" and not endpoint.startswith("ipc://@"):
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.connect(endpoint.removeprefix("ipc://"))
    except (ConnectionRefusedError, FileNotFoundError):
        return f"nobody listens there. Is the broker running? `mdp-broker --bind {endpoint}` starts one"
    except (PermissionError, sockets.gaierror) as error:
        return error.strerror
    except (OSError, ValueError):
        return None
    return None


def _raise_failure(reply: Reply) -> None:
    if reply.failure is not None:
        raise ServiceError(*reply.failure, service=reply.service)


def _body(frames: Sequence[object]) -> list[bytes]:
    """`frames` as bytes; the protocol asks for at least one (C2)."""
    body = []
    for at, frame in enumerate(frames):
        if not isinstance(frame, bytes | bytearray | memoryview):
            kind = type(frame).__name__
            raise SettingError(f"frame {at} is of type {kind}: a frame is bytes (for text: {'text'!r}.encode())")
        body.append(bytes(frame))
    return body or [b""]


def _checked_timeout(timeout: float) -> float:
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise SettingError(f"timeout is {timeout!r}: it takes a number of seconds above 0")
    return timeout


def _checked_retries(retries: int) -> int:
    if not isinstance(retries, int) or retries < 0:
        raise SettingError(f"retries is {retries!r}: it takes a whole number, 0 or more")
    return retries

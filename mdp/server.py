"""The broker on a ROUTER socket: one loop that receives, feeds the machine, and sends what it says.

`Server` runs in whatever thread calls `run`; `stop` may be called from any other, or from a signal handler.
"""

import logging
import math
import os
import select
import signal
import socket as sockets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EADDRINUSE, EAGAIN
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

import zmq

from .broker import Broker
from .errors import BindError
from .limits import Limits
from .multipart import milliseconds, receive, send
from .outbox import Outbox
from .wire import Message

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5555"
DEFAULT_DRAIN: Final = 10.0
BATCH: Final = 500
"""Messages taken in before the clock is read, what is due is done and the outbox is tried again."""
HELD_UP: Final = 2
"""Heartbeat intervals between two turns of the loop that tell that it was held up: it sleeps for one at most."""
OUTBOX_RETRY: Final = 0.01
"""Seconds until a slow peer is tried again."""
LINGER: Final = 1000
"""Milliseconds that the last messages (DISCONNECT) have to get out."""

log = logging.getLogger("zmdp.broker")


class Server:
    """A broker that listens on one or more endpoints.

    `binds` are ZeroMQ endpoints (`tcp://HOST:PORT`, `ipc://PATH`, `inproc://NAME`); a TCP port `*` takes a free one,
    which `endpoints` then tells.  `drain_timeout`, in seconds, bounds how long requests in flight may take
    after `stop`.
    An `inproc://` endpoint is reached through the same `context` only.

    Raises `BindError` if it cannot listen, and then holds nothing open.
    """

    def __init__(
        self,
        binds: Sequence[str] = (DEFAULT_ENDPOINT,),
        *,
        limits: Limits | None = None,
        drain_timeout: float = DEFAULT_DRAIN,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.broker = Broker(self.limits, now=time.monotonic(), logger=log)
        self._drain_timeout = drain_timeout
        self._outbox = Outbox(self.limits)
        self._stops = 0
        self._tick_at = 0.0
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket = self._context.socket(zmq.ROUTER)
        self._closed = False
        try:
            self._configure()
            self.endpoints = [self._bind(endpoint) for endpoint in binds]
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        router = self._socket
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.LINGER, LINGER)
        # libzmq cuts off a peer at the frame that is larger than this.  What is only somewhat too large is let in, so
        # that it can be counted and named.
        router.set(zmq.MAXMSGSIZE, 2 * self.limits.max_message + (1 << 20))
        # A host that vanished without a word: free its connection, and with it the identity a peer may have chosen.
        router.set(zmq.TCP_KEEPALIVE, 1)
        router.set(zmq.TCP_KEEPALIVE_IDLE, 30)
        router.set(zmq.TCP_KEEPALIVE_INTVL, 10)
        router.set(zmq.TCP_KEEPALIVE_CNT, 3)
        router.set(zmq.BACKLOG, 1024)

    def _bind(self, endpoint: str) -> str:
        try:
            if endpoint.startswith("ipc://"):
                _check_free(endpoint)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            hint = "another program listens there" if error.errno == EADDRINUSE else zmq.strerror(error.errno or 0)
            raise BindError(f"cannot listen on {endpoint}: {hint}") from None
        bound = self._socket.get(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until `stop` is called and what is in flight has finished, then send DISCONNECT to all workers."""
        poller = _Poller(self._socket, self._wake_out)
        drain_until = None
        now = time.monotonic()
        flush_at = now
        while True:
            before, now = now, time.monotonic()
            more = self._take_batch(now)
            if now - before > HELD_UP * self.limits.heartbeat:
                # This process was held up, and signs of life wait in its sockets: hear them before declaring anybody
                # dead.
                self._tick_at = now + self.limits.heartbeat
            deadline = self._deadline()
            if deadline is not None and deadline <= now:
                self._send_all(self.broker.tick(now), now)
                more = True  # libzmq takes note of what has arrived when it sends, too: the poll would not tell
            if self._outbox and now >= flush_at:
                more = True
                flush_at = now + OUTBOX_RETRY
                for message in self._outbox.flush(self._try):
                    self._send_all(self.broker.unreachable(message, now), now)
            if self._stops:
                if drain_until is None:
                    drain_until = now + self._drain_timeout
                    self._start_drain()
                if self.forced or (self.broker.drained and not self._outbox) or now >= drain_until:
                    break
            if not more:
                poller.wait(self._wait(now, drain_until))
                self._clear_wake()
        self._finish(now)

    def _take_batch(self, now: float) -> bool:
        """Take in what has arrived, and send what follows from it.  Whether there may be more."""
        socket, broker, outbox = self._socket, self.broker, self._outbox
        take, put = receive, send  # compiled, a module's names take as long to look up as its functions to begin
        for _ in range(BATCH):
            message = take(socket, True)
            if message is None:
                return False
            if outbox:
                self._take_slowly(message, now)
                continue
            try:
                messages = broker.receive(message, now)
            # Not known to happen, but one message must not end everybody's broker.  (What the machine is called for
            # besides does not depend on what a peer says.)
            except Exception:  # noqa: BLE001
                self.broker.failed(now)
                continue
            for at, each in enumerate(messages):
                errno = put(socket, each)
                if errno:
                    self._unsent(each, errno, messages, now)
                    self._send_all(messages, now, at + 1)
                    break
        return True

    def _take_slowly(self, message: Message, now: float) -> None:
        """The same for one message, while there are peers that do not keep up."""
        peer, workers = message[0], self.broker.registry.connections
        slow_worker = peer in self._outbox and peer in workers
        try:
            messages = self.broker.receive(message, now)
        except Exception:  # noqa: BLE001 - as above
            self.broker.failed(now)
            return
        if slow_worker and peer not in workers:
            self._outbox.discard(peer)  # C16: what it has not taken yet it is not to get after its end
        self._send_all(messages, now)

    def _deadline(self) -> float | None:
        deadline = self.broker.deadline()
        return None if deadline is None else max(deadline, self._tick_at)

    def _wait(self, now: float, drain_until: float | None) -> int | None:
        """Milliseconds to wait for messages, None for ever."""
        deadline = self._deadline()
        # At most an interval, so that a longer sleep than that is known for one that was not meant (`HELD_UP`).
        until = math.inf if deadline is None else now + self.limits.heartbeat
        for each in (deadline, drain_until, now + OUTBOX_RETRY if self._outbox else None):
            if each is not None and each < until:
                until = each
        return None if until == math.inf else milliseconds(until - now)

    def _try(self, message: Message) -> int:
        return send(self._socket, message)

    def _send_all(self, messages: list[Message], now: float, start: int = 0) -> None:
        """Send, never blocking; what follows from a peer that is gone or does not read is sent as well."""
        for message in islice(messages, start, None):
            # What follows is appended to the list that is being gone through.
            errno = EAGAIN if message[0] in self._outbox else send(self._socket, message)
            if errno:
                self._unsent(message, errno, messages, now)

    def _unsent(self, message: Message, errno: int, messages: list[Message], now: float) -> None:
        """`message` could not be sent; what follows from that is put behind the other `messages`."""
        if errno != EAGAIN:
            messages += self.broker.unreachable(message, now)
        elif not self._outbox.add(message):
            log.warning("dropped peer %s: it does not read what it is sent", message[0].hex())
            self._outbox.discard(message[0])
            messages += self.broker.gone(message[0], now)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Drain and end: no new requests, those in flight finish.  Called again, end at once.  Any thread may call."""
        self._stops += 1
        self._wake()

    @property
    def forced(self) -> bool:
        """Whether `stop` was called more than once."""
        return self._stops > 1

    def _wake(self) -> None:
        with suppress(OSError):  # a wake-up is under way already, or the loop has ended
            self._wake_in.send(b"!")

    def _clear_wake(self) -> None:
        if self._stops:
            with suppress(BlockingIOError):
                self._wake_out.recv(4096)

    def _start_drain(self) -> None:
        self.broker.drain()
        registry = self.broker.registry
        log.info(
            "draining: no new requests; %d running and %d waiting have %g s to finish; stop again to end at once",
            registry.running, registry.queued, self._drain_timeout,
        )  # fmt: skip

    def _finish(self, now: float) -> None:
        registry = self.broker.registry
        if registry.running or registry.queued:
            log.warning("ended with %d requests running and %d waiting", registry.running, registry.queued)
        self._send_all(self.broker.close(now), now)

    def close(self) -> None:
        """Close the socket.  Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._socket.close()
        self._wake_in.close()
        self._wake_out.close()
        if self._own_context:
            self._context.term()

    @contextmanager
    def stopped_by(self, *signals: signal.Signals) -> Iterator[None]:
        """Within the block each of `signals` calls `stop`.  For the main thread."""

        def handle(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.stop()

        before = {each: signal.signal(each, handle) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


class _Poller:
    """Waits for a ZeroMQ socket from which everything has just been taken, or for a plain one.

    The socket's descriptor becomes readable when something happens after that; `zmq_poll` would look first, and again.
    """

    def __init__(self, socket: zmq.Socket[bytes], other: sockets.socket) -> None:
        self._poll = select.poll()
        self._poll.register(int(socket.get(zmq.FD)), select.POLLIN)
        self._poll.register(other, select.POLLIN)

    def wait(self, timeout: int | None) -> None:
        """Wait, at most for so many milliseconds."""
        self._poll.poll(timeout)


def _check_free(endpoint: str) -> None:
    """Refuse a path where somebody listens, or where something else is: libzmq would replace it without asking."""
    path = Path(endpoint.removeprefix("ipc://"))
    if str(path) == "*" or str(path).startswith("@") or not path.exists():
        return
    if not path.is_socket():
        raise BindError(f"cannot listen on {endpoint}: {path} exists and is no socket")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return  # left behind by a process that is gone
        raise zmq.ZMQError(EADDRINUSE)

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
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

import zmq

from ..defaults import DEFAULT_ENDPOINT
from ..errors import BindError
from ..limits import Limits
from ..transport.multipart import milliseconds, receive, send
from ..wire import Message
from .departures import Departures
from .machine import Broker
from .outbox import Outbox

DEFAULT_DRAIN: Final = 10.0
TURN: Final = 100
"""Messages taken in before what follows from them is sent."""
LOOK: Final = 0.01
"""Seconds between two looks for connections that have ended, if there is always something to take in."""
LAST_TURNS: Final = 10
"""Turns in which what a peer sent before it left is waited for, if there is always more from others."""
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
        self._gone: dict[bytes, tuple[int, int]] = {}
        """Peers that are not connected any more, the first turn whose messages they have not received, and for how many
        turns what they sent before is still waited for."""
        self._departures = Departures(self._socket, self._context)
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
        poller = _Poller(self._socket, self._wake_out, self._departures.descriptor)
        drain_until = None
        now = time.monotonic()
        flush_at = look_at = now
        while True:
            before, now = now, time.monotonic()
            more = self._take_turn(now)
            if now - before > HELD_UP * self.limits.heartbeat:
                # This process was held up, and signs of life wait in its sockets: hear them before declaring anybody
                # dead.
                self._tick_at = now + self.limits.heartbeat
            if self._gone and self._lose_gone(now, drained=not more):
                more = True
            deadline = self._deadline()
            if deadline is not None and deadline <= now:
                self._send_all(self.broker.tick(now), now)
                more = True
            for identity in self._departures.to_probe(now):
                self._send_all(self.broker.probe(identity, now), now)
                more = True
            if self._outbox and now >= flush_at:
                self._flush_outbox()
                flush_at, more = now + OUTBOX_RETRY, True
            if self._stops:
                if drain_until is None:
                    drain_until = now + self._drain_timeout
                    self._start_drain()
                if self.forced or (self.broker.drained and not self._outbox) or now >= drain_until:
                    break
            if not more and not self._gone:
                if poller.wait(self._wait(now, drain_until)):
                    self._departures.look(time.monotonic())
                self._clear_wake()
            elif now >= look_at:
                look_at = now + LOOK
                self._departures.look(now)
        self._finish(now)

    def _take_turn(self, now: float) -> bool:
        """Take in what has arrived, and send what follows from it.  Whether there may be more."""
        socket, broker, sources = self._socket, self.broker, self._departures
        take = receive  # compiled, a module's names take as long to look up as its functions to begin
        more = True
        slow = [peer for peer in self._outbox.peers if broker.registry.workers_at(peer)] if self._outbox else []
        for _ in range(TURN):
            message = take(socket, True, sources)
            if message is None:
                more = False
                break
            try:
                broker.take(message, now)
            # Not known to happen, but one message must not end everybody's broker.  (What the machine is called for
            # besides does not depend on what a peer says.)
            except Exception:  # noqa: BLE001
                broker.failed(now)
        messages = broker.flush(now)
        for peer in slow:
            if not broker.registry.workers_at(peer):
                self._outbox.discard(peer)  # C16: what it has not taken yet it is not to get after its end
        if messages:
            self._send_all(messages, now)
            return True  # libzmq takes note of what has arrived when it sends, too: the poll would not tell
        return more

    def _deadline(self) -> float | None:
        deadline = self.broker.deadline()
        return None if deadline is None else max(deadline, self._tick_at)

    def _wait(self, now: float, drain_until: float | None) -> int | None:
        """Milliseconds to wait for messages, None for ever."""
        deadline = self._deadline()
        # At most an interval, so that a longer sleep than that is known for one that was not meant (`HELD_UP`).
        until = math.inf if deadline is None else now + self.limits.heartbeat
        retry = now + OUTBOX_RETRY if self._outbox else None
        for each in (deadline, drain_until, retry, self._departures.deadline()):
            if each is not None and each < until:
                until = each
        return None if until == math.inf else milliseconds(until - now)

    def _flush_outbox(self) -> None:
        for identity, turn in self._outbox.flush(self._try):
            self._note_gone(identity, turn)

    def _try(self, message: Message) -> int:
        return send(self._socket, message)

    def _send_all(self, messages: list[Message], now: float) -> None:
        """Send what the broker's last turn brought, never blocking, and what follows from a peer that does not read."""
        socket, outbox, put = self._socket, self._outbox, send
        turn = self.broker.turn - 1
        dropped: list[bytes] = []
        for message in messages:
            if dropped and message[0] in dropped:
                continue  # a stream ends where it breaks: without a gap
            errno = EAGAIN if outbox and message[0] in outbox else put(socket, message)
            if not errno:
                continue
            if errno != EAGAIN:
                self._note_gone(message[0], turn)
            elif not outbox.add(message, turn):
                log.warning("dropped a peer: it does not read what it is sent")
                outbox.discard(message[0])
                dropped.append(message[0])
        for identity in dropped:
            self._send_all(self.broker.gone(identity, now), now)

    def _note_gone(self, identity: bytes, turn: int) -> None:
        """A peer was not there to receive a message of `turn`."""
        if identity not in self._gone:
            self._gone[identity] = turn, LAST_TURNS

    def _lose_gone(self, now: float, *, drained: bool) -> bool:
        """Tell the machine of peers that are gone, once everything that they sent before has been taken in."""
        lost = []
        for identity, (turn, turns) in self._gone.items():
            self._gone[identity] = turn, turns - 1
            if drained or turns == 0:
                lost.append((identity, turn))
        for identity, turn in lost:
            del self._gone[identity]
            self._departures.forget(identity)
            self._outbox.discard(identity)
            self._send_all(self.broker.unreachable(identity, turn, now), now)
        return bool(lost)

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
        self._departures.close()
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
    """Waits for a ZeroMQ socket from which everything has just been taken, for a plain one, or for the monitor.

    The socket's descriptor becomes readable when something happens after that; `zmq_poll` would look first, and again.
    """

    def __init__(self, socket: zmq.Socket[bytes], other: sockets.socket, monitor: int) -> None:
        self._monitor = monitor
        self._poll = select.poll()
        self._poll.register(int(socket.get(zmq.FD)), select.POLLIN)
        self._poll.register(other, select.POLLIN)
        self._poll.register(monitor, select.POLLIN)

    def wait(self, timeout: int | None) -> bool:
        """Wait, at most `timeout` milliseconds.  Whether the monitor has something to say."""
        rung = False
        for descriptor, _ in self._poll.poll(timeout):
            rung |= descriptor == self._monitor
        return rung


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

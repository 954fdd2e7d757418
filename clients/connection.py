"""An X1 client's connection: the session on a DEALER, which is replaced whenever it is lost."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..mdp.errors import SettingError
from ..mdp.transport.multipart import receive, send
from .session import Call, ClientSession, Outcome

MAX_MESSAGES: Final = 100
"""Messages processed before their outcomes are delivered."""
LINGER_MS: Final = 100
"""How long the last messages (CANCEL) may take to be sent after the socket is closed."""
MAX_TICK_DELAY: Final = 1.0
"""Seconds that due work may be delayed while messages keep arriving."""
NEVER_MS: Final = 3_600_000
"""ZeroMQ's own reconnection interval: long after the socket has been replaced."""

Deliver = Callable[[list[tuple[Call, Outcome]]], None]


class Connection:
    """A connection to one of several brokers; each time it is lost, to the next of them.

    ZeroMQ would reconnect by itself and silently, to a broker that knows nothing of the outstanding requests.  So a
    socket is used for one connection only: a monitor reports when that ends, and then another socket is opened.

    `deliver` is called with the outcomes of requests, all that a step has brought at once.

    Raises `SettingError` for an invalid endpoint.
    """

    def __init__(
        self,
        session: ClientSession,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        deliver: Deliver,
    ) -> None:
        self.session = session
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        """Readable when the connection has ended, or could not be made."""
        self.rung = False
        """Set by the shell when the monitor's descriptor is readable.  To ask the monitor each time would cost more
        than everything else."""
        self.before_drop: Callable[[], None] = _nothing
        """Set by the shell; called before the socket is closed."""
        self._endpoints = endpoints
        self._context = context
        self._deliver = deliver
        self._turn = 0
        self._ticked_at = 0.0
        for endpoint in reversed(endpoints):  # the first is the one that stays
            self.drop()
            try:
                self._open(endpoint, time.monotonic())
            except zmq.ZMQError as error:
                raise SettingError(f"{endpoint!r} is no endpoint ({error}): try tcp://127.0.0.1:5555") from None

    def step(self, now: float) -> bool:
        """Send, receive, do what is due, and deliver.  Return whether to step again at once.

        If it returns False, everything that somebody waits for has been received: the socket's descriptor, which
        reports changes only, will report what arrives from now on.
        """
        session = self.session
        if session.unsent or session.lost is not None:
            self._send(now)
        more, socket = False, self.socket
        if socket is not None:
            for _ in range(MAX_MESSAGES):
                message = receive(socket)
                if message is None:
                    break
                session.receive(message, now)
                if not session.outstanding:
                    break  # nobody waits for anything else
            else:
                more = True
            if self.rung and not more:
                self._check_monitor(socket, now)
        if not more or now - self._ticked_at > MAX_TICK_DELAY:  # a reply that is already there is not late
            self._ticked_at = now
            session.tick(now)
        if session.events:
            self.deliver()
        if session.unsent or session.lost is not None:
            more |= self._send(now)  # meanwhile something may have arrived unreported
            self.deliver()
        return more

    def flush(self, now: float) -> None:
        """Send what is unsent, reconnect if that is due, and deliver.  A step must follow."""
        self._send(now)
        self.deliver()

    def _send(self, now: float) -> bool:
        """Send what is unsent; reconnect if that is due.  Return whether anything was sent."""
        session = self.session
        if session.lost is not None:
            self.drop()
            if session.outstanding and now >= session.retry_at:
                self._turn += 1
                try:
                    self._open(self._endpoints[self._turn % len(self._endpoints)], now)
                except zmq.ZMQError as error:  # no file descriptor left, for example
                    session.lose(str(error), now)
        if not session.unsent or self.socket is None:
            return False
        for message in session.take_messages():
            if send(self.socket, message):  # there is no high-water mark: it is not connected any more
                session.lose("the connection was closed", now)
                self.drop()
                break
        return True

    def deliver(self) -> None:
        """Deliver the outcomes that have come."""
        session = self.session
        while session.events:
            events, session.events = session.events, []
            self._deliver(events)

    def _check_monitor(self, socket: zmq.Socket[bytes], now: float) -> None:
        """The monitor has reported something: lose the connection if it has ended."""
        self.rung = False
        ended = self._ended()
        if ended is not None:
            while (message := receive(socket)) is not None:  # what came before the end
                self.session.receive(message, now)
            reason, cut = ended
            self.session.lose(reason, now, cut=cut)

    def _ended(self) -> tuple[str, bool] | None:
        """Why the connection has ended, and whether there was one that was closed; None if it has not."""
        if self.monitor is None or not self.monitor.poll(0):
            return None
        if self.session.heard:
            return "the broker closed the connection", True
        if recv_monitor_message(self.monitor)["event"] == zmq.Event.DISCONNECTED:
            return "what listens there closed the connection: is it a broker?", True
        endpoint = self.session.where
        return f"nobody listens there. Is the broker running? `mdp-broker --bind {endpoint}` starts one", False

    def _open(self, endpoint: str, now: float) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            # Not -1: libzmq 4.3.5 then loses a session whose handshake fails, and the context never ends.
            socket.set(zmq.RECONNECT_IVL, NEVER_MS)
            socket.set(zmq.SNDHWM, 0)  # what is sent is bounded by what may be outstanding
            self.monitor = socket.get_monitor_socket(zmq.Event.DISCONNECTED | zmq.Event.CLOSED)
            socket.connect(endpoint)
        except zmq.ZMQError:
            self.socket = socket
            self.drop()
            raise
        self.socket = socket
        self.rung = True  # its descriptor reports nothing before the first look
        self.session.connected(endpoint, now)

    def close(self, now: float) -> None:
        """Send what is unsent, deliver, and close the socket."""
        with suppress(zmq.ZMQError):  # its context was terminated
            self._send(now)
        self.deliver()
        self.drop(LINGER_MS)

    def drop(self, linger_ms: int = 0) -> None:
        """Close the socket, if there is one."""
        if self.socket is not None:
            self.before_drop()
        socket, self.socket = self.socket, None
        monitor, self.monitor = self.monitor, None
        if socket is not None:
            if monitor is not None:
                with suppress(zmq.ZMQError):  # its context was terminated
                    socket.disable_monitor()
                monitor.close(0)
            socket.close(linger_ms)


def _nothing() -> None:
    pass

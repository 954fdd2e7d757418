"""An X1 client's connection: its session on a DEALER socket, which is replaced whenever the connection is lost."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..mdp.endpoints import Endpoints
from ..mdp.errors import SettingError
from ..mdp.keys import ClientKeys
from ..mdp.transport.multipart import receive, send
from ..mdp.transport.reach import HANDSHAKE_FAILED, REFUSED, why_refused
from .session import Call, ClientSession, Outcome

MAX_MESSAGES: Final = 100
"""Messages processed before their outcomes are delivered."""
LINGER_MS: Final = 100
"""How long the last messages (CANCEL) may take to leave after the socket is closed."""
MAX_TICK_DELAY_SECONDS: Final = 1.0
"""How long due work may be delayed while messages keep arriving."""
RECONNECT_IVL_MS: Final = 3_600_000
"""ZeroMQ's own reconnection interval: so long that this client replaces the socket first."""

Deliver = Callable[[list[tuple[Call, Outcome]]], None]


class ClientConnection:
    """A connection to one of several brokers, chosen by `endpoints`; when it is lost, another is opened.

    ZeroMQ itself would reconnect silently, to a broker that does not have the outstanding requests.  So each socket is
    used for one connection only: a monitor reports when that ends, and then another socket is opened.

    `deliver` is called with the outcomes of requests, all those of a step at once.

    A broker that refuses this client's keys says so.  When all have done so, one after the other, the outstanding
    requests fail, since waiting would not help.

    Raises `SettingError` for an invalid endpoint.
    """

    def __init__(
        self,
        session: ClientSession,
        endpoints: Endpoints,
        context: zmq.Context[zmq.Socket[bytes]],
        deliver: Deliver,
        keys: ClientKeys | None = None,
    ) -> None:
        self.session = session
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        """Readable when the connection has ended or could not be established."""
        self.monitor_reported = False
        """Set by the dialog when the monitor's descriptor is readable.  Asking the monitor at every step would cost
        more than everything else."""
        self.before_drop: Callable[[], None] = _do_nothing
        """Set by the dialog; called before the socket is closed."""
        self._endpoints = endpoints
        self._context = context
        self._deliver = deliver
        self._keys = keys
        self._refusals = 0
        """Number of brokers in a row that have refused this client."""
        self._ticked_at = 0.0
        for endpoint in reversed(endpoints.all):  # the connection to the first is kept
            self.drop()
            try:
                self._open(endpoint, time.monotonic())
            except zmq.ZMQError as error:
                raise SettingError(
                    f"{endpoint!r} is not a valid endpoint ({error}): try tcp://127.0.0.1:5555"
                ) from None

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._endpoints.current

    def step(self, now: float) -> bool:
        """Send, receive, do what is due, and deliver.  Return whether to step again immediately.

        If it returns False, everything that a caller waits for has been received: the socket's descriptor, which
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
                    break  # no caller waits for anything else
            else:
                more = True
            if self.monitor_reported and not more:
                self._check_monitor(socket, now)
        if not more or now - self._ticked_at > MAX_TICK_DELAY_SECONDS:  # a reply that has already arrived is not late
            self._ticked_at = now
            session.tick(now)
        if session.events:
            self.deliver()
        if session.unsent or session.lost is not None:
            more |= self._send(now)  # sending may have hidden from the descriptor that something has arrived
            self.deliver()
        return more

    def flush(self, now: float) -> None:
        """Send what is unsent, reconnect if that is due, and deliver.  `step` must be called soon afterwards."""
        self._send(now)
        self.deliver()

    def _send(self, now: float) -> bool:
        """Send what is unsent; reconnect if that is due.  Return whether anything was sent."""
        session = self.session
        if session.lost is not None:
            self.drop()
            if session.outstanding and now >= session.retry_at:
                try:
                    self._open(self._endpoints.fail_over(answered=session.heard), now)
                except zmq.ZMQError as error:  # no file descriptor is left, for example
                    session.heard = False  # so that it waits before it tries again
                    session.lose(str(error), now)
        if not session.unsent or self.socket is None:
            return False
        for message in session.take_messages():
            if send(self.socket, message):  # there is no high-water mark, so it is no longer connected
                session.lose("the connection was closed", now)
                self.drop()
                break
        return True

    def deliver(self) -> None:
        """Deliver the outcomes that have arrived."""
        session = self.session
        while session.events:
            events, session.events = session.events, []
            self._deliver(events)

    def _check_monitor(self, socket: zmq.Socket[bytes], now: float) -> None:
        """The monitor has reported something: lose the connection if it has ended."""
        self.monitor_reported = False
        ended = self._ended()
        if ended is not None:
            while (message := receive(socket)) is not None:  # what arrived before the end
                self.session.receive(message, now)
            reason, cut, refused = ended
            self.session.lose(reason, now, cut=cut)
            self._refusals = self._refusals + 1 if refused else 0
            if self._refusals >= len(self._endpoints.all):
                self.session.refuse(reason)

    def _ended(self) -> tuple[str, bool, bool] | None:
        """Return why the connection has ended, whether the other end closed it, and whether it refused this client.

        Return None if the connection has not ended.
        """
        if self.monitor is None or not self.monitor.poll(0):
            return None
        if self.session.heard:
            return "the broker closed the connection", True, False
        event = recv_monitor_message(self.monitor)
        refusal = why_refused(event["event"], event["value"], self._keys)
        if refusal is not None:
            return refusal, True, bool(event["event"] & REFUSED)
        if event["event"] == zmq.Event.DISCONNECTED:
            return "the program that listens there closed the connection: is it a broker?", True, False
        return (
            f"nothing is listening there. Is the broker running? `mdp-broker --bind {self.endpoint}` starts one",
            False,
            False,
        )

    def _open(self, endpoint: str, now: float) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            # Not -1: with that, libzmq 4.3.5 leaks a session whose handshake fails, and the context never terminates.
            socket.set(zmq.RECONNECT_IVL, RECONNECT_IVL_MS)
            socket.set(zmq.SNDHWM, 0)  # max_outstanding limits what is sent
            if self._keys is not None:
                self._keys.apply(socket)
            self.monitor = socket.get_monitor_socket(zmq.Event.DISCONNECTED | zmq.Event.CLOSED | HANDSHAKE_FAILED)
            socket.connect(endpoint)
        except zmq.ZMQError:
            self.socket = socket
            self.drop()
            raise
        self.socket = socket
        self.monitor_reported = True  # its descriptor reports nothing until the monitor has been asked once
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


def _do_nothing() -> None:
    pass

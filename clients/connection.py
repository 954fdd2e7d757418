"""An X1 client's connection: its session on a DEALER socket, which is replaced whenever the connection is lost.

With several brokers there may be more sockets: of connections that the client has left while requests were outstanding
there, and of a probe of the first broker.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..mdp.errors import SettingError
from ..mdp.keys import ClientKeys
from ..mdp.transport.multipart import receive, send
from ..mdp.transport.probe import Probe
from ..mdp.transport.reach import HANDSHAKE_FAILED, REFUSED, why_refused
from .call import Call, Outcome
from .session import ClientSession, OldConnection

MAX_MESSAGES: Final = 100
"""Messages processed before their outcomes are delivered."""
MAX_EVENTS: Final = 64
"""Replies and parts from which on they are delivered before more is received: whoever passes on the parts of a stream
gets the chance to do so, and they do not pile up."""
LINGER_MS: Final = 100
"""How long the last messages (CANCEL) may take to leave after the socket is closed."""
MAX_TICK_DELAY_SECONDS: Final = 1.0
"""How long due work may be delayed while messages keep arriving, beyond the replies that are outstanding."""
RECONNECT_IVL_MS: Final = 3_600_000
"""ZeroMQ's own reconnection interval: so long that this client replaces the socket first."""

Deliver = Callable[[list[tuple[Call, Outcome]]], None]

log = logging.getLogger("zmdp.client")


class OldSocket:
    """The socket of a connection that the client has left."""

    def __init__(
        self, connection: OldConnection, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, ended: bool
    ) -> None:
        self.connection = connection
        self.socket = socket
        self.monitor = monitor
        self.ended = ended
        """The monitor has reported that the connection has ended; it does so only once."""


class ClientConnection:
    """A connection to one of the session's brokers; when it is lost, another is opened.

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
        """Set by the dialog; called before a socket is closed."""
        self.changes = 0
        """Changes whenever `descriptors` does."""
        self._several = session.several
        self._old: list[OldSocket] = []
        self._probe: Probe | None = None
        self._context = context
        self._deliver = deliver
        self._keys = keys
        self._refusals = 0
        """Number of brokers in a row that have refused this client."""
        self._ticked_at = 0.0
        self._steps = 0
        """Steps since then."""
        self._awaited = 0
        """Requests that were outstanding at the first of them."""
        self._loss_logged = False
        """Whether the loss of the connection has been logged, but not yet that it is back."""
        for endpoint in reversed(session.endpoints.all):  # the connection to the first is kept
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
        return self.session.endpoints.current

    def descriptors(self) -> tuple[int, int, list[int]]:
        """Return the descriptors to watch: of the socket, of its monitor (-1 without a connection), and all others."""
        others = [int(each.get(zmq.FD)) for old in self._old for each in (old.socket, old.monitor)]
        if self._probe is not None:
            others.append(self._probe.descriptor)
        if self.socket is None or self.monitor is None:
            return -1, -1, others
        return int(self.socket.get(zmq.FD)), int(self.monitor.get(zmq.FD)), others

    def step(self, now: float) -> bool:
        """Send, receive, do what is due, and deliver.  Return whether to step again immediately.

        If it returns False, everything that a caller waits for has been received: the socket's descriptor, which
        reports changes only, will report what arrives from now on.
        """
        session = self.session
        self._awaited = self._awaited if self._steps else session.outstanding
        self._steps += 1
        more = self._several and self._step_others(now)
        if session.unsent or session.lost is not None:
            self._send(now)
        socket = self.socket
        if socket is not None:
            for _ in range(MAX_MESSAGES):
                message = receive(socket)
                if message is None:
                    break
                session.receive(message, now)
                if not session.outstanding or session.lost is not None:
                    break  # no caller waits for anything else, or the rest is for the old connection
                if len(session.events) >= MAX_EVENTS:
                    more = True
                    break
            else:
                more = True
            if self._loss_logged and session.heard and session.lost is None:
                self._loss_logged = False
                log.info("connected to the broker at %s", self.endpoint)
            if self.monitor_reported and not more and session.lost is None:  # else the rest is for the old connection
                self._check_monitor(socket, now)
        if not more or self._tick_is_overdue(now):
            self._ticked_at, self._steps = now, 0
            session.tick(now)
        if session.events:
            self.deliver()
        if session.unsent or session.lost is not None:
            more |= self._send(now)  # sending may have hidden from the descriptor that something has arrived
            self.deliver()
        return more

    def _tick_is_overdue(self, now: float) -> bool:
        """Return whether to do what is due although more messages have arrived.

        A reply that has already arrived is not late, and the time does not tell whether it has: this process may have
        been held up.  So as many replies as there were requests are received before.
        """
        return self._steps * MAX_EVENTS > self._awaited and now - self._ticked_at > MAX_TICK_DELAY_SECONDS

    def _step_others(self, now: float) -> bool:
        """Send and receive over old connections, and probe the first broker.  Return whether to step again soon."""
        session, more = self.session, False
        for each in self._old[:]:
            more |= self._step_old(each, now)
        if self._probe is None:
            endpoint = session.take_probe(now)
            if endpoint is None:
                return more
            try:
                self._probe = Probe(endpoint, self._context, self._keys)
            except (zmq.ZMQError, SettingError):  # no file descriptor is left, for example
                session.probed(False, now)
                return more
            self.changes += 1
        answered = self._probe.outcome(now)
        if answered is not None:
            self._close_probe()
            session.probed(answered, now)
        return more

    def _step_old(self, old: OldSocket, now: float) -> bool:
        session, connection, socket = self.session, old.connection, old.socket
        for _ in range(MAX_MESSAGES):
            message = receive(socket)
            if message is None:
                if not old.ended:
                    old.ended = bool(int(old.monitor.get(zmq.EVENTS)) & zmq.POLLIN)
                    if old.ended:
                        return True  # what arrived before the end may only now be there
                else:
                    session.lose_old(connection, "the broker closed the connection", now, cut=True)
                break
            session.receive_old(connection, message, now)
        else:
            return True
        sent = False
        for message in connection.take_messages():
            if send(socket, message):
                session.lose_old(connection, "the connection was closed", now)
                break
            sent = True
        if connection.closed is not None:
            self._old.remove(old)
            self._close_sockets(socket, old.monitor, LINGER_MS)
            return False
        return sent  # sending may have hidden from the descriptor that something has arrived

    def flush(self, now: float) -> None:
        """Send what is unsent, reconnect if that is due, and deliver.  `step` must be called soon afterwards."""
        self._send(now)
        self.deliver()

    def _send(self, now: float) -> bool:
        """Send what is unsent; reconnect if that is due.  Return whether to step again."""
        session, parted = self.session, False
        if session.lost is not None:
            if not self._loss_logged:
                self._loss_logged = True
                log.info("no connection to the broker at %s: %s", self.endpoint, session.lost)
            parted = self._part()
            if session.outstanding and now >= session.retry_at:
                try:
                    self._open(session.next_endpoint(), now)
                except zmq.ZMQError as error:  # no file descriptor is left, for example
                    session.heard = False  # so that it waits before it tries again
                    session.lose(str(error), now)
        if not session.unsent or self.socket is None:
            return parted
        for message in session.take_messages():
            if send(self.socket, message):  # there is no high-water mark, so it is no longer connected
                session.lose("the connection was closed", now)
                self.drop()
                break
        return True

    def _part(self, *, ended: bool = False) -> bool:
        """Give up the socket: keep it if the session has left the connection, else close it.  Tell whether it is kept.

        `ended` tells that the monitor has reported the end of the connection.
        """
        left = self.session.take_left()
        if left is None or self.socket is None or self.monitor is None:
            self.drop()
            return False
        self._old.append(OldSocket(left, self.socket, self.monitor, ended=ended))
        self.socket = self.monitor = None
        self.changes += 1
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
                if self.session.lost is not None:  # the rest is for the old connection
                    self._part(ended=True)
                    return
            reason, cut, refused = ended
            self.session.lose(reason, now, cut=cut)
            self._refusals = self._refusals + 1 if refused else 0
            if self._refusals >= len(self.session.endpoints.all):
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
        self.changes += 1
        self.monitor_reported = True  # its descriptor reports nothing until the monitor has been asked once
        self.session.connected(endpoint, now)

    def close(self, now: float) -> None:
        """Send what is unsent, deliver, and close all sockets."""
        with suppress(zmq.ZMQError):  # its context was terminated
            self._send(now)
        for old in self._old:
            with suppress(zmq.ZMQError):
                for message in old.connection.take_messages():
                    send(old.socket, message)
        self.deliver()
        self.drop(LINGER_MS)
        while self._old:
            old = self._old.pop()
            self._close_sockets(old.socket, old.monitor, LINGER_MS)
        self._close_probe()

    def drop(self, linger_ms: int = 0) -> None:
        """Close the socket, if there is one."""
        socket, self.socket = self.socket, None
        monitor, self.monitor = self.monitor, None
        if socket is not None:
            self._close_sockets(socket, monitor, linger_ms)

    def _close_sockets(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None, linger_ms: int) -> None:
        self.before_drop()
        self.changes += 1
        if monitor is not None:
            with suppress(zmq.ZMQError):  # its context was terminated
                socket.disable_monitor()
            monitor.close(0)
        socket.close(linger_ms)

    def _close_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            self.before_drop()
            self.changes += 1
            probe.close()


def _do_nothing() -> None:
    pass

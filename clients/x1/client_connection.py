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

from ...mdp.errors import SettingError
from ...mdp.program.logs import counted
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.monitored import MonitoredDealer
from ...mdp.transport.multipart import receive, send
from ...mdp.transport.probe import Probe
from ...mdp.transport.reach import ENDED, HANDSHAKE_FAILED
from ...mdp.transport.sockets import ONE_CONNECTION_MS, Context
from ..calls.reply import Outcome
from .broker_connection import BrokerConnection, Call
from .session import ClientSession

# These two are not Final, which would be compiled in: tests set them.
MAX_MESSAGES: int = 100
"""Messages processed before their outcomes are delivered."""
MAX_EVENTS: int = 64
"""Number of replies and parts after which they are delivered before more is received, so that the parts of streams
can be passed on and do not pile up."""
MAX_BYTES: Final = 1 << 22
"""Size of received messages after which the same is done."""
LINGER_MS: Final = 100
"""How long the last messages (CANCEL) may take to leave after the socket is closed."""
MAX_TICK_DELAY_SECONDS: Final = 1.0
"""How long due work may be delayed while messages keep arriving, beyond the replies that are outstanding."""
WARNING_SECONDS: Final = 1.0
"""How long requests wait for a broker before a warning says so: a restart takes less."""

MAX_UNREAD: Final = 64
"""Maximum number of messages that wait in libzmq's memory; each has many replies, or a large one.

Reading them wakes libzmq's thread each time that half of these have been read, so few of them cost more."""
MAX_UNREAD_LARGE: Final = 8
"""The same, once megabytes have waited."""
_OPTIONS: Final[dict[int, int]] = {
    zmq.RECONNECT_IVL: ONE_CONNECTION_MS,
    zmq.RCVHWM: MAX_UNREAD,
    zmq.SNDHWM: 0,  # max_outstanding limits what is sent
}

Deliver = Callable[[list[tuple[Call, Outcome]]], None]

log = logging.getLogger("zmdp.client")


class BrokerSocket(MonitoredDealer):
    """A DEALER socket for one connection, whose monitor reports that it has ended or could not be established."""

    connection: BrokerConnection
    """The session's view of the connection; set once the session knows of it."""

    def __init__(self, endpoint: str, context: Context, keys: ClientKeys | None) -> None:
        super().__init__(context, endpoint, _OPTIONS, keys, ENDED | HANDSHAKE_FAILED)
        self.ended = False
        """The monitor has reported the end of the connection, which it does only once."""

    def expect_large(self) -> None:
        """Have libzmq read less ahead from now on: large replies come over this connection."""
        self.limit_unread(MAX_UNREAD_LARGE)


class ClientConnection:
    """A connection to one of the session's brokers; when it is lost, another is opened.

    ZeroMQ itself would reconnect silently, to a broker that does not have the outstanding requests.  So each socket is
    used for one connection only: a monitor reports when that ends, and then another socket is opened.

    `deliver` is called with the outcomes of requests, all those of a step at once.  If it raises an exception, the
    outcomes that are left in the list are delivered with the next.

    A broker that refuses this client's keys says so.  When all have done so, one after the other, the outstanding
    requests fail, since waiting would not help.

    Raises `SettingError` if ZeroMQ does not accept the first endpoint, or no file descriptor is left.
    """

    def __init__(
        self,
        session: ClientSession,
        context: zmq.Context[zmq.Socket[bytes]],
        deliver: Deliver,
        keys: ClientKeys | None = None,
    ) -> None:
        self.session = session
        self.monitor_reported = False
        """Set by the dialog when the monitor's descriptor is readable.  Asking the monitor at every step would cost
        more than everything else."""
        self.before_drop: Callable[[], None] = _do_nothing
        """Set by the dialog; called before a socket is closed."""
        self.changes = 0
        """Changes whenever `descriptors` does."""
        self._several = session.failover.several
        self._current: BrokerSocket | None = None
        """The socket of the session's current connection."""
        self._old: list[BrokerSocket] = []
        """The sockets of connections that the session has left."""
        self._probe: Probe | None = None
        self._context = context
        self._deliver = deliver
        self._keys = keys
        self._refusals = 0
        """Number of brokers in a row that have refused this client."""
        self._ticked_at = 0.0
        self._outcomes = 0
        """Replies and parts received since the last tick, or more."""
        self._awaited = 0
        """Requests that were outstanding after the last tick."""
        self._opened_at = 0.0
        self._lost_at: float | None = None
        """When the connection was lost, once that is logged; None after a broker has answered."""
        self._loss_warned = False
        self._open(self.endpoint, time.monotonic())

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self.session.endpoint

    def descriptors(self) -> tuple[int, int, list[int]]:
        """Return the descriptors to watch: of the socket, of its monitor (-1 without a connection), and all others."""
        others = [each for old in self._old for each in (old.descriptor, old.monitor_descriptor)]
        if self._probe is not None:
            others.append(self._probe.descriptor)
        if self._current is None:
            return -1, -1, others
        return self._current.descriptor, self._current.monitor_descriptor, others

    def step(self, now: float) -> bool:
        """Send, receive, do what is due, and deliver.  Return whether to step again immediately.

        If it returns False, everything that a caller waits for has been received: the socket's descriptor, which
        reports changes only, will report what arrives from now on.
        """
        session, more = self.session, self.exchange(now)
        if session.events:
            self.deliver()
        connection = session.current
        if connection.unsent or connection.lost is not None:
            more |= self._send(now)  # sending may have hidden from the descriptor that something has arrived
            if session.events:
                self.deliver()
        return more

    def exchange(self, now: float) -> bool:
        """Do the same as `step`, but leave the outcomes in `session.events`."""
        session = self.session
        if not self._outcomes:
            self._awaited = session.outstanding
        more = self._several and self._step_others(now)
        connection = session.current
        if connection.unsent or connection.lost is not None:
            self._send(now)
        here = self._current
        if here is not None:
            more |= self._receive(here, now)
        self._outcomes += len(session.events) or 1
        if not more or self._tick_is_overdue(now):
            self._ticked_at, self._outcomes = now, 0
            session.tick(now)
        if self._old:
            more |= self._flush_old(now)
        return more

    def _receive(self, here: BrokerSocket, now: float) -> bool:
        """Receive over the current connection.  Return whether there may be more."""
        session, connection, socket = self.session, here.connection, here.socket
        size = 0
        for _ in range(MAX_MESSAGES):
            message = receive(socket)
            if message is None:
                break
            session.receive(message, now)
            if session.current is not connection:
                return False  # further messages are for the connection that was left
            if not session.outstanding:
                break  # no caller waits for anything else
            size += sum(map(len, message))
            if size >= MAX_BYTES:
                here.expect_large()
                return True
            if len(session.events) >= MAX_EVENTS:
                return True
        else:
            return True
        if self._lost_at is not None and connection.heard:
            self._lost_at, self._loss_warned = None, False
            log.info("connected to the broker at %s", self.endpoint)
        if self.monitor_reported:
            self._check_monitor(here, now)
        return False

    def _tick_is_overdue(self, now: float) -> bool:
        """Return whether to do what is due although more messages have arrived.

        A reply that has already arrived is not late, and the time does not tell whether it has: this process may have
        been held up.  So as many replies as there were requests are received before.
        """
        return self._outcomes > self._awaited and now - self._ticked_at > MAX_TICK_DELAY_SECONDS

    def _step_others(self, now: float) -> bool:
        """Receive over old connections, and probe the first broker.  Return whether to step again soon."""
        session, more = self.session, False
        for each in self._old:
            more |= self._receive_old(each, now)
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

    def _receive_old(self, old: BrokerSocket, now: float) -> bool:
        """Receive over a connection that the session has left.  Return whether there may be more."""
        session, connection, socket = self.session, old.connection, old.socket
        for _ in range(MAX_MESSAGES):
            message = receive(socket)
            if message is None:
                if old.ended:
                    session.lose("the broker closed the connection", now, connection)
                    return False
                old.ended = old.reported
                return old.ended  # messages from before the end may have arrived only now
            session.receive(message, now, connection)
        return True

    def _flush_old(self, now: float) -> bool:
        """Send what is unsent over old connections, and close those that are lost.  Return whether to step again."""
        sent = False
        for old in self._old[:]:
            sent |= self._send_over(old, now)  # sending may have hidden from the descriptor that something has arrived
            if old.connection.lost is not None:
                self._old.remove(old)
                self._close_socket(old, LINGER_MS)
        return sent

    @property
    def unsent(self) -> bool:
        """Whether `step` has anything to send, or a connection to open."""
        current = self.session.current
        return bool(current.unsent) or current.lost is not None or any(old.connection.unsent for old in self._old)

    def _send(self, now: float) -> bool:
        """Send what is unsent over the current connection; reconnect if that is due.  Return whether to step again."""
        session, kept = self.session, False
        if (lost := session.current.lost) is not None:
            # A connection that has not ended was given up because nothing was heard over it.
            self._log_loss(lost, now if session.current.heard else self._opened_at, now)
            kept = self._give_up_socket()
            if session.outstanding and now >= session.retry_at:
                try:
                    self._open(self.endpoint, now)
                except (zmq.ZMQError, SettingError) as error:  # no file descriptor is left, for example
                    session.lose(str(error), now)
        if self._current is None or not self._send_over(self._current, now):
            return kept
        if session.current.lost is not None:
            self.drop()
        return True

    def _send_over(self, to: BrokerSocket, now: float) -> bool:
        """Send what is unsent over a connection.  Return whether there was anything to send."""
        messages = to.connection.take_messages()
        for message in messages:
            if send(to.socket, message):  # there is no high-water mark, so it is no longer connected
                self.session.lose("the connection was closed", now, to.connection)
                break
        return bool(messages)

    def _log_loss(self, reason: str, since: float, now: float) -> None:
        """Log that there has been no connection `since` then: at once, and as a warning if requests wait for one."""
        if self._lost_at is None:
            self._lost_at = since
            log.info("no connection to the broker at %s: %s", self.session.current.endpoint, reason)
        outstanding = self.session.outstanding
        if not self._loss_warned and outstanding and now - self._lost_at >= WARNING_SECONDS:
            self._loss_warned = True
            waiting = f"{counted(outstanding, 'request')} {'wait' if outstanding > 1 else 'waits'} for one"
            where = " or ".join(self.session.failover.endpoints)
            log.warning("still no connection to a broker at %s: %s. Until the timeout, %s", where, reason, waiting)

    def _give_up_socket(self) -> bool:
        """Give up the socket: keep it if the connection is still needed, else close it.  Return whether it is kept."""
        left = self._current
        if left is None or (left.connection.lost is not None and not left.connection.unsent):
            self.drop()
            return False
        self._old.append(left)
        self._current = None
        self.changes += 1
        return True

    def deliver(self) -> None:
        """Deliver the outcomes that have arrived."""
        session = self.session
        while session.events:
            events, session.events = session.events, []  # not `take_events`: Ctrl-C may come when a call returns
            try:
                self._deliver(events)
            except BaseException:
                session.events[:0] = events
                raise

    def _check_monitor(self, here: BrokerSocket, now: float) -> None:
        """Lose the connection if the monitor reports that it has ended."""
        self.monitor_reported = False
        ended = self._ended(here)
        if ended is None:
            return
        here.ended = True
        session = self.session
        while (message := receive(here.socket)) is not None:  # what arrived before the end
            session.receive(message, now)
            if session.current is not here.connection:
                self._give_up_socket()  # further messages are for the connection that was left
                return
        reason, refused = ended
        session.lose(reason, now)
        self._log_loss(reason, now, now)
        self._refusals = self._refusals + 1 if refused else 0
        if self._refusals >= len(session.failover.endpoints):
            session.refused_by_all(reason)

    def _ended(self, here: BrokerSocket) -> tuple[str, bool] | None:
        """Return why the connection has ended, and whether the broker refused this client.

        Return None if the connection has not ended.
        """
        report = here.report()
        if report is None:
            return None
        if here.connection.heard:
            return "the broker closed the connection", False
        return here.why(report), report.refused

    def _open(self, endpoint: str, now: float) -> None:
        self._close_probe()
        self._current = BrokerSocket(endpoint, self._context, self._keys)
        self._current.connection = self.session.connected(endpoint, now)
        self._opened_at = now
        self.changes += 1
        self.monitor_reported = True  # its descriptor reports nothing until the monitor has been asked once

    def close(self, now: float) -> None:
        """Send what is unsent, deliver, and close all sockets."""
        with suppress(zmq.ZMQError):  # its context was terminated
            self._send(now)
        for old in self._old:
            with suppress(zmq.ZMQError):
                self._send_over(old, now)
        self.deliver()
        self.drop(LINGER_MS)
        while self._old:
            self._close_socket(self._old.pop(), LINGER_MS)
        self._close_probe()

    def drop(self, linger_ms: int = 0) -> None:
        """Close the socket of the current connection, if there is one."""
        dropped, self._current = self._current, None
        if dropped is not None:
            self._close_socket(dropped, linger_ms)

    def _close_socket(self, closed: BrokerSocket, linger_ms: int) -> None:
        self.before_drop()
        self.changes += 1
        closed.close(linger_ms)

    def _close_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            self.before_drop()
            self.changes += 1
            probe.close()


def _do_nothing() -> None:
    pass

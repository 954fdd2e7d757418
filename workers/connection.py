"""A worker session on a DEALER socket, shared by the threaded and the asyncio worker."""

import logging
import math
import os
import socket as sockets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import zmq

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.errors import BindError, SettingError, flaw
from ..mdp.program.logs import fields_of
from ..mdp.security.keys import ClientKeys
from ..mdp.service_limits import NO_LIMITS, ServiceLimits
from ..mdp.transport.monitored import MonitoredDealer
from ..mdp.transport.multipart import receive, send
from ..mdp.transport.probe import Probe
from ..mdp.transport.reach import ENDED, HANDSHAKE_FAILED
from ..mdp.transport.sockets import ONE_CONNECTION_MS, Context
from ..mdp.wire import Message
from ..mdp.wire.options import MAX_ABOUT, encode_about
from ..version import __version__
from .handling import Failed
from .session.request import Request
from .session.session import WorkerSession
from .session.states import CLOSED, Cancelled, ConnectionEnded, HandlerStuck

LINGER_MS: Final = 3_000
"""Time for the last messages (a FINAL, DISCONNECT), which may be large, to be sent after closing."""
SEND_RETRY_SECONDS: Final = 0.01
"""Time after which a message that the broker did not accept is sent again."""
FLUSH_SECONDS: Final = 0.0005
"""Time after which replies are sent even if more are about to follow."""
REFUSAL_SECONDS: Final = 1.0
"""Time after which a worker that was not refused logs that it serves: some brokers do not answer READY."""
MONITORED: Final = int(zmq.Event.HANDSHAKE_SUCCEEDED) | ENDED | HANDSHAKE_FAILED
"""Events that show whether a broker is there: the connection is established, an attempt has failed, or it has ended."""

log = logging.getLogger("zmdp.worker")


def ready_options(
    name: str, *, dialect: bool, about: Mapping[str, Any] | None, limits: ServiceLimits = NO_LIMITS
) -> bytes:
    """Return the options of READY (X1): the process as operators see it, whether it wants to know the `dialect` of
    clients, the description of the service for callers, and its limits.

    Raises `SettingError` if that is too large, or not JSON.
    """
    name = name or Path(sys.argv[0]).name
    options: dict[str, Any] = {
        "name": name[: wire.MAX_NAME],
        "host": sockets.gethostname(),
        "pid": os.getpid(),
        "version": __version__,
    }
    if dialect:
        options["dialect"] = True
    if about is not None:
        options["about"] = _checked(about)
    if limits:
        options["limits"] = limits.as_dict()
    return wire.encode_options(options)


def _checked(about: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        if not isinstance(about, Mapping):
            raise TypeError(f"it is of type {type(about).__name__}")
        size = len(encode_about(about))
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"about is {about!r:.100}: it must be a dict of JSON values: {flaw(error)}") from None
    if size > MAX_ABOUT:
        raise SettingError(f"about has {size} bytes as JSON: the limit is {MAX_ABOUT}")
    return about


class WorkerConnection:
    """A session, its socket, and the messages that the broker has not accepted yet.

    The socket is replaced when the connection is lost, which is logged at `level`.  If that is WARNING, a missing
    broker is logged too, and when the worker begins to serve.  Not thread-safe.

    With several brokers, a monitor reports when the connection ends, and the session moves on.  With one, ZeroMQ
    reconnects, unless the worker is leaving.
    """

    def __init__(
        self,
        session: WorkerSession,
        context: Context,
        keys: ClientKeys | None = None,
        level: int = logging.WARNING,
    ) -> None:
        self.session = session
        self.stalled = False
        """Whether the broker does not keep up with what is sent."""
        self.more = False
        """Whether there is more to receive, so that `step` is due immediately."""
        self.flushed_at = 0.0
        self._several = session.failover.several
        self._endpoint = ""  # of the socket
        self._context = context
        self._keys = keys
        self._level = level
        self._dealer: MonitoredDealer | None = None
        self._socket: zmq.Socket[bytes] | None = None
        # The monitor reports `MONITORED` events until the broker answers, or with several until the connection ends.
        self.monitor_descriptor = -1
        self._probe: Probe | None = None  # finds out whether the first broker is back
        self._connected = False  # the connection is established
        self._announce_at = math.inf  # when to log that the worker serves, if nothing is heard earlier
        self._left = ""  # why the last broker that answered was left; to be logged when the next one answers
        self._left_at = ""
        self._left_level = logging.INFO
        self._waiting = False  # it was logged that there is no broker, and none has answered since
        self._unsent: list[Message] = []
        self._stalled_since = 0.0
        self._broker_restarts = False  # it said DISCONNECT, and has not been heard since
        self._end = ConnectionEnded("")  # how the last connection ended

    def opened(self, descriptor: int) -> None:
        """Called with a new descriptor: when it is readable, `step` is due."""

    def closing(self, descriptor: int) -> None:
        """Called with a descriptor that is about to be closed."""

    def cancelled(self, request: Request) -> None:
        """Called when the handler of a request should stop."""

    def stuck(self, request: Request) -> None:
        """Called when a handler has exceeded `handler_timeout`; its request goes to another worker."""

    def open(self) -> None:
        """Open a socket.  Raises `SettingError` if the endpoint is invalid."""
        monitored = MONITORED if self._level == logging.WARNING else 0
        options: dict[int, int] = {zmq.LINGER: LINGER_MS}
        if self._several:
            monitored, options[zmq.RECONNECT_IVL] = MONITORED, ONE_CONNECTION_MS
        self._endpoint = self.session.failover.endpoint
        self._dealer = made = MonitoredDealer(self._context, self._endpoint, options, self._keys, monitored)
        self._socket = made.socket
        self.opened(made.descriptor)
        self._connected = False
        self._announce_at = math.inf
        if monitored:
            self._monitor_opened(made)
        self.session.connected(time.monotonic())

    def disconnect(self, now: float) -> None:
        """Take no more requests, and disconnect for good when those in progress are finished.

        From now on a monitor tells whether the broker is gone: it is not waited for until it counts as silent.
        """
        self.session.leave(now)
        opened = self._dealer
        if opened is not None and self.monitor_descriptor < 0:
            with suppress(zmq.ZMQError):  # too many sockets, or the context was terminated
                opened.watch(MONITORED)
                self._monitor_opened(opened)

    def step(self, now: float) -> None:
        """Do everything that is due: connect, send, and receive.

        A ZeroMQ socket's descriptor only signals changes, and sending may consume a signal, so every send must be
        followed by an attempt to receive.
        """
        try:
            session = self.session
            if self._socket is None:
                due = session.deadline()
                if due is None or now < due:
                    return
                self._reopen(now)
            while True:
                self.flush(now)
                self._receive(now)
                if self.monitor_descriptor >= 0:
                    self._ask_monitor(now)
                if self._announce_at < math.inf and (session.heartbeats.heard or now >= self._announce_at):
                    self._announce()
                if self._several:
                    self._step_probe(now)
                due = session.deadline()
                if due is not None and now >= due:  # after receiving: this process may have been suspended
                    session.tick(now)
                done = not session.unsent and (session.state.connected or self._socket is None or self.stalled)
                if done or self.more:
                    break
            self.tell(now)
        except zmq.ContextTerminated:
            self._terminated(now)

    def receive_requests(self, now: float) -> bool:
        """Receive what has arrived.  Return whether a handler can begin: then `step` is due when it has ended.

        If it returns False, `step` is due immediately.
        """
        if self._announce_at < math.inf:
            return False
        self.flushed_at = now  # the replies to these requests are sent together
        try:
            self._receive(now)
        except zmq.ContextTerminated:  # `step` ends the connection
            return False
        return self.session.to_begin > 0 and not self.session.unsent

    def _receive(self, now: float) -> None:
        session = self.session
        while self._socket is not None and session.state.connected and (message := receive(self._socket)):
            session.receive(message, now)

    def flush(self, now: float) -> None:
        """Send as much as the broker accepts.  Close the socket if the connection has ended."""
        socket, session = self._socket, self.session
        if socket is None:
            return
        self.flushed_at = now
        try:
            self._send(socket, now)
        except zmq.ContextTerminated:
            self._terminated(now)
            return
        if session.state.connected:
            return
        self.tell(now)
        stalled = now - self._stalled_since
        if not (self._end.keep_messages and self._unsent and stalled <= session.heartbeats.patience):
            self._lose(now)

    def _send(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        unsent = self._unsent
        unsent += self.session.take_messages()
        if not unsent:
            return
        sent = 0
        while sent < len(unsent) and not send(socket, unsent[sent]):
            sent += 1
        del unsent[:sent]
        if unsent or self.stalled:
            self._note_progress(bool(sent), now)

    def tell(self, now: float) -> None:
        """Act on the session's events."""
        for event in self.session.take_events():
            if isinstance(event, Cancelled):
                self.cancelled(event.request)
            elif isinstance(event, HandlerStuck):
                self.stuck(event.request)
            else:
                self._end = event

    @property
    def ended(self) -> bool:
        """Whether the connection has ended for good."""
        return self._socket is None and self.session.state is CLOSED

    @property
    def registered(self) -> bool:
        """Whether the broker knows the worker: it has answered READY."""
        return self.session.heartbeats.heard and self.session.state.connected

    @property
    def served(self) -> int:
        """How many requests have ended."""
        return self.session.served

    @property
    def requests(self) -> list[Request]:
        """The requests that it holds."""
        return list(self.session.held.values())

    def finish(self, request: Request, outcome: list[bytes] | Failed, now: float) -> None:
        """End `request` with the result or the failure of its handler."""
        if isinstance(outcome, Failed):
            accepted = self.session.error(request, outcome.code, outcome.text, now, outcome.detail)
        else:
            accepted = self.session.final(request, outcome, now)
        if not accepted:
            text = "%s: dropped a late reply: its connection was lost meanwhile"
            log.warning(text, request.service, extra=fields_of(request))

    def crashed(self, request: Request, error: BaseException) -> None:
        """End `request` after an error in our own code: its client gets ERROR 500."""
        now = time.monotonic()
        text = "%s: an error in zmdp itself, please report it"
        log.error(text, request.service, exc_info=error, extra=fields_of(request))
        reported = f"an error in zmdp itself, at the worker: {error!r:.200}"
        try:
            if self.session.error(request, Code.FAILED.value, reported, now) or request.cancelled:
                return
        except Exception as second:  # noqa: BLE001 - whatever it is, the broker ends the request
            error = second
        # Nothing was sent.  If the session still holds it, the others can be finished before the connection ends.
        if request.address in self.session.held:
            self.session.abandon(request, now, ended=True)
        else:
            self.reset(error, now)

    def reset(self, error: BaseException, now: float) -> None:
        """Drop the connection after an error in our own code: the broker gives its requests to other workers."""
        name = self.session.service.decode()
        log.error("%s: an error in zmdp itself, please report it; reconnecting", name, exc_info=error)
        try:
            self.session.lose("an error in zmdp itself", now, wait=True)
            self.tell(now)
        finally:
            self._drop(0)

    def due(self) -> float:
        """Return when to call `step` if nothing arrives earlier; inf for never."""
        if self.more:
            return 0.0
        if self.stalled:
            return self.flushed_at + SEND_RETRY_SECONDS
        due = self.session.deadline()
        return self._announce_at if due is None else min(due, self._announce_at)

    def close(self) -> None:
        """Close the socket immediately, without telling the broker."""
        self._drop(0)

    def _ask_monitor(self, now: float) -> None:
        """Note that the connection is established, or log at the first failure that the worker waits for a broker.

        If a broker refuses the worker, lose the connection: ZeroMQ would not connect again.  With several brokers, lose
        it also if nobody answers, and when it ends.
        """
        session, dealer = self.session, self._dealer
        if dealer is None:
            return
        if session.heartbeats.heard and not self._connected:  # inproc:// has no events
            self._established(now)
        while session.state.connected and (report := dealer.report()) is not None:
            if self._connected:
                if report.event & ENDED:  # or an attempt to connect again has failed
                    while session.state.connected and (last := receive(dealer.socket)):  # what arrived before the end
                        session.receive(last, now)
                    if session.state.connected:
                        session.lose("it closed the connection", now)
            elif report.established:
                self._established(now)
            elif report.refused or self._several:
                session.lose(dealer.why(report), now)
            elif not self._waiting:
                level = logging.INFO if self._broker_restarts else logging.WARNING
                self._wait_for_broker(level, dealer.why(report))

    def _established(self, now: float) -> None:
        """Note that a broker has accepted the connection; it may still refuse the worker."""
        self._connected, self._waiting = True, False
        self._announce_at = now + REFUSAL_SECONDS
        if not self._several:
            self._end_monitor()

    def _announce(self) -> None:
        """Log that the worker serves: the broker has not refused it."""
        name = self.session.service.decode()
        self._announce_at = math.inf
        if self._left and self._left_at != self._endpoint:
            log.log(self._left_level, "%s: moved to %s: %s", name, self._endpoint, self._left)
        elif self._level == logging.WARNING:
            log.info("%s: serving at %s", name, self._endpoint)
        self._left = ""

    def _wait_for_broker(self, level: int, reason: str) -> None:
        """Log that there is no broker, once until one answers."""
        self._waiting = True
        where = " or ".join(self.session.failover.endpoints)
        log.log(level, "%s: waiting for a broker at %s: %s", self.session.service.decode(), where, reason)

    def _step_probe(self, now: float) -> None:
        """Find out whether the first broker is back, when that is due, and tell the session."""
        session = self.session
        if self._probe is None:
            endpoint = session.take_probe(now)
            if endpoint is None:
                return
            try:
                self._probe = Probe(endpoint, self._context, self._keys)
            except (zmq.ZMQError, SettingError):  # for example, too many open files
                session.probed(False, now)
                return
            self.opened(self._probe.descriptor)
        answered = self._probe.outcome(now)
        if answered is not None:
            self._end_probe()
            session.probed(answered, now)

    def _end_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            self.closing(probe.descriptor)
            probe.close()

    def _monitor_opened(self, dealer: MonitoredDealer) -> None:
        self.monitor_descriptor = dealer.monitor_descriptor
        self.opened(self.monitor_descriptor)

    def _end_monitor(self) -> None:
        if self.monitor_descriptor >= 0 and self._dealer is not None:
            self.closing(self.monitor_descriptor)
            self.monitor_descriptor = -1
            self._dealer.unwatch()

    def _note_progress(self, progress: bool, now: float) -> None:
        if progress or not self.stalled:
            self._stalled_since = now
        self.stalled = bool(self._unsent)
        session = self.session
        if self.stalled and session.state.connected and now - self._stalled_since > session.heartbeats.patience:
            session.lose("the broker does not accept messages", now)

    def _reopen(self, now: float) -> None:
        try:
            self.open()
        except (zmq.ZMQError, SettingError, BindError) as error:  # for example, too many open files
            if isinstance(error, zmq.ContextTerminated):
                raise
            self.session.lose(str(error), now)
            self.tell(now)
            self._lose(now)

    def _lose(self, now: float) -> None:
        """Close the socket of a lost connection, and log the loss."""
        session, end = self.session, self._end
        if not session.state.leaving:
            # A broker that shuts down cleanly sends DISCONNECT: nothing to warn about.  A worker that reconnects at
            # once may still reach it, and is sent DISCONNECT again.
            level = self._level
            if end.refused and level == logging.WARNING:
                level = logging.ERROR
            elif self._waiting or (self._broker_restarts and not session.heartbeats.heard):
                level = logging.DEBUG  # it was logged that there is no broker
            elif end.dismissed:
                level = min(level, logging.INFO)
            self._broker_restarts = end.dismissed
            delay = session.failover.retry_at - now
            if session.failover.moved:
                self._log_move(level, delay)
            else:
                when = f"in {delay:.1f} s" if delay >= 0.05 else "now"
                name, endpoint = session.service.decode(), session.failover.endpoint
                log.log(level, "%s: %s; reconnecting to %s %s", name, end.reason, endpoint, when)
        self._drop(LINGER_MS if end.keep_messages else 0)

    def _log_move(self, level: int, delay: float) -> None:
        """Log that the session moves to another broker: once that answers, or now if none does."""
        session = self.session
        if self._end.refused:
            log.log(level, "%s: %s", session.service.decode(), session.failover.moved)
        if self._connected or not self._left:
            self._left, self._left_level, self._left_at = session.failover.moved, level, self._endpoint
        if delay > 0 and not self._waiting:
            self._wait_for_broker(self._left_level, self._left)

    def _drop(self, linger: int) -> None:
        self._end_monitor()
        self._end_probe()
        dropped, self._dealer, self._socket = self._dealer, None, None
        self._unsent.clear()
        self._announce_at = math.inf
        self.stalled = False
        if dropped is not None:
            self.closing(dropped.descriptor)
            dropped.close(linger)

    def _terminated(self, now: float) -> None:
        log.warning("%s: the ZeroMQ context was terminated", self.session.service.decode())
        self.session.close("the ZeroMQ context was terminated", now)
        self.tell(now)
        self._drop(0)

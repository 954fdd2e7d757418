"""A worker session on a DEALER socket, shared by the threaded and the asyncio worker."""

import logging
import os
import socket as sockets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from .. import __version__
from ..mdp import wire
from ..mdp.errors import SettingError
from ..mdp.keys import ClientKeys
from ..mdp.transport.multipart import receive, send
from ..mdp.transport.reach import HANDSHAKE_FAILED, REFUSED, why_refused
from ..mdp.transport.sockets import Context, dealer
from ..mdp.wire import Message
from .handling import Failed
from .request import Request
from .session import WorkerSession

LINGER_MS: Final = 3_000
"""Time for the last messages (a FINAL, DISCONNECT), which may be large, to be sent after closing."""
SEND_RETRY_SECONDS: Final = 0.01
"""Time after which a message that the broker did not accept is sent again."""
FLUSH_SECONDS: Final = 0.0005
"""Time after which replies are sent even if more are about to follow."""
MONITORED: Final = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.CONNECT_RETRIED) | HANDSHAKE_FAILED
"""Events that show whether a broker is there: the connection is established, or an attempt has failed."""

log = logging.getLogger("zmdp.worker")


def ready_options(name: str, *, dialect: bool = False) -> bytes:
    """Return the options of READY (X1): what operators see of this process, and whether it wants clients' `dialect`."""
    name = name or Path(sys.argv[0]).name
    about: dict[str, Any] = {
        "name": name[: wire.MAX_NAME],
        "host": sockets.gethostname(),
        "pid": os.getpid(),
        "version": __version__,
    }
    if dialect:
        about["dialect"] = True
    return wire.encode_options(about)


class Connection:
    """A session, its socket, and the messages that the broker has not accepted yet.

    The socket is replaced when the connection is lost, which is logged at `level`.  If that is WARNING, a missing
    broker is logged too, and when the worker begins to serve.  Not thread-safe.
    """

    def __init__(
        self,
        session: WorkerSession,
        endpoint: str,
        context: Context,
        keys: ClientKeys | None = None,
        level: int = logging.WARNING,
    ) -> None:
        self.session = session
        self.stalled = False
        """Whether the broker does not keep up with what is sent."""
        self.flushed_at = 0.0
        self._endpoint = endpoint
        self._context = context
        self._keys = keys
        self._level = level
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._monitor: zmq.Socket[bytes] | None = None  # until the broker answers: reports `MONITORED` events
        self._monitor_descriptor = -1
        self._waiting = False  # it was logged that there is no broker, and none has answered since
        self._unsent: list[Message] = []
        self._stalled_since = 0.0
        self._broker_restarts = False  # it said DISCONNECT, and has not been heard since

    def opened(self, descriptor: int) -> None:
        """Called with a new descriptor: when it is readable, `step` is due."""

    def closing(self, descriptor: int) -> None:
        """Called with a descriptor that is about to be closed."""

    def open(self) -> None:
        """Open a socket.  Raises `SettingError` if the endpoint is invalid."""
        monitored = MONITORED if self._level == logging.WARNING else 0
        self._socket = dealer(
            self._context, self._endpoint, {zmq.LINGER: LINGER_MS}, keys=self._keys, monitored=monitored
        )
        self._descriptor = int(self._socket.get(zmq.FD))
        self.opened(self._descriptor)
        if monitored:
            self._monitor = self._socket.get_monitor_socket()
            self._monitor_descriptor = int(self._monitor.get(zmq.FD))
            self.opened(self._monitor_descriptor)
        self.session.connected(time.monotonic())

    def step(self, now: float) -> None:
        """Do everything that is due: connect, send, and receive.

        A ZeroMQ socket's descriptor only signals changes, and sending may consume a signal, so every send must be
        followed by an attempt to receive.
        """
        try:
            session = self.session
            if self._socket is None:
                if now < session.connect_at():
                    return
                self._reopen(now)
            while True:
                self.flush(now)
                while self._socket is not None and session.lost is None and (message := receive(self._socket)):
                    session.receive(message, now)
                if self._monitor is not None:
                    self._look_for_broker(self._monitor, now)
                if now >= session.deadline():  # after receiving: this process may have been suspended
                    session.tick(now)
                if not session.unsent and (session.lost is None or self._socket is None or self.stalled):
                    break
        except zmq.ContextTerminated:
            self._terminated(now)

    def flush(self, now: float) -> None:
        """Send as much as the broker accepts.  Close the socket if the session has lost its connection."""
        socket, session, unsent = self._socket, self.session, self._unsent
        if socket is None:
            return
        self.flushed_at = now
        unsent += session.take_messages()
        if unsent:
            sent = 0
            try:
                while sent < len(unsent) and not send(socket, unsent[sent]):
                    sent += 1
            except zmq.ContextTerminated:
                self._terminated(now)
                return
            del unsent[:sent]
            self._note_progress(bool(sent), now)
        if session.lost is not None and not (
            session.keep_messages and unsent and now - self._stalled_since <= session.heartbeats.patience
        ):
            self._lose(now)

    @property
    def ended(self) -> bool:
        """Whether the connection has ended for good."""
        return self._socket is None and self.session.ended

    def finish(self, request: Request, outcome: list[bytes] | Failed, now: float) -> None:
        """End `request` with the result or the failure of its handler."""
        if isinstance(outcome, Failed):
            accepted = self.session.error(request, outcome.code, outcome.text, now, outcome.detail)
        else:
            accepted = self.session.final(request, outcome, now)
        if not accepted:
            log.warning("%s: dropped a late reply: its connection was lost meanwhile", request.service)

    def due(self) -> float:
        """Return when to call `step` if nothing arrives earlier."""
        return self.flushed_at + SEND_RETRY_SECONDS if self.stalled else self.session.deadline()

    def close(self) -> None:
        """Close the socket immediately, without telling the broker."""
        self._drop(0)

    def _look_for_broker(self, monitor: zmq.Socket[bytes], now: float) -> None:
        """Log when the worker begins to serve, or at the first failure that it waits for a broker.

        If a broker refuses the worker, lose the connection: ZeroMQ would not connect again.
        """
        name, connected = self.session.service.decode(), self.session.heard  # inproc:// has no events
        while not connected and self.session.lost is None and (message := receive(monitor)):
            event = parse_monitor_message(message)
            refusal = why_refused(event["event"], event["value"], self._keys)
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                connected = True
            elif event["event"] & REFUSED:
                self.session.lose(str(refusal), now)
            elif not self._waiting:
                self._waiting = True
                level = logging.INFO if self._broker_restarts else logging.WARNING
                nothing = f"nothing answers there. `mdp-broker --bind {self._endpoint}` starts one"
                log.log(level, "%s: waiting for a broker at %s: %s", name, self._endpoint, refusal or nothing)
        if connected:
            self._waiting = False
            log.info("%s: serving at %s", name, self._endpoint)
            self._end_monitor()

    def _end_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            self.closing(self._monitor_descriptor)
            with suppress(zmq.ZMQError):  # the context was terminated
                if self._socket is not None:
                    self._socket.disable_monitor()
            monitor.close(0)

    def _note_progress(self, progress: bool, now: float) -> None:
        if progress or not self.stalled:
            self._stalled_since = now
        self.stalled = bool(self._unsent)
        if self.stalled and self.session.lost is None and now - self._stalled_since > self.session.heartbeats.patience:
            self.session.lose("the broker does not accept messages", now)

    def _reopen(self, now: float) -> None:
        try:
            self.open()
        except (zmq.ZMQError, SettingError) as error:  # for example, too many open files
            if isinstance(error, zmq.ContextTerminated):
                raise
            self.session.lose(str(error), now)
            self._lose(now)

    def _lose(self, now: float) -> None:
        """Close the socket of a lost connection, and log the loss."""
        session = self.session
        if not session.leaving:
            # A broker that shuts down cleanly sends DISCONNECT: nothing to warn about.  A worker that reconnects at
            # once may still reach it, and is sent DISCONNECT again.
            level = self._level
            if session.refused and level == logging.WARNING:
                level = logging.ERROR
            elif session.dismissed:
                level = min(level, logging.INFO)
            elif self._broker_restarts and not session.heard:
                level = logging.DEBUG
            self._broker_restarts = session.dismissed
            delay = session.retry_at - now
            when = f"in {delay:.1f} s" if delay >= 0.05 else "now"
            log.log(
                level, "%s: %s; reconnecting to %s %s", session.service.decode(), session.lost, self._endpoint, when
            )
        self._drop(LINGER_MS if session.keep_messages else 0)

    def _drop(self, linger: int) -> None:
        self._end_monitor()
        socket, self._socket = self._socket, None
        self._unsent.clear()
        self.stalled = False
        if socket is not None:
            self.closing(self._descriptor)
            socket.close(linger)

    def _terminated(self, now: float) -> None:
        log.warning("%s: the ZeroMQ context was terminated", self.session.service.decode())
        self.session.leaving = True
        self.session.lose("the ZeroMQ context was terminated", now)
        self._drop(0)

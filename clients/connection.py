"""An X1 client's connection: the session on a DEALER, which is replaced whenever it is lost."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..mdp.errors import SettingError
from ..mdp.multipart import receive, send
from .session import ClientSession

BATCH: Final = 1000
"""Messages taken in before what they bring is handed out."""
LINGER: Final = 100
"""Milliseconds that the last messages (CANCEL) have to get out."""
TICK: Final = 1.0
"""Seconds that what is due may wait while more and more arrives."""
NEVER: Final = 3_600_000
"""Milliseconds until ZeroMQ would connect again by itself: long after the socket has been replaced."""


class Connection:
    """A connection to one of several brokers; each time it is lost, to the next of them.

    ZeroMQ would connect again by itself and without a word, to a broker that knows nothing of what is outstanding.  So
    a socket is used for one connection only: a monitor tells when that ends, and then another socket is opened.

    Raises `SettingError` for an endpoint that is none.
    """

    def __init__(
        self, session: ClientSession, endpoints: Sequence[str], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self.session = session
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        """Readable when the connection has ended, or could not be made."""
        self.rung = False
        """For the shell: set when the monitor's descriptor is readable.  To ask the monitor each time would cost more
        than all else."""
        self._endpoints = endpoints
        self._context = context
        self._turn = 0
        self._ticked_at = 0.0
        self.before_drop: Callable[[], None] = _nothing
        """For the shell: called before the socket is closed."""
        for endpoint in reversed(endpoints):  # the first is the one that stays
            self.drop()
            try:
                self._open(endpoint, time.monotonic())
            except zmq.ZMQError as error:
                raise SettingError(f"{endpoint!r} is no endpoint ({error}): try tcp://127.0.0.1:5555") from None

    def step(self, now: float) -> bool:
        """Send, take in what has arrived, do what is due, and hand out.  Whether to step again at once.

        When it returns False, all has been taken in that somebody waits for: the socket's descriptor, which tells of
        changes only, will tell of what comes from now on.
        """
        session = self.session
        self._send(now)
        more, socket = False, self.socket
        if socket is not None:
            for _ in range(BATCH):
                message = receive(socket)
                if message is None:
                    break
                session.receive(message, now)
                if not session.outstanding:
                    break  # a look whether there is more would be for nobody
            else:
                more = True
            if self.rung and not more:
                self._look_for_the_end(socket, now)
        if not more or now - self._ticked_at > TICK:  # nothing is late whose reply is there already
            self._ticked_at = now
            session.tick(now)
        self.hand_out()
        if session.messages or session.lost is not None:
            more |= self._send(now)  # while that was done, something may have arrived without a sign
            self.hand_out()
        return more

    def flush(self, now: float) -> None:
        """Send what is to be sent, connect again if that is due, and hand out.  To be followed by a step."""
        self._send(now)
        self.hand_out()

    def _send(self, now: float) -> bool:
        """Send what is to be sent; connect again if that is due.  Whether anything was sent."""
        session = self.session
        if session.lost is not None:
            self.drop()
            if session.outstanding and now >= session.retry_at:
                self._turn += 1
                try:
                    self._open(self._endpoints[self._turn % len(self._endpoints)], now)
                except zmq.ZMQError as error:  # no file descriptor left, for example
                    session.lose(str(error), now)
        if not session.messages or self.socket is None:
            return False
        messages, session.messages = session.messages, []
        for message in messages:
            if send(self.socket, message):  # there is no bound: it is not connected any more
                session.lose("the connection was closed", now)
                self.drop()
                break
        return True

    def hand_out(self) -> None:
        """Deliver what has come of the requests."""
        session = self.session
        while session.events:
            events, session.events = session.events, []
            for call, outcome in events:
                call.deliver(outcome)

    def _look_for_the_end(self, socket: zmq.Socket[bytes], now: float) -> None:
        """The monitor's descriptor told of something: lose the connection if it has ended."""
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
            socket.set(zmq.RECONNECT_IVL, NEVER)
            socket.set(zmq.SNDHWM, 0)  # what is sent is bounded by what may be outstanding
            self.monitor = socket.get_monitor_socket(zmq.Event.DISCONNECTED | zmq.Event.CLOSED)
            socket.connect(endpoint)
        except zmq.ZMQError:
            self.socket = socket
            self.drop()
            raise
        self.socket = socket
        self.rung = True  # its descriptor tells of nothing before the first look
        self.session.connected(endpoint, now)

    def drop(self, linger: int = 0) -> None:
        """Close the socket, if there is one."""
        if self.socket is not None:
            self.before_drop()
        socket, self.socket = self.socket, None
        monitor, self.monitor = self.monitor, None
        if socket is not None:
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(0)
            socket.close(linger)


def _nothing() -> None:
    pass

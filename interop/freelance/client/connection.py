"""A Freelance client's connections: its session on one ROUTER socket, which ZeroMQ connects to every server."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from ....mdp.limits import Limits
from ....mdp.security.keys import ClientKeys
from ....mdp.transport.multipart import receive, send
from ....mdp.transport.reach import HANDSHAKE_FAILED, why_refused
from ....mdp.transport.sockets import invalid_endpoint, new_socket, use_family
from .session import FreelanceSession

MAX_MESSAGES: Final = 100
"""Messages processed before their outcomes are delivered."""
MAX_UNSENT: Final = 10_000
"""Messages that ZeroMQ keeps for a server that does not keep up."""
REFUSED_RETRY_SECONDS: Final = 1.0
"""Time after which a server that has refused this client is tried again: ZeroMQ itself would not."""
_OPTIONS: Final[dict[int, int]] = {
    zmq.LINGER: 0,
    zmq.ROUTER_MANDATORY: 1,
    zmq.ROUTER_HANDOVER: 1,  # a server that comes back replaces its old connection, even if that is still there
    zmq.SNDHWM: MAX_UNSENT,
    zmq.MAXMSGSIZE: Limits().max_message,
    zmq.RECONNECT_IVL: 100,  # milliseconds between attempts to connect to a server, at first and at most
    zmq.RECONNECT_IVL_MAX: 1_000,
}
MONITORED: Final = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED) | HANDSHAKE_FAILED


class _Descriptors:
    """The descriptors of the servers' connections, by which a monitor names them; `multipart.receive` reports them."""

    secured = False
    user = b""
    max_frames = Limits().max_frames

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}

    def add(self, identity: bytes, descriptor: int) -> None:
        """Note the descriptor of a connection from which the first message has arrived."""
        self.known[identity] = descriptor

    def offender(self, descriptor: int) -> None:
        """Ignore a message of too many frames: its rest decodes to a reply that belongs to no request."""

    def forget(self, descriptor: int) -> bytes | None:
        """Return the server whose connection had this descriptor, and forget it."""
        for identity, known in self.known.items():
            if known == descriptor:
                del self.known[identity]
                return identity
        return None


class FreelanceConnection:
    """The socket, and the monitor that reports when a connection is made or ends.  Not thread-safe.

    ZeroMQ itself would keep messages for a server that is gone, and send them when it is back.  So when a connection
    ends, its endpoint is disconnected, and connected again.  (The option IMMEDIATE would do that, but it also discards
    the replies that have arrived and were not read yet.)

    Raises `SettingError` for an invalid endpoint.
    """

    def __init__(
        self,
        session: FreelanceSession,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClientKeys | None = None,
    ) -> None:
        self.session = session
        self._keys = keys
        self._reconnect_at = math.inf
        self._ended: list[int] = []
        """The descriptors of connections that have ended, and may have brought replies before."""
        self._descriptors = _Descriptors()
        self._socket = new_socket(context, zmq.ROUTER, _OPTIONS)
        try:
            if keys is not None:
                keys.apply(self._socket)
            self._monitor = self._socket.get_monitor_socket(MONITORED)
        except BaseException:
            self._socket.close(0)
            raise
        for endpoint in dict.fromkeys(endpoints):
            try:
                use_family(self._socket, endpoint)
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                self.close()
                raise invalid_endpoint(endpoint, error) from None
        self.descriptors = (int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD)))
        """When one of them is readable, `step` is due.  They report changes only, so `step` reads everything."""

    def step(self, now: float) -> bool:
        """Do everything that is due: receive and send.  Return whether to call it again immediately."""
        session, socket = self.session, self._socket
        if now >= self._reconnect_at:
            self._reconnect()
        while (event := receive(self._monitor)) is not None:
            self._happened(parse_monitor_message(event), now)
        more = True
        for _ in range(MAX_MESSAGES):
            message = receive(socket, False, self._descriptors)
            if message is None:
                more = False
                break
            session.receive(message, now)
        if self._ended and not more:
            self._end_connections(now)
        # After receiving, because this process may have been suspended while the servers answered.
        if not more and now >= session.deadline():
            session.tick(now)
        while messages := session.take_messages():
            for message in messages:
                session.sent(message, send(socket, message), now)
            more = True  # sending may consume the descriptor's signal that something has arrived
        return more

    def due(self) -> float:
        """Return when to call `step` if nothing arrives earlier."""
        return min(self.session.deadline(), self._reconnect_at)

    def _reconnect(self) -> None:
        self._reconnect_at = math.inf
        for endpoint in self.session.unusable():
            self._replace(endpoint)

    def _replace(self, endpoint: str) -> None:
        """Connect to a server again, without anything that waits to be sent to it."""
        with suppress(zmq.ZMQError):  # ZeroMQ has given the endpoint up
            self._socket.disconnect(endpoint)
        use_family(self._socket, endpoint)
        self._socket.connect(endpoint)

    def _end_connections(self, now: float) -> None:
        """Tell the session of connections that have ended, after everything has been received from them."""
        descriptors, self._ended = self._ended, []
        for descriptor in descriptors:
            identity = self._descriptors.forget(descriptor)
            # A server that has not been heard over its connection is not known by its descriptor.
            suspects = self.session.unheard(self._descriptors.known) if identity is None else [identity]
            for each in suspects:
                self._replace(each.decode())
                self.session.disconnected(each, now)

    def _happened(self, event: Any, now: float) -> None:
        kind, value = event["event"], event["value"]
        if kind == zmq.Event.DISCONNECTED:
            self._ended.append(value)
            return
        if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.session.trouble = ""
        else:
            self.session.trouble = why_refused(kind, value, self._keys) or ""
            self._reconnect_at = min(self._reconnect_at, now + REFUSED_RETRY_SECONDS)
            return
        self.session.probe(now)

    def close(self) -> None:
        """Close the socket."""
        with suppress(zmq.ZMQError):  # the context was terminated
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

"""Find out whether a broker answers again, without waiting for it."""

from typing import Final

import zmq

from .. import wire
from ..security.keys import ClientKeys
from .failover import PROBE_TIMEOUT_SECONDS
from .multipart import receive, send
from .sockets import Context, dealer

_OPTIONS: Final[dict[int, int]] = {zmq.LINGER: 0, zmq.RECONNECT_IVL: 100}


class Probe:
    """One attempt to get a sign of life from the broker at `endpoint`, over a connection of its own.

    It sends an X1 client's HEARTBEAT.  A broker that takes requests answers with a HEARTBEAT, one that drains with a
    DISCONNECT.  ZeroMQ repeats a connection that is refused, so a broker that is just starting is found as well.

    Raises `SettingError` for an invalid endpoint, or if no socket can be opened.
    """

    def __init__(self, endpoint: str, context: Context, keys: ClientKeys | None = None) -> None:
        self._socket: zmq.Socket[bytes] | None = dealer(context, endpoint, _OPTIONS, keys=keys)
        self._outcome: bool | None = None
        self._until: float | None = None
        self.descriptor = int(self._socket.get(zmq.FD))
        """Reports, by changes only, that `outcome` may have changed: `outcome` must be called at least once before."""
        send(self._socket, wire.heartbeat((b"",), wire.CX1))

    def outcome(self, now: float) -> bool | None:
        """Return whether the broker takes requests, or None if that is not known yet.

        The outcome is known at the latest `PROBE_TIMEOUT_SECONDS` after the first call.
        """
        if self._until is None:
            self._until = now + PROBE_TIMEOUT_SECONDS
        while self._outcome is None and self._socket is not None:
            message = receive(self._socket)
            if message is None:
                break
            answer = wire.decode_broker(message)
            if isinstance(answer, wire.Batched) and answer.header == wire.CX1:
                self._outcome = answer.bare  # else it is a DISCONNECT
        if self._outcome is None and now >= self._until:
            self._outcome = False
        return self._outcome

    def close(self) -> None:
        """Close the connection.  An outcome that is not known by then stays unknown."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(0)

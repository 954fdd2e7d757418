"""The socket of one connection of an X1 client to a broker."""

from contextlib import suppress
from typing import Final

import zmq

from ..mdp.keys import ClientKeys
from ..mdp.transport.reach import ENDED, HANDSHAKE_FAILED
from ..mdp.transport.sockets import ONE_CONNECTION_MS, connect, new_socket
from .broker_connection import BrokerConnection

MAX_UNREAD: Final = 64
"""Messages that wait in libzmq's memory until they are read; each has many replies, or a large one.

Reading them wakes libzmq's thread each time that half of these have been read, so few of them cost more."""
MAX_UNREAD_LARGE: Final = 8
"""The same, once megabytes have waited."""
_OPTIONS: Final[dict[int, int]] = {
    zmq.RECONNECT_IVL: ONE_CONNECTION_MS,
    zmq.RCVHWM: MAX_UNREAD,
    zmq.SNDHWM: 0,  # max_outstanding limits what is sent
}


class BrokerSocket:
    """A DEALER socket for one connection, and the monitor that reports the end of it.

    Raises `zmq.ZMQError` or `SettingError` if it cannot be opened.
    """

    connection: BrokerConnection
    """What the session knows of the connection; set once it has been told."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]], keys: ClientKeys | None) -> None:
        self.endpoint = endpoint
        self.ended = False
        """The monitor has reported the end of the connection, which it does only once."""
        self.socket = new_socket(context, zmq.DEALER)
        connect(self.socket, endpoint, _OPTIONS, keys=keys, monitored=ENDED | HANDSHAKE_FAILED)
        self.monitor = self.socket.get_monitor_socket()
        """Readable when the connection has ended or could not be established."""

    def expect_large(self) -> None:
        """Have libzmq read less ahead from now on: large replies come over this connection."""
        self.socket.set(zmq.RCVHWM, MAX_UNREAD_LARGE)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket.  The last messages may take so many milliseconds to leave."""
        with suppress(zmq.ZMQError):  # its context was terminated
            self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

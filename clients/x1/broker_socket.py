"""The socket of one connection of an X1 client to a broker."""

from typing import Final

import zmq

from ...mdp.security.keys import ClientKeys
from ...mdp.transport.monitored import MonitoredDealer
from ...mdp.transport.reach import ENDED, HANDSHAKE_FAILED
from ...mdp.transport.sockets import ONE_CONNECTION_MS, Context
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


class BrokerSocket(MonitoredDealer):
    """A DEALER socket for one connection, whose monitor reports that it has ended or could not be established."""

    connection: BrokerConnection
    """What the session knows of the connection; set once it has been told."""

    def __init__(self, endpoint: str, context: Context, keys: ClientKeys | None) -> None:
        super().__init__(context, endpoint, _OPTIONS, keys, ENDED | HANDSHAKE_FAILED)
        self.ended = False
        """The monitor has reported the end of the connection, which it does only once."""

    def expect_large(self) -> None:
        """Have libzmq read less ahead from now on: large replies come over this connection."""
        self.socket.set(zmq.RCVHWM, MAX_UNREAD_LARGE)

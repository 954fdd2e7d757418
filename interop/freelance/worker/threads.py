"""A Freelance server for threads."""

import zmq

from ....mdp.transport.sockets import Context
from ....workers.threaded import ThreadedConnection
from .connection import Listening, ServerSocket
from .session import FreelanceServerSession


class ThreadedServer(ThreadedConnection):
    """A server's socket, the threads that run handlers, and an I/O thread."""

    def __init__(self, session: FreelanceServerSession, listening: Listening, context: Context) -> None:
        self._own_session = session
        self._listening = listening
        self._server: ServerSocket | None = None
        super().__init__(session, context)

    def open(self) -> None:
        """Listen.  Raises `BindError` if that is not possible."""
        self._server = opened = ServerSocket(self._own_session, self._listening, self._context)
        self._socket = opened.socket
        for descriptor in opened.descriptors:
            self.opened(descriptor)

    def _receive(self, now: float) -> None:
        if self._server is not None:
            self.more = self._server.receive(now)

    def _send(self, socket: "zmq.Socket[bytes]", now: float) -> None:
        if self._server is not None:
            self._server.flush()

    def _drop(self, linger: int) -> None:
        closed, self._server, self.more = self._server, None, False
        if closed is not None:
            for descriptor in closed.descriptors:
                self.closing(descriptor)
            closed.close(linger)
        super()._drop(linger)

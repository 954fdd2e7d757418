"""The sockets of Freelance servers: for asyncio, and for threads."""

import asyncio
import logging

import zmq

from ....mdp.transport.sockets import Context
from ....workers.aio_connection import AsyncConnection
from ....workers.aio_handling import BlockingWatch, HandlerCalls
from ....workers.threaded import ThreadedConnection
from .server_socket import Listening, ServerSocket
from .session import FreelanceServerSession


class AsyncServer(AsyncConnection):
    """A server's socket in an event loop, and the handlers of its requests."""

    def __init__(
        self,
        session: FreelanceServerSession,
        listening: Listening,
        context: Context,
        calls: HandlerCalls,
        loop: asyncio.AbstractEventLoop,
        watch: BlockingWatch,
    ) -> None:
        self._own_session = session
        self._listening = listening
        self._server: ServerSocket | None = None
        super().__init__(session, context, None, logging.WARNING, calls, loop, watch)

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

"""MDP/0.2 and 0.1 for asyncio: each outstanding request has a connection of its own (C4)."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import zmq

from ..mdp.errors import ClosedError, RequestRejected, RequestTimeout, ServiceError, StreamInterrupted
from ..mdp.transport.multipart import receive, send
from ..mdp.transport.polling import add_reader, remove_reader
from ..mdp.transport.reach import why_unreachable
from ..mdp.transport.sockets import dealer
from ..mdp.wire import Message
from .arguments import check_legacy
from .legacy_session import LegacySession
from .reply import Reply
from .retry import Retry
from .settings import ConnectionSettings

MAX_CONNECTIONS: Final = 500
"""A ZeroMQ context has 1023 sockets, and many processes may open only 1024 files; a socket takes two."""


class LegacyAsyncDialog:
    """Requests over MDP/0.2 or 0.1, made by tasks.  Idle connections are kept for the next request.

    A request is sent once.  When one times out, the next goes to the next broker, as `Endpoints` says.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._endpoints = settings.endpoints
        self._failovers = 0
        """Number of failovers.  A connection that was opened before the last one leads to a broker no longer in use."""
        self._answered = False
        """The broker in use has replied since the last failover."""
        self._idle: list[zmq.Socket[bytes]] = []
        self._busy: dict[zmq.Socket[bytes], asyncio.Event] = {}
        """The connections with an outstanding request, and the event that something has arrived there."""
        self._diagnoses: dict[str, asyncio.Future[str | None]] = {}
        """Attempts to find out why an endpoint does not answer, by endpoint."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._connections = asyncio.Semaphore(min(settings.max_outstanding, MAX_CONNECTIONS))
        for endpoint in self._endpoints.all:  # raises SettingError if one is invalid
            self._open(endpoint).close(0)

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._endpoints.current

    async def request(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""
        check_legacy(wait, headers, options, retry)
        session, endpoint, failovers = self._new_session(), self.endpoint, self._failovers
        now, limit = time.monotonic(), math.inf if timeout is None else timeout
        session.request(service, body, now, timeout=limit, deadline=now + limit)
        try:
            async with asyncio.timeout(timeout):
                await self._connections.acquire()
        except TimeoutError:
            raise await self._error(session, endpoint, failovers) from None
        try:
            async with aclosing(self._exchange(session)) as parts:
                return await anext(parts)
        finally:
            self._connections.release()

    async def stream(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        deadline: float | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """Send a request and yield each part of the reply as it arrives.  Raises the request's error."""
        check_legacy(wait, headers, options, deadline, retry)
        session = self._new_session()
        try:
            async with asyncio.timeout(timeout):
                await self._connections.acquire()
        except TimeoutError:
            name = service.decode()
            text = f"the request to service {name!r} was not sent: all connections were in use for {timeout:g} s"
            raise RequestTimeout(text, service=name) from None
        try:
            limit = math.inf if timeout is None else timeout
            session.request(service, body, time.monotonic(), timeout=limit, stream=True)
            async with aclosing(self._exchange(session)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._connections.release()

    def _new_session(self) -> LegacySession:
        return LegacySession(self._settings.protocol, envelope=self._settings.envelope)

    async def _exchange(self, session: LegacySession) -> AsyncGenerator[Reply, None]:
        """Send the session's request and yield its replies, the FINAL last."""
        if self._closed:
            raise ClosedError("this client was closed")
        endpoint, failovers = self.endpoint, self._failovers
        socket = self._take_idle() or self._open(endpoint)
        arrived = self._busy[socket] = asyncio.Event()
        descriptor = int(socket.get(zmq.FD))
        self._loop = asyncio.get_running_loop()
        add_reader(self._loop, descriptor, arrived.set)
        finished = False
        try:
            for message in session.take_messages():
                send(socket, message)
            while not finished:
                received = await self._receive(socket, arrived, session.deadline())
                if received is None:
                    session.tick(time.monotonic())
                else:
                    session.receive(received, time.monotonic())
                for event in session.take_events():
                    if isinstance(event, RequestRejected):
                        raise event
                    if not isinstance(event, Reply):
                        raise await self._error(session, endpoint, failovers)
                    in_use = failovers == self._failovers
                    self._answered |= in_use
                    if event.final:
                        finished = True
                        self._release(socket, descriptor, keep=in_use)
                    if event.failure is not None:
                        raise ServiceError(*event.failure, service=event.service)
                    yield event
        finally:
            if not finished:  # a reply to this request may still arrive: the next one must not take it for its own
                self._release(socket, descriptor, keep=False)

    def _take_idle(self) -> zmq.Socket[bytes] | None:
        """Return an idle connection, without what has arrived since the last FINAL (C3); None if there is none."""
        if not self._idle:
            return None
        socket = self._idle.pop()
        while receive(socket) is not None:
            pass
        return socket

    async def _receive(self, socket: zmq.Socket[bytes], arrived: asyncio.Event, until: float | None) -> Message | None:
        """Return the next message, or None if none arrives before the time `until`."""
        late = False
        while True:
            if self._closed:
                raise ClosedError("this client was closed")
            arrived.clear()  # before receiving, because the descriptor reports changes only
            message = receive(socket)
            if message is not None or late:
                return message
            try:
                async with asyncio.timeout(None if until is None else until - time.monotonic()):
                    await arrived.wait()
            except TimeoutError:
                late = True  # look once more: the event loop may have been blocked since a reply arrived

    async def _error(self, session: LegacySession, endpoint: str, failovers: int) -> RequestTimeout | StreamInterrupted:
        """Fail over from `endpoint`, and return the error of a request that got no reply there."""
        self._fail_over(failovers)
        if session.streamed:
            return session.error(endpoint, None)
        diagnosis = self._diagnoses.get(endpoint)
        if diagnosis is None:  # one for all requests that have timed out
            diagnosis = asyncio.ensure_future(asyncio.to_thread(why_unreachable, endpoint, self._settings.keys))
            self._diagnoses[endpoint] = diagnosis
            diagnosis.add_done_callback(lambda _: self._diagnoses.pop(endpoint, None))
        return session.error(endpoint, await asyncio.shield(diagnosis))

    def _fail_over(self, failovers: int) -> None:
        """Make the next request go to the next broker, unless another request has already done so."""
        if failovers == self._failovers and len(self._endpoints.all) > 1:
            self._failovers += 1
            self._endpoints.fail_over(answered=self._answered)
            self._answered = False
            for socket in self._idle:
                socket.close(0)
            self._idle.clear()

    def _open(self, endpoint: str) -> zmq.Socket[bytes]:
        return dealer(self._settings.context, endpoint, {zmq.LINGER: 0}, keys=self._settings.keys)

    def _release(self, socket: zmq.Socket[bytes], descriptor: int, *, keep: bool) -> None:
        if self._busy.pop(socket, None) is None:
            return  # `close` has closed it
        remove_reader(asyncio.get_running_loop(), descriptor)
        if keep:
            self._idle.append(socket)
        else:
            socket.close(0)

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connections."""
        self._closed = True
        for socket in self._idle:
            socket.close(0)
        self._idle.clear()
        busy, self._busy = self._busy, {}
        loop = None if self._loop is None or self._loop.is_closed() else self._loop
        for socket, arrived in busy.items():
            if loop is not None:
                remove_reader(loop, int(socket.get(zmq.FD)))
            socket.close(0)
            if loop is not None:  # else no task is waiting
                arrived.set()

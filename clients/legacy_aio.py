"""MDP/0.2 and 0.1 for asyncio: each outstanding request has a connection of its own (C4)."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import zmq

from ..mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestTimeout,
    ServiceError,
    StreamInterrupted,
)
from ..mdp.transport.multipart import receive, send
from ..mdp.transport.reach import why_unreachable
from ..mdp.transport.sockets import dealer
from .arguments import check_legacy
from .legacy_session import LegacySession
from .reply import Reply
from .settings import ConnectionSettings

MAX_CONNECTIONS: Final = 500
"""A ZeroMQ context has 1023 sockets, and many processes may open only 1024 files; a socket takes two."""


class LegacyAsyncDialog:
    """Requests over MDP/0.2 or 0.1, made by tasks.  Idle connections are kept for the next request.

    A request is sent once.  When one times out, the next goes to the next broker, as `Endpoints` says.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self._endpoints = settings.endpoints
        self._context = settings.context
        self._keys = settings.keys
        self._session = LegacySession(settings.protocol, envelope=settings.envelope)
        self._failovers = 0
        """Number of failovers.  A connection that was opened before the last one leads to a broker no longer in use."""
        self._answered = False
        """The broker in use has replied since the last failover."""
        self._idle: list[zmq.Socket[bytes]] = []
        self._busy: dict[zmq.Socket[bytes], asyncio.Event] = {}
        """The connections with an outstanding request, and the event that something has arrived there."""
        self._probes: dict[str, asyncio.Future[str | None]] = {}
        """Attempts to find out why an endpoint does not answer, by endpoint."""
        self._closed = False
        self._connections = asyncio.Semaphore(min(settings.max_outstanding, MAX_CONNECTIONS))
        for endpoint in self._endpoints.all:  # raises SettingError if one is invalid
            dealer(self._context, endpoint, {zmq.LINGER: 0}, keys=self._keys).close(0)

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
    ) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""
        check_legacy(wait, headers, options)
        frames: list[bytes] = []
        until = _until(timeout)
        endpoint, failovers = self.endpoint, self._failovers
        try:
            async with asyncio.timeout_at(until):
                await self._connections.acquire()
        except TimeoutError:
            raise await self._timed_out(endpoint, failovers, service.decode(), timeout) from None
        try:
            async with aclosing(self._exchange(service, body, timeout, until)) as parts:
                async for part in parts:
                    if part.final:
                        part.collected = len(frames)
                        part[:0] = frames
                        return part
                    frames += part
        finally:
            self._connections.release()
        raise AssertionError("a stream ends with a FINAL")

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
    ) -> AsyncGenerator[Reply, None]:
        """Send a request and yield each part of the reply as it arrives.  Raises the request's error."""
        check_legacy(wait, headers, options, deadline)
        async with self._connections, aclosing(self._exchange(service, body, timeout)) as parts:
            async for part in parts:
                yield part

    async def _exchange(
        self, service: bytes, body: Sequence[bytes], timeout: float | None, until: float | None = None
    ) -> AsyncGenerator[Reply, None]:
        """Send a request and yield the parts of its reply.

        All of them must arrive before the time `until`; if it is None, each within `timeout` after the one before.
        """
        name = service.decode()
        if self._closed:
            raise ClosedError("this client was closed")
        endpoint, failovers = self.endpoint, self._failovers
        socket = self._idle.pop() if self._idle else self._open()
        arrived = self._busy[socket] = asyncio.Event()
        loop, descriptor = asyncio.get_running_loop(), int(socket.get(zmq.FD))
        loop.add_reader(descriptor, arrived.set)
        streamed, held = False, True
        try:
            send(socket, self._session.encode(service, body))
            while held:
                try:
                    part = await self._next(socket, arrived, service, _until(timeout) if until is None else until)
                except TimeoutError:
                    if not streamed or until is not None:
                        raise await self._timed_out(endpoint, failovers, name, timeout) from None
                    self._fail_over(failovers)
                    text = f"the stream of service {name!r} stopped: nothing arrived for {timeout:g} s after a part"
                    raise StreamInterrupted(text, service=name) from None
                streamed = True
                in_use = failovers == self._failovers
                self._answered |= in_use
                if part.final:
                    held = False
                    self._release(socket, descriptor, keep=in_use)
                if part.failure is not None:
                    raise ServiceError(*part.failure, service=part.service)
                yield part
        finally:
            if held:  # a reply to this request may still arrive: the next one must not take it for its own
                self._release(socket, descriptor, keep=False)

    async def _next(
        self, socket: zmq.Socket[bytes], arrived: asyncio.Event, service: bytes, until: float | None
    ) -> Reply:
        name, late = service.decode(), False
        while True:
            if self._closed:
                raise ClosedError("this client was closed")
            arrived.clear()  # before receiving, because the descriptor reports changes only
            while (message := receive(socket)) is not None:
                reply = self._session.decode(message)
                if reply is not None and reply.service == name:
                    return reply
            if late:
                raise TimeoutError
            try:
                async with asyncio.timeout_at(until):
                    await arrived.wait()
            except TimeoutError:
                late = True  # look once more: the event loop may have been blocked since a reply arrived

    async def _timed_out(self, endpoint: str, failovers: int, service: str, timeout: float | None) -> RequestTimeout:
        """Fail over from `endpoint`, and return the exception of a request that got no reply there."""
        self._fail_over(failovers)
        text = f"no reply from service {service!r} through {endpoint} within {timeout:g} s"
        probe = self._probes.get(endpoint)
        if probe is None:  # one for all requests that have timed out
            probe = asyncio.ensure_future(asyncio.to_thread(why_unreachable, endpoint, self._keys))
            self._probes[endpoint] = probe
            probe.add_done_callback(lambda _: self._probes.pop(endpoint, None))
        reason = await asyncio.shield(probe)
        if reason is not None:
            return BrokerUnreachable(f"{text}: {reason}", service=service)
        return RequestTimeout(text, service=service)

    def _fail_over(self, failovers: int) -> None:
        """Make the next request go to the next broker, unless another request has already done so."""
        if failovers == self._failovers and len(self._endpoints.all) > 1:
            self._failovers += 1
            self._endpoints.fail_over(answered=self._answered)
            self._answered = False
            for socket in self._idle:
                socket.close(0)
            self._idle.clear()

    def _open(self) -> zmq.Socket[bytes]:
        return dealer(self._context, self.endpoint, {zmq.LINGER: 0}, keys=self._keys)

    def _release(self, socket: zmq.Socket[bytes], descriptor: int, *, keep: bool) -> None:
        if self._busy.pop(socket, None) is None:
            return  # `close` has closed it
        asyncio.get_running_loop().remove_reader(descriptor)
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
        for socket, arrived in busy.items():
            asyncio.get_running_loop().remove_reader(int(socket.get(zmq.FD)))
            socket.close(0)
            arrived.set()


def _until(timeout: float | None) -> float | None:
    """Return the time of the event loop after so many seconds."""
    return None if timeout is None else asyncio.get_running_loop().time() + timeout

"""The asyncio shell of MDP/0.2 and 0.1: each outstanding request has a connection of its own (C4)."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

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
from .pirate import PirateSession
from .reply import Reply

MAX_CONNECTIONS: Final = 500
"""A ZeroMQ context has 1023 sockets, and many a process may open no more than 1024 files, two for each."""


class Pirates:
    """Connections, each for one request at a time; those that are idle are kept for the next."""

    def __init__(
        self,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        protocol: str,
        max_outstanding: int,
        *,
        envelope: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._context = context
        self._session = PirateSession(protocol, envelope=envelope)
        self._turn = 0
        self._idle: list[zmq.Socket[bytes]] = []
        self._busy: dict[zmq.Socket[bytes], asyncio.Event] = {}
        self._probes: dict[str, asyncio.Future[str | None]] = {}
        self._closed = False
        self._places = asyncio.Semaphore(min(max_outstanding, MAX_CONNECTIONS))
        for endpoint in endpoints:
            self._open(endpoint).close(0)

    async def request(self, service: bytes, body: Sequence[bytes], timeout: float | None) -> Reply:
        """Send a request and wait for all of its reply.  `timeout` is the time for the whole of it, in seconds."""
        frames: list[bytes] = []
        turn = self._turn
        try:
            async with asyncio.timeout(timeout):
                async with aclosing(self.stream(service, body, None)) as parts:
                    async for part in parts:
                        if part.final:
                            part.collected = len(frames)
                            part[:0] = frames
                            return part
                        frames += part
        except TimeoutError:
            raise await self._timed_out(turn, service.decode(), timeout) from None
        raise AssertionError("a stream ends with a FINAL")

    async def stream(self, service: bytes, body: Sequence[bytes], timeout: float | None) -> AsyncGenerator[Reply, None]:
        """Send a request and yield each part of its reply.  `timeout` is how long nothing may come, in seconds."""
        async with self._places, aclosing(self._dialog(service, body, timeout)) as parts:
            async for part in parts:
                yield part

    async def _dialog(
        self, service: bytes, body: Sequence[bytes], timeout: float | None
    ) -> AsyncGenerator[Reply, None]:
        name = service.decode()
        if self._closed:
            raise ClosedError("this client was closed")
        turn = self._turn
        socket = self._idle.pop() if self._idle else self._open(self._endpoint)
        arrived = self._busy[socket] = asyncio.Event()
        loop, descriptor = asyncio.get_running_loop(), int(socket.get(zmq.FD))
        loop.add_reader(descriptor, arrived.set)
        streamed, held = False, True
        try:
            send(socket, self._session.encode(service, body))
            while held:
                try:
                    part = await self._next(socket, arrived, service, timeout)
                except TimeoutError:
                    if not streamed:
                        raise await self._timed_out(turn, name, timeout) from None
                    self._fail_over(turn)
                    text = f"the stream of service {name!r} stopped: nothing came for {timeout:g} s after a part"
                    raise StreamInterrupted(text, service=name) from None
                streamed = True
                if part.final:
                    held = False
                    self._release(socket, descriptor, keep=turn == self._turn)  # not if that broker was left
                if part.failure is not None:
                    raise ServiceError(*part.failure, service=part.service)
                yield part
        finally:
            if held:  # replies to this request may still come: they must not be taken for another's
                self._release(socket, descriptor, keep=False)

    async def _next(
        self, socket: zmq.Socket[bytes], arrived: asyncio.Event, service: bytes, timeout: float | None
    ) -> Reply:
        until = None if timeout is None else time.monotonic() + timeout
        name = service.decode()
        while True:
            if self._closed:
                raise ClosedError("this client was closed")
            arrived.clear()  # the descriptor tells of changes only: look after it was cleared
            while (message := receive(socket)) is not None:
                reply = self._session.decode(message)
                if reply is not None and reply.service == name:
                    return reply
            async with asyncio.timeout(None if until is None else until - time.monotonic()):
                await arrived.wait()

    async def _timed_out(self, turn: int, service: str, timeout: float | None) -> RequestTimeout:
        endpoint = self._endpoints[turn % len(self._endpoints)]
        self._fail_over(turn)
        text = f"no reply from service {service!r} through {endpoint} within {timeout:g} s"
        probe = self._probes.get(endpoint)
        if probe is None:  # one for all whose time is up
            probe = self._probes[endpoint] = asyncio.ensure_future(asyncio.to_thread(why_unreachable, endpoint))
            probe.add_done_callback(lambda _: self._probes.pop(endpoint, None))
        reason = await asyncio.shield(probe)
        if reason is not None:
            return BrokerUnreachable(f"{text}: {reason}", service=service)
        return RequestTimeout(text, service=service)

    def _fail_over(self, turn: int) -> None:
        """The next request tries the next broker, unless another request that failed with it has seen to that."""
        if turn == self._turn and len(self._endpoints) > 1:
            self._turn += 1
            for socket in self._idle:
                socket.close(0)
            self._idle.clear()

    @property
    def _endpoint(self) -> str:
        return self._endpoints[self._turn % len(self._endpoints)]

    def _open(self, endpoint: str) -> zmq.Socket[bytes]:
        return dealer(self._context, endpoint, {zmq.LINGER: 0})

    def _release(self, socket: zmq.Socket[bytes], descriptor: int, *, keep: bool) -> None:
        if self._busy.pop(socket, None) is None:
            return  # `close` was quicker
        asyncio.get_running_loop().remove_reader(descriptor)
        if keep:
            self._idle.append(socket)
        else:
            socket.close(0)

    def close(self) -> None:
        """Close the connections; what is outstanding ends with `ClosedError`."""
        self._closed = True
        for socket in self._idle:
            socket.close(0)
        self._idle.clear()
        busy, self._busy = self._busy, {}
        for socket, arrived in busy.items():
            asyncio.get_running_loop().remove_reader(int(socket.get(zmq.FD)))
            socket.close(0)
            arrived.set()

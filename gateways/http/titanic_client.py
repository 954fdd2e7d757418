"""The client through which jobs reach Titanic, on behalf of one caller."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, cast

from ...clients.aio import AsyncClient
from ...clients.calls.reply import Outcome, Reply
from ...clients.x1.broker_connection import Call
from ...mdp.errors import ServiceNotFound, StreamInterrupted, ZmdpError
from ...mdp.http.problems import Problem
from ...titanic.api.client import AsyncTitanic
from .gateway import Gateway

OVERHEAD_BYTES: Final = 100
"""Memory charged for each part that waits, in addition to its frames."""


class Registered:
    """Whether a Titanic has ever answered.  If so, and it is gone, one may be restarting."""

    def __init__(self) -> None:
        self.ever = False


class TitanicClient:
    """What `AsyncTitanic` uses of an `AsyncClient`.

    It adds options to each request, says at once if there has never been a Titanic, and keeps at most `max_unread`
    bytes of a stream, and no more than the memory that the gateway has left.
    """

    def __init__(self, gateway: Gateway, registered: Registered, options: Mapping[str, Any] | None) -> None:
        self._gateway = gateway
        self._client = gateway.upstream.client
        self._registered = registered
        self._options = options or {}

    def titanic(self) -> AsyncTitanic:
        """Return an `AsyncTitanic` that uses this client."""
        return AsyncTitanic(cast(AsyncClient, self))

    @property
    def protocol(self) -> str:
        """X1."""
        return self._client.protocol

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._client.endpoint

    async def available(self, service: str) -> bool:
        """Return whether a Titanic is registered."""
        return await self._client.available(service)

    async def request(
        self, service: str, *frames: bytes, options: Mapping[str, Any] | None = None, **settings: Any
    ) -> Reply:
        """Call one of Titanic's services.  Raises `Problem` if there has never been a Titanic."""
        merged = {**(options or {}), **self._options}
        if "wait" not in merged:  # otherwise it is Titanic's own option
            settings["wait"] = False
        try:
            reply = await self._client.request(service, *frames, options=merged, **settings)
        except ServiceNotFound:
            if self._registered.ever:
                raise  # AsyncTitanic tries again for a while
            text = "no Titanic is registered at the broker: start one with `titanic serve`"
            raise Problem("no-titanic", text, service=service) from None
        self._registered.ever = True
        return reply

    async def stream(
        self, service: str, *frames: bytes, timeout: float | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[Reply, None]:
        """Call a service and yield each part of the reply.  `timeout` limits the whole stream.

        Raises `StreamInterrupted` if the parts are not taken in time; Titanic then streams again from that part on.
        """
        inbox = _Inbox(self._gateway, service)
        call = inbox.call = self._client.begin(
            inbox, service, *frames, timeout=timeout, options={**options, **self._options}
        )
        try:
            while True:
                part = await inbox.take()
                yield part
                if part.final:
                    break
        finally:
            self._client.cancel(call)
            inbox.discard()


class _Inbox:
    """The outcomes of a stream that have not been taken.  They count as memory of the gateway."""

    def __init__(self, gateway: Gateway, service: str) -> None:
        self.call: Call | None = None
        self._gateway = gateway
        self._service = service
        self._unread = 0
        self._outcomes: deque[Outcome] = deque()
        self._arrived = asyncio.Event()

    def put(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if isinstance(outcome, Reply):
            self._count(_size(outcome))
            if self._is_full() and not outcome.final and self.call is not None:
                self._gateway.upstream.client.cancel(self.call)
                self._outcomes.append(StreamInterrupted("it is not read in time", service=self._service))
        self._arrived.set()

    async def take(self) -> Reply:
        while not self._outcomes:
            self._arrived.clear()
            await self._arrived.wait()
        outcome = self._outcomes.popleft()
        if isinstance(outcome, ZmdpError):
            raise outcome
        self._count(-_size(outcome))
        return outcome

    def discard(self) -> None:
        """Forget what was not taken."""
        self._count(-self._unread)

    def _count(self, change: int) -> None:
        self._unread += change
        self._gateway.memory += change

    def _is_full(self) -> bool:
        settings = self._gateway.settings
        return self._unread > settings.max_unread or self._gateway.memory > settings.max_memory


def _size(reply: Reply) -> int:
    return sum(map(len, reply)) + OVERHEAD_BYTES

"""The client through which jobs reach Titanic, on behalf of one caller."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, cast

from ....mdp.errors import ServiceNotFound, StreamInterrupted, ZmdpError
from ....mdp.http.problems import Problem
from ....titanic.client import AsyncTitanic
from ...aio import AsyncClient
from ...call import Call, Outcome
from ...reply import Reply

OVERHEAD_BYTES: Final = 100
"""Memory charged for each part that waits, in addition to its frames."""


class Registered:
    """Whether a Titanic has ever answered.  If so, and it is gone, one may be restarting."""

    def __init__(self) -> None:
        self.ever = False


class TitanicClient:
    """What `AsyncTitanic` uses of an `AsyncClient`.

    It adds options to each request, says at once if there has never been a Titanic, and keeps at most `max_unread`
    bytes of a stream.
    """

    def __init__(
        self, client: AsyncClient, registered: Registered, options: Mapping[str, Any] | None, max_unread: int
    ) -> None:
        self._client = client
        self._registered = registered
        self._options = options or {}
        self._max_unread = max_unread

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
        inbox = _Inbox(self._client, service, self._max_unread)
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


class _Inbox:
    """The outcomes of a stream that have not been taken."""

    def __init__(self, client: AsyncClient, service: str, max_unread: int) -> None:
        self.call: Call | None = None
        self._client = client
        self._service = service
        self._max_unread = max_unread
        self._unread = 0
        self._outcomes: deque[Outcome] = deque()
        self._arrived = asyncio.Event()

    def put(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if isinstance(outcome, Reply):
            self._unread += _size(outcome)
            if self._unread > self._max_unread and not outcome.final and self.call is not None:
                self._client.cancel(self.call)
                self._outcomes.append(StreamInterrupted("it is not read in time", service=self._service))
        self._arrived.set()

    async def take(self) -> Reply:
        while not self._outcomes:
            self._arrived.clear()
            await self._arrived.wait()
        outcome = self._outcomes.popleft()
        if isinstance(outcome, ZmdpError):
            raise outcome
        self._unread -= _size(outcome)
        return outcome


def _size(reply: Reply) -> int:
    return sum(map(len, reply)) + OVERHEAD_BYTES

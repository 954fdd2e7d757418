"""The clients through which jobs, and the tasks of agents, reach Titanic on behalf of their callers."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, cast

from ....clients.aio import AsyncClient
from ....clients.calls.call import Call, Outcome
from ....clients.calls.reply import Reply
from ....mdp.errors import ServiceNotFound, StreamInterrupted, ZmdpError
from ....mdp.http.problems import Problem
from ....titanic.api.client import AsyncTitanic
from ...access import Caller
from ...gateway import Gateway

OVERHEAD_BYTES: Final = 100
"""Memory charged for each waiting part, in addition to its frames."""


class TitanicClients:
    """Makes a client of Titanic for each caller."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.registered = False
        """Whether a Titanic has ever answered.  If so, and it is gone, one may be restarting."""

    def of(self, caller: Caller) -> AsyncTitanic:
        """Return the client that makes requests on behalf of `caller`."""
        return AsyncTitanic(cast(AsyncClient, _CallerClient(self, self.gateway.options(caller) or {})))


class _CallerClient:
    """The methods of an `AsyncClient` that `AsyncTitanic` calls.

    It adds the caller's options to each request, fails immediately if there has never been a Titanic, and buffers at
    most `max_unread` bytes of a stream, within the memory that the gateway has left.
    """

    def __init__(self, clients: TitanicClients, options: Mapping[str, Any]) -> None:
        self._clients = clients
        self._gateway = clients.gateway
        self._client = clients.gateway.upstream.client
        self._options = options

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
        if "wait" not in merged:  # else it is an option of Titanic
            settings["wait"] = False
        try:
            reply = await self._client.request(service, *frames, options=merged, **settings)
        except ServiceNotFound:
            if self._clients.registered:
                raise  # AsyncTitanic tries again for a while
            text = "no Titanic is registered at the broker: start one with `titanic serve`"
            raise Problem("no-titanic", text, service=service) from None
        self._clients.registered = True
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
    """The outcomes of a stream that wait to be taken, which count as memory of the gateway."""

    def __init__(self, gateway: Gateway, service: str) -> None:
        self.call: Call | None = None
        self._gateway = gateway
        self._service = service
        self._unread = 0
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()

    def put(self, outcome: Outcome) -> None:
        self._outcomes.put_nowait(outcome)
        if isinstance(outcome, Reply):
            self._count(_size(outcome))
            if self._is_full() and not outcome.final and self.call is not None:
                self._gateway.upstream.client.cancel(self.call)
                self._outcomes.put_nowait(StreamInterrupted("it is not read in time", service=self._service))

    async def take(self) -> Reply:
        outcome = await self._outcomes.get()
        if isinstance(outcome, ZmdpError):
            raise outcome
        self._count(-_size(outcome))
        return outcome

    def discard(self) -> None:
        """Forget the outcomes that were not taken."""
        self._count(-self._unread)

    def _count(self, change: int) -> None:
        self._unread += change
        self._gateway.memory += change

    def _is_full(self) -> bool:
        settings = self._gateway.settings
        return self._unread > settings.max_unread or self._gateway.memory > settings.max_memory


def _size(reply: Reply) -> int:
    return sum(map(len, reply)) + OVERHEAD_BYTES

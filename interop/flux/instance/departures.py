"""Tells Flux programs that a client of another gateway has disconnected.

Every gateway offers a service of its own, whose name travels with each request.  A gateway that passes a request to a
program asks that service once for each client:

    body uuid            the reply arrives when the client with this UUID has left, or at once if it is unknown
    empty body           the reply arrives at once, and shows that the broker knows the service

If the gateway of the client dies, the request fails, which means the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final
from uuid import uuid4

from ....clients.aio import AsyncClient
from ....clients.calls.call import Call, Outcome
from ....clients.calls.reply import Reply
from ....mdp.errors import ClosedError, SettingError
from ....workers.handling import Last
from ....workers.session.request import Request

GATEWAY: Final = "flux.gateway."
CONCURRENCY: Final = 10_000
"""Maximum number of watched clients; further requests wait."""
RETRY_SECONDS: Final = 1.0
"""How long the gateway of a client may take to come back, when its broker is restarted."""

Gone = Callable[[str], None]


class Departures:
    """The clients of this gateway, and the clients of all gateways that its programs serve."""

    def __init__(self, client: AsyncClient, retry_seconds: float = RETRY_SECONDS) -> None:
        self.service = GATEWAY + uuid4().hex
        """The service of this gateway."""
        self._client = client
        self._retry_seconds = retry_seconds
        self._present: dict[str, list[asyncio.Future[None]]] = {}
        """The clients of this gateway, each with the requests that wait for its end."""
        self._watches: dict[tuple[str, str], _Watch] = {}
        self._closed = False

    # ── clients of this gateway ──────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, client: str) -> None:
        """Take in that a client has connected."""
        self._present[client] = []

    def left(self, client: str) -> None:
        """Take in that a client has left."""
        for waiting in self._present.pop(client, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def handle(self, request: Request) -> AsyncGenerator[Any, None]:
        """Reply when a client has left."""
        waiting = self._present.get(request[0].decode(errors="replace"))
        if waiting is not None:
            left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(left)
            try:
                await left
            finally:
                if left in waiting:
                    waiting.remove(left)
        yield Last()

    # ── clients that programs of this gateway serve ──────────────────────────────────────────────────────────────────

    def watch(self, gateway: str, client: str, gone: Gone) -> None:
        """Call `gone` once when a client of a gateway has left."""
        if not self._closed:
            watch = self._watches.get((gateway, client))
            if watch is None:
                watch = self._watches[gateway, client] = _Watch(self, gateway, client)
                watch.gone[gone] = None
                self._ask(watch)
            else:
                watch.gone[gone] = None

    def forget(self, gateway: str, client: str, gone: Gone) -> None:
        """Do not call `gone`.  Idempotent."""
        watch = self._watches.get((gateway, client))
        if watch is not None and watch.gone.pop(gone, watch) is None and not watch.gone:
            del self._watches[gateway, client]
            if watch.call is not None:
                self._client.cancel(watch.call)

    def _ask(self, watch: "_Watch") -> None:
        if self._watches.get((watch.gateway, watch.client)) is not watch or self._closed:
            return
        try:
            watch.call = self._client.begin(watch, watch.gateway, watch.client.encode(), timeout=None, wait=False)
        except (SettingError, ClosedError):
            self.ended(watch)

    def asked(self, watch: "_Watch", outcome: Outcome) -> None:
        """Take in the answer of a client's gateway."""
        watch.call = None
        if isinstance(outcome, Reply) or watch.retried:
            self.ended(watch)
        else:
            watch.retried = True
            asyncio.get_running_loop().call_later(self._retry_seconds, self._ask, watch)

    def ended(self, watch: "_Watch") -> None:
        """Tell all programs that the client has left."""
        if self._watches.get((watch.gateway, watch.client)) is watch:
            del self._watches[watch.gateway, watch.client]
            for gone in watch.gone:
                gone(watch.client)

    def close(self) -> None:
        """Stop watching all clients."""
        self._closed = True
        self._watches.clear()


class _Watch:
    """A client of another gateway: the receiver of that gateway's answer."""

    def __init__(self, departures: Departures, gateway: str, client: str) -> None:
        self.gateway = gateway
        self.client = client
        self.gone: dict[Gone, None] = {}
        self.call: Call | None = None
        self.retried = False
        self._departures = departures

    def put(self, outcome: Outcome) -> None:
        self._departures.asked(self, outcome)

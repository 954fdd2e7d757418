"""What workers say of services, remembered for a while: many callers ask, and the broker answers once."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from ..clients.aio import AsyncClient
from ..mdp.errors import ZmdpError
from ..mdp.services import About, Description

FRESH_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 2000
"""Services; if there are more, the first that were asked about are forgotten."""
MAX_ASKED: Final = 16
"""Questions at the same time, if a list of services is described."""
TIMEOUT_SECONDS: Final = 3.0
"""How long the broker may take to answer: it does not wait for workers."""


class Descriptions:
    """Asks the broker what workers say of services."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[str, tuple[float, asyncio.Future[Description | None]]] = {}
        """By service, in the order in which they were asked about: until when to believe it."""

    async def of(self, service: str, timeout: float | None = None) -> About:
        """Return what most workers say of a service; an empty `About` if they say nothing, or the broker does not.

        The broker may take up to `timeout` seconds, and at most `TIMEOUT_SECONDS`.
        """
        found = await self._found(service, timeout)
        return About() if found is None else found.about

    async def newest(self, service: str) -> About:
        """Return what those workers of a service say that have its newest version; otherwise as `of`."""
        found = await self._found(service, None)
        return About() if found is None else found.newest

    async def _found(self, service: str, timeout: float | None) -> Description | None:
        known = self._known.get(service)
        if known is not None and known[0] >= time.monotonic():
            if known[1].done():
                return known[1].result()
        else:
            self._known.pop(service, None)
            if len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            known = time.monotonic() + FRESH_SECONDS, asyncio.ensure_future(self._ask(service))
            self._known[service] = known
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await asyncio.shield(known[1])
        return None

    async def of_all(self, services: Iterable[str], *, newest: bool = False) -> dict[str, About]:
        """Return what workers say of each of these services: `of` it, or the `newest`."""
        ask = self.newest if newest else self.of
        limit = asyncio.Semaphore(MAX_ASKED)

        async def asked(service: str) -> tuple[str, About]:
            async with limit:
                return service, await ask(service)

        return dict(await asyncio.gather(*map(asked, services)))

    def forget(self) -> None:
        """Forget what is remembered: workers have come or gone."""
        self._known.clear()

    async def _ask(self, service: str) -> Description | None:
        with suppress(ZmdpError):
            return await self._client.describe(service, timeout=TIMEOUT_SECONDS)
        return None

"""Descriptions of services, remembered for a while, so that the broker answers once for many callers."""

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
"""Maximum number of services; beyond, the oldest descriptions are forgotten."""
MAX_ASKED: Final = 16
"""Maximum number of concurrent questions while a list of services is described."""
TIMEOUT_SECONDS: Final = 3.0
"""How long the broker may take to answer: it does not wait for workers."""


class Descriptions:
    """The descriptions that workers give of their services."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[str, tuple[float, asyncio.Future[Description | None]]] = {}
        """When each description expires, and the description, by service; the oldest first."""

    async def of(self, service: str, timeout: float | None = None) -> About:
        """Return how most workers describe a service; an empty `About` if there is no description or no answer.

        The broker may take up to `timeout` seconds, and at most `TIMEOUT_SECONDS`.
        """
        found = await self._found(service, timeout)
        return About() if found is None else found.about

    async def newest(self, service: str) -> About:
        """Return how the workers with the newest version of a service describe it; otherwise like `of`."""
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
        """Return the description of each of these services: `of` it, or the `newest`."""
        ask = self.newest if newest else self.of
        limit = asyncio.Semaphore(MAX_ASKED)

        async def asked(service: str) -> tuple[str, About]:
            async with limit:
                return service, await ask(service)

        return dict(await asyncio.gather(*map(asked, services)))

    def forget(self) -> None:
        """Forget all descriptions: workers have come or gone."""
        self._known.clear()

    async def _ask(self, service: str) -> Description | None:
        with suppress(ZmdpError):
            return await self._client.describe(service, timeout=TIMEOUT_SECONDS)
        return None

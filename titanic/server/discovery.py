"""Keeps track of the services that have workers (C31)."""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...clients import AsyncClient, RequestError, RequestTimeout
from ...mdp.service_limits import NO_LIMIT, Limit, ServiceLimits
from ..db import store
from ..db.group_commit import BatchExecutor, StoreError
from .dispatch import MAX_CLAIMED, Capacity, Dispatcher

DISCOVERY_SECONDS: Final = 0.5
"""Interval at which the broker is asked which services have workers."""
MIN_DISCOVERY_SECONDS: Final = 0.05
"""The shortest such interval, while requests arrive for services that have no workers."""
DISCOVERY_PAGE: Final = 100
"""How many services to ask for one by one in each interval, if the broker has too many to list them all."""
TIMEOUT_SECONDS: Final = 5.0
"""How long to wait for the broker's answer."""
AHEAD_SECONDS: Final = 1.0
"""Seconds of requests, at the rate that a limit allows, that are sent ahead to the broker: until its next answer, and
some more."""
GROUP_AHEAD_SECONDS: Final = 15.0
"""The same for the rate of each group.  The broker does not tell how many requests of a group run: if they take longer
than that, fewer of them start than the rate allows."""

log = logging.getLogger("zmdp.titanic")


class Discovery:
    """Asks the broker which services have workers, and tells the dispatcher.

    Args:
        client: The client that asks.
        writer: Finds services with pending requests.
        dispatcher: Told how many requests the workers of each service can take.
    """

    def __init__(self, client: AsyncClient, writer: BatchExecutor, dispatcher: Dispatcher) -> None:
        self._client = client
        self._writer = writer
        self._dispatcher = dispatcher
        self.answered = False
        """Whether the broker has answered the last question."""
        self._page = ""
        """The last service that was asked for one by one."""

    async def run(self) -> None:
        """Ask periodically until cancelled."""
        while True:
            self._dispatcher.unknown.clear()
            found = await self._find()
            self.answered, offered = found is not None, found or {}
            if not offered.keys() <= self._dispatcher.offered.keys():
                self._dispatcher.look.set()  # there may be requests for the new services
            self._dispatcher.offer(offered)
            await asyncio.sleep(MIN_DISCOVERY_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_SECONDS):
                    await self._dispatcher.unknown.wait()

    async def _find(self) -> dict[str, Capacity] | None:
        """Return the capacity of each service that has any; None if the broker does not tell."""
        try:
            offered, more = await self._ask(b"")
            if more:
                offered |= await self._ask_one_by_one(offered)
        except RequestTimeout as error:
            log.warning("%s", error)
            return None
        except (RequestError, ValueError, TypeError, KeyError) as error:
            log.error("the broker did not list its services, which Titanic needs: %s", error)
            return None
        return {name: found for name, found in offered.items() if found.credit}

    async def _ask_one_by_one(self, known: Mapping[str, Capacity]) -> dict[str, Capacity]:
        """Return the capacity of further services for which there may be requests."""
        page: list[str] = []
        with suppress(StoreError):
            page = await self._writer.submit(store.pending_after, (self._page, DISCOVERY_PAGE))
        self._page = page[-1] if len(page) == DISCOVERY_PAGE else ""
        # Services with requests in flight are asked for too, so that their lanes keep their credit.
        names = [name for name in {*page, *self._dispatcher.lanes} if name not in known]
        answers = await asyncio.gather(*(self._ask(name.encode()) for name in names))
        return {name: found for offered, _ in answers for name, found in offered.items()}

    async def _ask(self, service: bytes) -> tuple[dict[str, Capacity], int]:
        """Return the capacity of this service, or of all, and how many services were left out."""
        (answer,) = await self._client.request("mmi.services", service, timeout=TIMEOUT_SECONDS)
        listed = json.loads(answer)
        return {str(row["name"]): capacity(row) for row in listed["services"]}, int(listed["more"])


def capacity(row: Mapping[str, Any]) -> Capacity:
    """Return how many requests the workers of a service can hold, used or free: at this broker, where its limits count,
    and at others."""
    limits, running = ServiceLimits.read(row.get("limits", {})), int(row["running"])
    local = _most(int(row["credit"]) + running, limits.service, running, AHEAD_SECONDS)
    remote = int(row.get("remote_credit", 0)) - int(row.get("remote_running", 0))
    per_group = None if limits.group == NO_LIMIT else _most(MAX_CLAIMED, limits.group, 0, GROUP_AHEAD_SECONDS)
    return Capacity(local + remote, per_group)


def _most(most: int, limit: Limit, running: int, seconds: float) -> int:
    """Return how many requests, at `most`, may run within these seconds if some are running already."""
    if limit.concurrency is not None:
        most = min(most, limit.concurrency)
    if limit.interval:
        most = min(most, running + limit.at_once + int(seconds / limit.interval))
    return most

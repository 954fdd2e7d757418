"""Stores the results of attempts, however long the database takes, and tells the callers that wait for them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from . import store
from .backlog import Backlog
from .batches import BatchExecutor, StoreError
from .callers import Callers
from .lanes import Sent
from .retries import AttemptResult, jittered

RETRY_SECONDS: Final = (0.1, 2.0)
"""The first and the longest pause after the database has failed; each is about twice as long as the one before."""

_WORK: Final[dict[type[Any], Any]] = {
    store.Outcome: store.finish,
    store.Reschedule: store.reschedule,
    store.Partial: store.add_partials,
}


class Results:
    """Stores PARTIALs, outcomes, and requests to retry.

    Args:
        writer: Executes statements that write.
        callers: Told of each request whose state or PARTIALs have changed.
        backlog: Told of each request that has ended or is retried.
    """

    def __init__(self, writer: BatchExecutor, callers: Callers, backlog: Backlog) -> None:
        self._writer = writer
        self._callers = callers
        self._backlog = backlog
        self.unstored = 0
        """Results that are not stored yet."""
        self.unstored_bytes = 0
        """Size of their replies."""

    async def store_all(self, sent: Sent, results: Sequence[AttemptResult]) -> None:
        """Store the result of each member of `sent`."""
        size = sum(len(each.reply or b"") for each in results if isinstance(each, store.Outcome))
        self.unstored += len(results)
        self.unstored_bytes += size
        try:
            await self._store(sent, results)
        finally:
            self.unstored -= len(results)
            self.unstored_bytes -= size

    async def _store(self, sent: Sent, results: Sequence[AttemptResult]) -> None:
        members = [each.claimed for each in sent.members]
        ended = [each for each in results if isinstance(each, store.Outcome)]
        if len(ended) == len(results) > 1:
            with suppress(StoreError):  # then each is stored by itself
                current = await self._writer.submit_all(store.finish, ended)
                for each in zip(members, ended, current, strict=True):
                    self._ended(*each)
                return
        storing = [self._submit(each) for each in results]
        for claimed, result, stored in zip(members, results, storing, strict=True):
            current = await self._stored(result, stored)
            if isinstance(result, store.Outcome):
                self._ended(claimed, result, current)
            else:
                self._backlog.retried()
                self._callers.changed(claimed.uuid)

    def _ended(self, claimed: store.Claimed, outcome: store.Outcome, current: bool) -> None:
        """Record that the outcome of a request was stored, if it was `current`."""
        self._backlog.ended(claimed.service, outcome.code)
        self._callers.changed(claimed.uuid, outcome if current else None)

    async def store_partial(self, uuid: UUID, part: store.Partial) -> None:
        """Store a PARTIAL of the request with this UUID."""
        await self._stored(part, self._submit(part))
        self._callers.changed(uuid)

    def _submit(self, item: AttemptResult | store.Partial) -> "asyncio.Future[Any]":
        return self._writer.submit(_WORK[type(item)], item)

    async def _stored(self, item: AttemptResult | store.Partial, storing: "asyncio.Future[Any]") -> Any:
        """Wait until an item is stored, retrying until the database accepts it."""
        tries = 0
        while True:
            try:
                return await storing
            except StoreError:
                await asyncio.sleep(jittered(*RETRY_SECONDS, tries))
                tries += 1
            storing = self._submit(item)

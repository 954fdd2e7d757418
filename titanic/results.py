"""Stores the results of attempts, however long the database takes, and tells the callers that wait for them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from uuid import UUID

from ..mdp.backoff import doubled, jittered
from . import store
from .backlog import Backlog
from .batches import BatchExecutor
from .callers import Callers
from .retries import AttemptResult

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
        self.failing = False
        """Whether the database has failed to store the last result or PARTIAL."""

    def store_result(self, claimed: store.Claimed, result: AttemptResult, stored: Callable[[], None]) -> None:
        """Store the result of an attempt.  `stored` is called afterwards."""
        self.unstored += 1
        self.unstored_bytes += _size(result)
        self._store(result, partial(self._stored, claimed, result, stored))

    def _stored(
        self, claimed: store.Claimed, result: AttemptResult, stored: Callable[[], None], current: bool | None
    ) -> None:
        """Record that a result was stored; an outcome only if its attempt was `current`."""
        self.unstored -= 1
        self.unstored_bytes -= _size(result)
        if isinstance(result, store.Outcome):
            self._backlog.ended(claimed.service, result.code)
            self._callers.ended(claimed.uuid, result if current else None)
        else:
            self._backlog.retried()
            self._callers.progressed(claimed.uuid)
        stored()

    def store_partial(self, uuid: UUID, part: store.Partial, stored: Callable[[], None]) -> None:
        """Store a PARTIAL of the request with this UUID.  `stored` is called afterwards."""
        self._store(part, partial(self._partial_stored, uuid, stored))

    def _partial_stored(self, uuid: UUID, stored: Callable[[], None], _: None) -> None:
        self._callers.progressed(uuid)
        stored()

    def _store(self, item: AttemptResult | store.Partial, stored: Callable[[Any], None], tries: int = 0) -> None:
        """Store an item, again and again until the database accepts it, and call `stored` with what it returns."""
        storing = self._writer.submit(_WORK[type(item)], item)
        storing.add_done_callback(partial(self._ended, item, stored, tries))

    def _ended(
        self,
        item: AttemptResult | store.Partial,
        stored: Callable[[Any], None],
        tries: int,
        storing: "asyncio.Future[Any]",
    ) -> None:
        self.failing = storing.exception() is not None
        if not self.failing:
            stored(storing.result())
        else:
            pause = jittered(doubled(*RETRY_SECONDS, tries))
            storing.get_loop().call_later(pause, self._store, item, stored, tries + 1)


def _size(result: AttemptResult) -> int:
    return len(result.reply or b"") if isinstance(result, store.Outcome) else 0

"""Tends the tables periodically: due requests, leases, expired results and keys (`titanic/db/store/upkeep.py`)."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from ..db import store
from ..db.engine import Database
from ..db.group_commit import StoreError
from .attempt import Attempt
from .counters import Quota
from .dispatch import Dispatcher
from .outcome import RetryPolicy

MAINTENANCE_SECONDS: Final = 0.5
"""Interval of maintenance of the tables."""
LOCKED_SECONDS: Final = 0.05
"""Pause after a round that has left a request that is due to another transaction, which has locked it."""
COUNT_SECONDS: Final = 60.0
"""Interval at which requests that have not ended are counted."""


class Maintenance:
    """Looks for work in the database, and tells the dispatcher.

    It renews the lease, finds requests that are due, that other programs have added, or whose Titanic has died, and
    compares the requests that this Titanic is running with those in the database.

    Args:
        database: Executes the statements.
        dispatcher: Executes the requests that are found.
        quota: Told how many there are.
        retries: Reschedules requests that are running unknown to the dispatcher.
        lease: Renewed.
    """

    def __init__(
        self,
        database: Database,
        dispatcher: Dispatcher,
        quota: Quota,
        retries: RetryPolicy,
        lease: store.Lease,
    ) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._quota = quota
        self._retries = retries
        self._lease = lease
        self._looked_at = 0.0
        """When the last round was, on the monotonic clock."""

    async def run(self) -> None:
        """Tend the tables until cancelled."""
        renew_at = count_at = 0.0
        while True:
            now = time.monotonic()  # the clock may be set
            count = self._quota.take_refused() or now >= count_at
            self._dispatcher.look.clear()
            known = dict(self._dispatcher.running)
            asked = store.MaintenanceRound(
                self._lease, self._database.clock, renew_at, count, tuple(self._dispatcher.offered)
            )  # fmt: skip
            pause = MAINTENANCE_SECONDS
            try:
                found = await self._database.writer.submit(store.maintain, asked)
            except StoreError:
                pass  # the writer has logged it
            else:
                renew_at = now + self._lease.seconds / 3 if now >= renew_at else renew_at
                count_at = now + COUNT_SECONDS if count else count_at
                self._apply(found, known)
                pause = pause_after(found, self._database.clock.now())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._dispatcher.look.wait()

    def _apply(self, found: store.Findings, known: Mapping[int, Attempt]) -> None:
        if found.waiting is not None:
            self._quota.counted(found.waiting)
        for id_, attempt in known.items():
            if found.held.get(id_) != attempt.claimed.attempt:
                self._dispatcher.abandon(attempt)
        for id_ in found.held.keys() - self._dispatcher.running.keys():  # their claim's answer was lost
            again = self._retries.reschedule(id_, found.held[id_])
            self._database.writer.submit(store.reschedule, again).add_done_callback(_ignore_failure)
        for service, grouped in found.services.items():
            self._dispatcher.claim(service, grouped=grouped)
        now = time.monotonic()
        self._dispatcher.observe(max(now - self._looked_at, MAINTENANCE_SECONDS))
        self._looked_at = now


def pause_after(found: store.Findings, now: float) -> float:
    """Return how long to wait after a round that has found this."""
    if found.more:
        return 0.0
    if found.next_due is None:
        return MAINTENANCE_SECONDS
    left = found.next_due - now
    return min(left, MAINTENANCE_SECONDS) if left > 0 else LOCKED_SECONDS


def _ignore_failure(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.exception()  # if it failed, the next round finds the same

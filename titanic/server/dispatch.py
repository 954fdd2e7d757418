"""Claims requests and has them executed: as many for each service as its workers can take (C31).

A request is claimed only if its service has workers, and only slightly more requests are claimed than these can take.
So a slow service does not delay others, and urgent requests run first.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final
from uuid import UUID

from ..api.submission import Submission
from ..db import store
from ..db.engine import Database
from ..db.group_commit import StoreError
from .attempt import Attempt, Means
from .counters import Metrics, Quota
from .lanes import NO_CAPACITY, Capacity, Lane
from .outcome import AttemptResult, log_fields

MAX_BYTES: Final = 256 << 20
"""Size of claimed requests and of unstored outcomes above which each service gets one request at a time."""
MAX_UNSTORED: Final = 1000
"""Number of unstored results above which no further requests are claimed."""

log = logging.getLogger("zmdp.titanic")


class Dispatcher:
    """The requests that this Titanic is running, in a lane for each service.

    Args:
        database: Claims and releases requests, and stores what has become of them.
        means: What attempts to execute them are made with.
        quota: Told of each request that was stored or has ended.
        metrics: Counts them too.
        lease: Until when claimed requests belong to this Titanic.
    """

    def __init__(self, database: Database, means: Means, quota: Quota, metrics: Metrics, lease: store.Lease) -> None:
        self._database = database
        self._means = means
        self._quota = quota
        self._metrics = metrics
        self._lease = lease
        self._lanes: dict[str, Lane] = {}
        self._running: dict[int, Attempt] = {}
        self._bytes = 0
        """Size of the bodies of running requests."""
        self._unstored = 0
        """Results that are not stored yet."""
        self._unstored_bytes = 0
        """Size of their replies."""
        self._offered: dict[str, Capacity] = {}
        self._stopped = False
        self._none_running = asyncio.Event()
        """Set when the last running request has ended."""
        self.look = asyncio.Event()
        """Set when maintenance should look for requests that are due before its interval ends."""
        self.unknown = asyncio.Event()
        """Set when a request was stored for a service that has no workers, as far as is known."""

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def offered(self) -> Mapping[str, Capacity]:
        """The services that have workers, and what these take at a time."""
        return self._offered

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The services for which there is something to do."""
        return self._lanes

    def offer(self, offered: dict[str, Capacity]) -> None:
        """Set which services have workers, and what these take at a time."""
        self._offered = offered
        for lane in list(self._lanes.values()):
            lane.capacity = offered.get(lane.service, NO_CAPACITY)
            self._proceed(lane)

    def lane(self, service: str) -> Lane:
        """Return the service's lane, a new one if it has none."""
        lane = self._lanes.get(service)
        if lane is None:
            lane = self._lanes[service] = Lane(service, self._offered.get(service, NO_CAPACITY))
        return lane

    def observe(self, seconds: float) -> None:
        """Adapt to what happened in the last `seconds`, and forget services for which there is nothing to do."""
        for lane in list(self._lanes.values()):
            lane.observe(seconds)
            if lane.idle:
                del self._lanes[lane.service]

    # ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def accepted(self, wanted: Sequence[Submission], uuids: Sequence[UUID | None]) -> None:
        """Have requests executed that were stored; `uuids` is what `store.accept` has returned."""
        for each, uuid in zip(wanted, uuids, strict=True):
            if uuid is None:
                continue
            if uuid != each.uuid:
                self._metrics.repeated += 1
                continue
            self._metrics.accepted += 1
            self._quota.add(each.service, 1)
            if each.due > self._database.clock.now():
                self.look.set()
            elif each.service not in self._offered:
                self.unknown.set()  # if there are workers by now, maintenance finds the request
            else:
                self.claim(each.service, grouped=bool(each.group_name))

    def claim(self, service: str, *, grouped: bool) -> None:
        """Take requests for the service, of which there are some; `grouped`, if some have a group."""
        lane = self.lane(service)
        lane.look(grouped=grouped)
        self._fill(lane)

    def _fill(self, lane: Lane) -> None:
        """Take further requests for the service if there may be some and there is room for them."""
        left = MAX_BYTES - self._bytes - self._unstored_bytes
        if self._stopped or self._unstored >= MAX_UNSTORED or (left <= 0 and lane.held):
            return
        limit = lane.begin_claim()
        if limit:
            claim = store.Claim(lane.service, limit, self._lease, self._database.clock.now(), left, lane.turns())
            self._database.writer.submit(store.claim, claim).add_done_callback(partial(self._claimed, lane, claim))

    def _claimed(self, lane: Lane, claim: store.Claim, done: "asyncio.Future[list[store.Claimed]]") -> None:
        if done.cancelled() or done.exception() is not None:
            lane.claiming = False
            return  # the writer has logged the error; the next maintenance tries again
        lane.end_claim(claim, done.result())
        for claimed in done.result():
            self._add(lane, claimed)
        self._proceed(lane)

    def _add(self, lane: Lane, claimed: store.Claimed) -> None:
        """Add a request that was claimed."""
        if self._stopped:
            return  # `drain` releases it
        self.abandon(self._running.get(claimed.id))
        self._running[claimed.id] = attempt = Attempt(self._means, claimed, self._ended)
        self._bytes += len(claimed.body)
        lane.add(attempt)

    # ── executing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _proceed(self, lane: Lane) -> None:
        """Send the broker as many requests as the service's workers can take, and take further ones."""
        while not self._stopped and (attempt := lane.next()) is not None:
            self._metrics.attempts += 1
            attempt.begin()
        self._fill(lane)

    def _ended(self, attempt: Attempt, result: AttemptResult) -> None:
        """Store the result of an attempt, and send the broker the next request."""
        self._unstored += 1
        self._unstored_bytes += _size(result)
        work: Any = store.finish if isinstance(result, store.Outcome) else store.reschedule
        self._database.writer.insist(work, result, partial(self._stored, attempt, result))
        self._executed(attempt)

    def _stored(self, attempt: Attempt, result: AttemptResult, current: bool | None) -> None:
        """Tell that a result was stored; an outcome only if its attempt was `current`."""
        claimed = attempt.claimed
        self._unstored -= 1
        self._unstored_bytes -= _size(result)
        self._forget(attempt)
        if isinstance(result, store.Outcome):
            self._quota.add(claimed.service, -1)
            self._metrics.ended(result.code)
            self._means.callers.ended(claimed.uuid, result if current else None)
        else:
            self._metrics.retries += 1
            self.look.set()
            self._means.callers.progressed(claimed.uuid)
        self._fill(self.lane(claimed.service))

    def _executed(self, attempt: Attempt) -> None:
        lane = self._lanes[attempt.claimed.service]
        lane.executed(attempt)
        self._proceed(lane)

    # ── what is running ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> Mapping[int, Attempt]:
        """The requests that this Titanic has claimed and whose outcomes are not stored yet, by their ids."""
        return self._running

    def closed(self, id_: int) -> None:
        """Record that a request was closed."""
        self.abandon(self._running.get(id_))

    def abandon(self, attempt: Attempt | None) -> None:
        """Give up a request that belongs to another Titanic now, or was closed, unless that was done before."""
        if attempt is None or self._running.get(attempt.claimed.id) is not attempt:
            return
        if not attempt.is_sent:
            self._lanes[attempt.claimed.service].drop(attempt)
            self._forget(attempt)
        elif not attempt.is_over:
            log.info(
                "%s: abandoned: it was closed or reassigned, or Titanic is shutting down", attempt.claimed.uuid.hex,
                extra=log_fields(attempt.claimed),
            )  # fmt: skip
            attempt.cancel()
            self._forget(attempt)
            self._executed(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._bytes -= len(attempt.claimed.body)
        if self._running.get(attempt.claimed.id) is attempt:
            del self._running[attempt.claimed.id]
        if not self._running:
            self._none_running.set()

    def counts(self) -> dict[str, Any]:
        """Return what there is now, by name, ready for JSON.  Any thread may call it."""
        return {
            "claimed": len(self._running),
            "in_flight": sum(lane.in_flight for lane in self._lanes.copy().values()),
            "unstored": self._unstored,
            "services": len(self._offered),
        }

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Neither claim nor send any more."""
        self._stopped = True

    async def drain(self, timeout: float) -> int:
        """After `stop`, wait for running requests, and release the rest.  Return how many had not finished.

        Meanwhile maintenance must continue, which renews the lease.
        """
        for lane in self._lanes.values():
            for attempt in list(lane.buffer):
                self.abandon(attempt)
        left: list[Attempt] = []
        if self._running:
            log.info("waiting up to %g s for %d running requests", round(timeout, 1), len(self._running))
            self._none_running.clear()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._none_running.wait()
            finally:
                left = list(self._running.values())
                for attempt in left:
                    self.abandon(attempt)
        if left:
            services = ", ".join(sorted({each.claimed.service for each in left}))
            log.warning("gave up %d running requests of %s: they are executed again", len(left), services)
        with suppress(StoreError):
            await self._database.writer.submit(store.release, self._lease.holder)
        return len(left)


def _size(result: AttemptResult) -> int:
    return len(result.reply or b"") if isinstance(result, store.Outcome) else 0

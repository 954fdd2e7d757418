"""Claims requests and has them executed: as many for each service as its workers can take (C31).

A request is claimed only if its service has workers, and only slightly more requests are claimed than these can take.
So a slow service does not delay others, and urgent requests run first.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from . import store
from .attempts import Attempts
from .batches import StoreError
from .database import Database
from .lanes import Lane, Running
from .results import Results
from .retries import AttemptResult, log_fields

MAX_BYTES: Final = 256 << 20
"""Size of claimed requests and of unstored outcomes above which each service gets one request at a time."""
MAX_UNSTORED: Final = 1000
"""Number of unstored results above which no further requests are claimed."""

log = logging.getLogger("zmdp.titanic")


class Dispatcher:
    """The requests that this Titanic is running, in a lane for each service.

    Args:
        database: Claims and releases requests.
        attempts: Executes them.
        results: Stores what follows.
        lease: Until when claimed requests belong to this Titanic.
    """

    def __init__(self, database: Database, attempts: Attempts, results: Results, lease: store.Lease) -> None:
        self._database = database
        self._attempts = attempts
        self._results = results
        self._lease = lease
        self._lanes: dict[str, Lane] = {}
        self._running: dict[int, Running] = {}
        self._bytes = 0
        """Size of the bodies of running requests."""
        self._offered: dict[str, int] = {}
        self._stopped = False
        self._none_running = asyncio.Event()
        """Set when the last running request has ended."""

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def offered(self) -> Mapping[str, int]:
        """The services that have workers, and how many requests these take at a time."""
        return self._offered

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The services for which there is something to do."""
        return self._lanes

    def offer(self, offered: dict[str, int]) -> None:
        """Set which services have workers, and how many requests these take at a time."""
        self._offered = offered
        for lane in list(self._lanes.values()):
            lane.credit = offered.get(lane.service, 0)
            self._send(lane)
            self.fill(lane)

    def lane(self, service: str) -> Lane:
        """Return the service's lane, a new one if it has none."""
        lane = self._lanes.get(service)
        if lane is None:
            lane = self._lanes[service] = Lane(service, self._offered.get(service, 0))
        return lane

    def observe(self, seconds: float) -> None:
        """Adapt to what happened in the last `seconds`, and forget services for which there is nothing to do."""
        for lane in list(self._lanes.values()):
            lane.observe(seconds)
            if lane.idle:
                del self._lanes[lane.service]

    # ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, lane: Lane) -> None:
        """Take further requests for the service if there may be some and there is room for them."""
        left = MAX_BYTES - self._bytes - self._results.unstored_bytes
        if self._stopped or self._results.unstored >= MAX_UNSTORED or (left <= 0 and lane.held):
            return
        limit = lane.begin_claim()
        if limit:
            claim = store.Claim(lane.service, limit, self._lease, self._database.clock.now(), left)
            self._database.writer.submit(store.claim, claim).add_done_callback(partial(self._claimed, lane, limit))

    def _claimed(self, lane: Lane, limit: int, done: "asyncio.Future[list[store.Claimed]]") -> None:
        if done.cancelled() or done.exception() is not None:
            lane.end_claim(exhausted=False)
            return  # the writer has logged the error; the next maintenance tries again
        lane.end_claim(exhausted=len(done.result()) < limit)
        for claimed in done.result():
            self._add(lane, claimed)
        self._send(lane)
        self.fill(lane)

    def _add(self, lane: Lane, claimed: store.Claimed) -> None:
        """Add a request that was claimed."""
        if self._stopped:
            return  # `drain` releases it
        before = self._running.get(claimed.id)
        if before is not None:
            self.abandon(before)
        self._running[claimed.id] = lane.add(claimed)
        self._bytes += len(claimed.body)

    # ── executing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, lane: Lane) -> None:
        """Send the broker as many requests as the service's workers can take."""
        while lane.buffer and lane.is_free and not self._stopped:
            running = lane.take()
            running.attempt = self._attempts.begin(running.claimed, partial(self._answered, running))

    def _answered(self, running: Running, result: AttemptResult) -> None:
        """Store the result of an attempt, and send the broker the next request."""
        running.answered = True
        self._results.store_result(running.claimed, result, partial(self._stored, running))
        self._executed(running.lane)

    def _executed(self, lane: Lane) -> None:
        lane.executed()
        self._send(lane)
        self.fill(lane)

    def _stored(self, running: Running) -> None:
        self._forget(running)
        self.fill(running.lane)

    # ── what is running ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> Mapping[int, Running]:
        """The requests that this Titanic has claimed and whose outcomes are not stored yet, by their ids."""
        return self._running

    def closed(self, id_: int) -> None:
        """Record that a request was closed."""
        running = self._running.get(id_)
        if running is not None:
            self.abandon(running)

    def abandon(self, running: Running) -> None:
        """Give up a request that belongs to another Titanic now, or was closed, unless that was done before."""
        if self._running.get(running.claimed.id) is not running:
            return
        if running.attempt is None:
            running.lane.drop(running)
            self._forget(running)
        elif not running.answered:
            log.info(
                "%s: abandoned: it was closed or reassigned, or Titanic is shutting down", running.claimed.uuid.hex,
                extra=log_fields(running.claimed),
            )  # fmt: skip
            running.answered = True
            running.attempt.cancel()
            self._forget(running)
            self._executed(running.lane)

    def _forget(self, running: Running) -> None:
        self._bytes -= len(running.claimed.body)
        if self._running.get(running.claimed.id) is running:
            del self._running[running.claimed.id]
        if not self._running:
            self._none_running.set()

    def counts(self) -> dict[str, Any]:
        """Return what there is now, by name, ready for JSON.  Any thread may call it."""
        return {
            "claimed": len(self._running),
            "in_flight": sum(lane.in_flight for lane in self._lanes.copy().values()),
            "unstored": self._results.unstored,
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
            for running in list(lane.buffer):
                self.abandon(running)
        left: list[Running] = []
        if self._running:
            log.info("waiting up to %g s for %d running requests", round(timeout, 1), len(self._running))
            self._none_running.clear()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._none_running.wait()
            finally:
                left = list(self._running.values())
                for running in left:
                    self.abandon(running)
        if left:
            services = ", ".join(sorted({each.claimed.service for each in left}))
            log.warning("gave up %d running requests of %s: they are executed again", len(left), services)
        with suppress(StoreError):
            await self._database.writer.submit(store.release, self._lease.holder)
        return len(left)

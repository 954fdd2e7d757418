"""Claims requests and has them executed: as many for each service as its workers can take (C31).

A request is claimed only if its service has workers, and only slightly more requests are claimed than these can take.
So a slow service does not delay others, and urgent requests run first.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from ..clients.rows import PackSize
from . import store
from .attempts import Attempts
from .batches import StoreError
from .callers import Callers
from .database import Database
from .lanes import Lane, Running, Sent, pack_size
from .results import Results
from .retries import log_fields

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
        callers: Those that wait for rows, which are sent together.
        lease: Until when claimed requests belong to this Titanic.
    """

    def __init__(
        self, database: Database, attempts: Attempts, results: Results, callers: Callers, lease: store.Lease
    ) -> None:
        self._database = database
        self._attempts = attempts
        self._results = results
        self._callers = callers
        self._lease = lease
        self._context = copy_context()
        self._lanes: dict[str, Lane] = {}
        self._sizes: dict[str, PackSize] = {}
        """The size of packs for each service that is offered."""
        self._running: dict[int, Running] = {}
        self._bytes = 0
        """Size of the bodies of running requests."""
        self._offered: dict[str, int] = {}
        self._stopped = False

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
        self._sizes = {name: size for name, size in self._sizes.items() if name in offered}
        for lane in list(self._lanes.values()):
            lane.offer(offered.get(lane.service, 0))
            self._send(lane, patient=False)
            self.fill(lane)

    def lane(self, service: str) -> Lane:
        """Return the service's lane, a new one if it has none."""
        lane = self._lanes.get(service)
        if lane is None:
            size = self._sizes.setdefault(service, pack_size())
            lane = self._lanes[service] = Lane(service, self._offered.get(service, 0), size)
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
        lane.give_turns()
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
            self._add(lane, claimed, row=self._callers.is_row(claimed.uuid))
        self._send(lane)
        self.fill(lane)

    def execute_rows(self, lane: Lane, turn: int, claims: Iterable[store.Claimed]) -> None:
        """Execute rows that were stored as running.  So many had their `turn`, of which some may be known already."""
        lane.release(turn)
        for claimed in claims:
            self._add(lane, claimed, row=True)
        self._send(lane)
        self.fill(lane)

    def _add(self, lane: Lane, claimed: store.Claimed, *, row: bool) -> None:
        """Add a request that was claimed; `row`, if it was submitted as a row."""
        before = self._running.get(claimed.id)
        if before is not None:
            self.abandon(before)
        self._running[claimed.id] = lane.add(claimed, row=row)
        self._bytes += len(claimed.body)

    # ── executing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, lane: Lane, *, patient: bool = True) -> None:
        """Send the broker as many requests as the service's workers can take; if `patient`, rows wait for others."""
        while lane.buffer and lane.is_free(patient=patient) and not self._stopped:
            sent = lane.take()
            # In a context of its own: the current context may belong to another request, whose trace would continue.
            sent.start(self._run(sent), self._context.copy()).add_done_callback(partial(self._task_done, sent))

    async def _run(self, sent: Sent) -> None:
        results = await self._attempts.make(sent)
        self._executed(sent)
        await self._results.store_all(sent, results)

    def _executed(self, sent: Sent) -> None:
        """Record that the service has finished a request, and send it the next one."""
        sent.executed()
        self._send(sent.lane)
        self.fill(sent.lane)

    def _task_done(self, sent: Sent, task: "asyncio.Task[None]") -> None:
        # Not in `_run`: a task that is cancelled before its first step never enters it.
        del task
        if not sent.answered:
            self._executed(sent)
        for each in sent.members:
            self._forget(each)
        self.fill(sent.lane)

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
        """Give up a request that belongs to another Titanic now, or was closed."""
        if running.sent is None:
            if running.lane.drop(running):
                self._forget(running)
        elif not running.sent.answered and running.claimed.id not in running.sent.abandoned:
            log.info(
                "%s: abandoned: it was closed or reassigned, or Titanic is shutting down", running.claimed.uuid.hex,
                extra=log_fields(running.claimed),
            )  # fmt: skip
            running.sent.abandon(running)

    def _forget(self, running: Running) -> None:
        self._bytes -= len(running.claimed.body)
        if self._running.get(running.claimed.id) is running:
            del self._running[running.claimed.id]

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
        under_way = [running for running in self._running.values() if running.sent is not None]
        if under_way:
            log.info("waiting up to %g s for %d running requests", round(timeout, 1), len(under_way))
        tasks = {each.sent.task for each in under_way if each.sent is not None and each.sent.task is not None}
        pending: set[asyncio.Task[None]] = set()
        try:
            if tasks:
                _, pending = await asyncio.wait(tasks, timeout=timeout)
        finally:
            for running in under_way:
                self.abandon(running)
        left = [each for each in under_way if each.sent is not None and each.sent.task in pending]
        if left:
            services = ", ".join(sorted({each.claimed.service for each in left}))
            log.warning("gave up %d running requests of %s: they are executed again", len(left), services)
        with suppress(StoreError):
            await self._database.writer.submit(store.release, self._lease.holder)
        return len(left)

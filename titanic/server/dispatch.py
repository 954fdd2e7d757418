"""Claims requests and has them executed: as many for each service as its workers can take (C31).

A request is claimed only if its service has workers, and only slightly more requests are claimed than these can take.
So a slow service does not delay others, and urgent requests run first.  The requests of each service are in a `Lane`,
which decides how many are claimed and which is sent next; the `Dispatcher` asks.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from ...clients import AsyncClient
from ..api.submission import Submission
from ..db import store
from ..db.engine import Database
from ..db.group_commit import StoreError
from .attempt import Attempt
from .counters import Metrics, Quota
from .outcome import AttemptResult, Outcomes, log_fields

PREFETCH_FACTOR: Final = 2
"""Requests sent to the broker per unit of a service's credit, so that the next is available when one ends."""
CLAIM_AHEAD_SECONDS: Final = 0.05
"""Seconds of further requests to claim ahead, at the rate at which the service completes them."""
MAX_CLAIMED: Final = 2000
"""Maximum number of requests claimed for one service."""
MAX_BYTES: Final = 256 << 20
"""Size of claimed requests and of unstored outcomes above which each service gets one request at a time."""
MAX_UNSTORED: Final = 1000
"""Number of unstored results above which no further requests are claimed."""

log = logging.getLogger("zmdp.titanic")


class Capacity(NamedTuple):
    """How many requests a service can take at a time."""

    credit: int = 0
    """The credit of its workers, or how many requests its limits let start soon."""
    per_group: int | None = None
    """The same for each group; None without limits of groups."""


NO_CAPACITY: Final = Capacity()


class Lane:
    """The requests of one service between claim and outcome: how many to claim, and which the broker gets next."""

    __slots__ = (
        "ahead", "arrived", "buffer", "capacity", "claiming", "ended", "grouped", "groups", "held", "in_flight",
        "last_group", "pending", "service",
    )  # fmt: skip

    def __init__(self, service: str, capacity: Capacity) -> None:
        self.service = service
        self.capacity = capacity
        self.pending = False
        """Whether there may be requests to claim."""
        self.grouped = False
        """Whether some of them may have a group."""
        self.last_group = ""
        """The group that had the last turn."""
        self.groups: dict[str, int] = {}
        """How many requests of each group are held."""
        self.claiming = False
        self.arrived = False
        """Whether the database was said to have requests since the last claim began."""
        self.buffer: deque[Attempt] = deque()
        """Requests that are claimed but not yet sent to the broker."""
        self.held = 0
        """Requests that are claimed and have no outcome yet."""
        self.in_flight = 0
        """Requests at the broker."""
        self.ended = 0
        """Requests that have ended since the last maintenance."""
        self.ahead = 0
        """How many requests to claim beyond those that are sent to the broker."""

    # ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, *, grouped: bool) -> None:
        """Note that the database has requests for the service; `grouped`, if some have a group."""
        self.pending = self.arrived = True
        self.grouped |= grouped

    def begin_claim(self) -> int:
        """Return how many requests to claim now; if there are any, `end_claim` must follow."""
        if not self.pending or not self.capacity.credit or self.claiming:
            return 0
        if self.held * 4 > self.room * 3:  # claiming several costs little more than claiming one
            return 0
        self.claiming = True
        self.arrived = False
        return self.room - self.held

    def turns(self) -> store.Turns | None:
        """Return the turns of groups for a claim, or None if no request has a group."""
        room = self.group_room
        if not self.grouped and room is None:
            return None
        return store.Turns(self.last_group, self.groups.copy(), room)

    def end_claim(self, claim: store.Claim, found: Sequence[store.Claimed]) -> None:
        """End a claim that has found these requests."""
        self.claiming = False
        if found:
            self.last_group = found[-1].group_name
        # With turns, a claim that leaves room may have left requests of a group that had its share.
        exhausted = len(found) < claim.limit if claim.turns is None else not found
        if exhausted and not self.arrived:
            self.pending = self.grouped = False

    # ── requests that are claimed ────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        """How many requests may be claimed in all."""
        return min(self.capacity.credit * PREFETCH_FACTOR + self.ahead, MAX_CLAIMED)

    @property
    def group_room(self) -> int | None:
        """How many requests of a group may be claimed; None for any number."""
        per_group = self.capacity.per_group
        return None if per_group is None else per_group * PREFETCH_FACTOR

    def add(self, attempt: Attempt) -> None:
        """Add a request that was claimed."""
        self.buffer.append(attempt)
        self.held += 1
        group = attempt.claimed.group_name
        self.groups[group] = self.groups.get(group, 0) + 1

    def next(self) -> Attempt | None:
        """Return the next request to send to the broker; None if there is none, or its workers have enough."""
        if not self.buffer or self.in_flight >= self.capacity.credit * PREFETCH_FACTOR:
            return None
        self.in_flight += 1
        return self.buffer.popleft()

    def drop(self, attempt: Attempt) -> None:
        """Remove a request that was not sent."""
        self.buffer.remove(attempt)
        self._leave(attempt)

    def executed(self, attempt: Attempt) -> None:
        """Record that the service has finished a request."""
        self.in_flight -= 1
        self.ended += 1
        self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        self.held -= 1
        group, room = attempt.claimed.group_name, self.group_room
        left = self.groups.pop(group) - 1
        if left:
            self.groups[group] = left
        if room is not None and left == room // 2:  # the group was full, perhaps, and may have requests that wait
            self.pending = True

    def observe(self, seconds: float) -> None:
        """Adapt to the rate at which the service completed requests in the last `seconds`."""
        self.ahead = max(int(self.ended / seconds * CLAIM_AHEAD_SECONDS), self.ahead // 2)
        self.ended = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do for the service."""
        return not ((self.pending and self.capacity.credit) or self.claiming or self.held)


class Dispatcher:
    """The requests that this Titanic is running, in a lane for each service.

    Args:
        database: Claims and releases requests.
        client: Sends them.
        outcomes: Stores the results of attempts to execute them.
        quota: Told of each request that was accepted.
        metrics: Counts requests and attempts.
        lease: This Titanic's lease on the requests that it claims.
    """

    def __init__(
        self,
        database: Database,
        client: AsyncClient,
        outcomes: Outcomes,
        quota: Quota,
        metrics: Metrics,
        lease: store.Lease,
    ) -> None:
        self._database = database
        self._client = client
        self._outcomes = outcomes
        self._quota = quota
        self._metrics = metrics
        self._lease = lease
        self._lanes: dict[str, Lane] = {}
        self._running: dict[int, Attempt] = {}
        self._bytes = 0
        """Size of the bodies of running requests."""
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
        """The services that have workers, and how many requests these can take at a time."""
        return self._offered

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The services that have requests, by name."""
        return self._lanes

    def offer(self, offered: dict[str, Capacity]) -> None:
        """Set which services have workers, and how many requests these can take at a time."""
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
        """Adapt lanes to the rate in the last `seconds`, and forget services for which there is nothing to do."""
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
        left = MAX_BYTES - self._bytes - self._outcomes.unstored_bytes
        if self._stopped or self._outcomes.unstored >= MAX_UNSTORED or (left <= 0 and lane.held):
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
        self._running[claimed.id] = attempt = Attempt(claimed, self._client, self._outcomes, self)
        self._bytes += len(claimed.body)
        lane.add(attempt)

    # ── executing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _proceed(self, lane: Lane) -> None:
        """Send the broker as many requests as the service's workers can take, and take further ones."""
        while not self._stopped and (attempt := lane.next()) is not None:
            self._metrics.attempts += 1
            attempt.begin()
        self._fill(lane)

    def executed(self, attempt: Attempt) -> None:
        """Send the broker the next request of the service, which has finished this one."""
        lane = self._lanes[attempt.claimed.service]
        lane.executed(attempt)
        self._proceed(lane)

    def stored(self, attempt: Attempt, result: AttemptResult) -> None:
        """Take further requests for the service: the result of this attempt is stored."""
        self._forget(attempt)
        if isinstance(result, store.Reschedule):
            self.look.set()
        self._fill(self.lane(attempt.claimed.service))

    # ── running requests ─────────────────────────────────────────────────────────────────────────────────────────────

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
            self.executed(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._bytes -= len(attempt.claimed.body)
        if self._running.get(attempt.claimed.id) is attempt:
            del self._running[attempt.claimed.id]
        if not self._running:
            self._none_running.set()

    def counts(self) -> dict[str, Any]:
        """Return the current numbers of requests and services, ready for JSON.  Any thread may call it."""
        return {
            "claimed": len(self._running),
            "in_flight": sum(lane.in_flight for lane in self._lanes.copy().values()),
            "unstored": self._outcomes.unstored,
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

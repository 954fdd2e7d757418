"""Executes stored requests: a client of the broker with many numbered requests over one connection (C31).

A request is claimed only if its service has workers, and only slightly more requests are claimed than these can take.
So a slow service does not delay others, and urgent requests run first.  Rows whose caller waits are not claimed: they
are stored when the workers can take them, as running.  `retries.py` decides what follows an attempt.

Each request is sent on behalf of its owner, so the broker refuses what the owner may not call.
"""

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final
from uuid import UUID

from ..clients import AsyncClient, RequestError, RequestTimeout, SettingError
from ..clients.rows import PackSize
from ..mdp.codes import Code
from ..mdp.rows import OPTION, read_reply, worked_seconds
from ..mdp.tracing import REQUEST_ID
from . import store
from .batches import BatchExecutor, StoreError
from .callers import Callers
from .frames import LENGTH, pack, unpack
from .lanes import Lane, Running, Sent, Turn, pack_size
from .metrics import Metrics
from .retries import TRANSIENT_CODES, RetryPolicy, fits, jittered, log_fields, request_id, transient_pause, workers_lost
from .submission import Submission

MAX_BYTES: Final = 256 << 20
"""Size of claimed requests and of unstored outcomes above which each service gets one request at a time."""
MAX_UNSTORED: Final = 1000
"""Number of unstored outcomes above which no further requests are claimed."""
MAX_TURN_SECONDS: Final = 5.0
"""How long rows wait, not yet stored, for workers that can take them."""
MAX_PARTIALS: Final = 1_000_000
"""Maximum number of PARTIALs of one reply."""
MAX_UNSTORED_PARTIALS: Final = 64
"""Number of unstored PARTIALs of one stream above which reading it pauses."""
MAINTENANCE_SECONDS: Final = 0.5
"""Interval of maintenance of the tables."""
DISCOVERY_SECONDS: Final = 0.5
"""Interval at which Titanic asks the broker which services have workers."""
MIN_DISCOVERY_SECONDS: Final = 0.05
"""The shortest such interval, while requests arrive for services that have no workers."""
DISCOVERY_PAGE: Final = 100
"""How many services to ask for one by one in each interval, if the broker has too many to list them all."""
COUNT_SECONDS: Final = 60.0
"""Interval at which requests that have not ended are counted."""
DISCOVERY_TIMEOUT_SECONDS: Final = 5.0
"""How long to wait for the broker's answer."""
NOTHING: Final[dict[str, Any]] = {"broker": False, "claimed": 0, "in_flight": 0, "unstored": 0, "services": 0}
"""What `Dispatcher.running` returns before there is a dispatcher."""

log = logging.getLogger("zmdp.titanic")


class Dispatcher:
    """Claims requests, executes them through `client`, and stores their outcomes.

    Args:
        client: The client that sends the requests.
        writer: Executes statements that write.
        keyed: Stores requests with keys.
        clock: The database's clock.
        lease: Seconds for which claimed requests belong to this Titanic.
        ttl: Seconds to keep results of requests without a ttl of their own; None keeps them until they are closed.
        max_waiting: Maximum number of requests that have not ended.
        max_deaths: Lost workers after which a request fails.
        callers: Told of each request whose state or PARTIALs have changed.
        metrics: Counts attempts and outcomes.
    """

    def __init__(
        self,
        client: AsyncClient,
        writer: BatchExecutor,
        keyed: BatchExecutor,
        clock: store.Clock,
        *,
        lease: float,
        ttl: float | None,
        max_waiting: int,
        max_deaths: int,
        callers: Callers,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._client = client
        self._writer = writer
        self._keyed = keyed
        self._clock = clock
        self._max_waiting = max_waiting
        self._callers = callers
        self._context = copy_context()
        self._holder = secrets.token_hex(8)
        self._lease = store.Lease(self._holder, lease)
        self._retries = RetryPolicy(self._holder, clock, ttl=ttl, max_deaths=max_deaths, metrics=metrics)
        self._lanes: dict[str, Lane] = {}
        self._sizes: dict[str, PackSize] = {}
        """The size of packs for each service that is offered."""
        self._running: dict[int, Running] = {}
        self._accepting: set[asyncio.Future[Any]] = set()
        """Answers that are awaited about rows which are being stored as running."""
        self._strays: dict[int, frozenset[asyncio.Future[Any]]] = {}
        """Requests that are running here according to the last maintenance, but are unknown, and those of the answers
        that may make them known."""
        self._bytes = 0
        self._unstored = 0
        self._waiting = 0
        """Requests that have not ended: the last count, and this Titanic's changes since."""
        self._recount = False
        """Whether to count them now."""
        self._wake = asyncio.Event()
        self._discover_now = asyncio.Event()
        self._offered: dict[str, int] = {}
        """The credit of each service, from the broker's last answer."""
        self._lists_services = False
        """Whether the broker has answered the last question for its services."""
        self._ending = False
        """Whether `end_turns` was called."""
        self._draining = False
        self._page = ""
        """The last service that was asked for one by one."""
        self._maintained_at = 0.0
        """When the last maintenance was, on the monotonic clock."""

    # ── called by the service ────────────────────────────────────────────────────────────────────────────────────────

    def room(self) -> bool:
        """Return whether one more request may be accepted."""
        if self._waiting < self._max_waiting:
            return True
        self._recount = True  # perhaps there is room again
        return False

    async def accept_rows(self, rows: Sequence[Submission], seconds: float | None) -> list[UUID | None]:
        """Store requests to a service that one caller has submitted together, each with a key.

        If workers can take them before half of the caller's `seconds` have passed, they are stored only then and run
        at once, which saves claiming them.  Returns what `store.accept` does.  Raises `StoreError`.
        """
        service, due = rows[0].service, rows[0].due
        patience = MAX_TURN_SECONDS if seconds is None else min(seconds / 2, MAX_TURN_SECONDS)
        lane = await self._turn(service, len(rows), patience) if due <= self._clock.now() else None
        if lane is not None:
            return [*await self._accept_running(lane, rows)]
        uuids = await self._keyed.submit_all(store.accept, rows)
        stored = sum(uuid == row.uuid for uuid, row in zip(uuids, rows, strict=True))
        self._metrics.repeated += len(rows) - stored
        if stored:
            self.accepted(service, due, stored)
        return uuids

    def accepted(self, service: str, due: float, count: int = 1) -> None:
        """Record that requests were stored."""
        self._metrics.accepted += count
        self._waiting += count
        if due > self._clock.now():
            self._wake.set()
            return
        if not self._offered.get(service):
            self._discover_now.set()  # if there are workers by now, maintenance finds the request
            return
        lane = self._lane(service)
        lane.accepted += 1
        lane.pending = True
        self._fill(lane)

    def end_turns(self) -> None:
        """Let no rows wait for their turn: Titanic is about to end."""
        self._ending = True
        for lane in self._lanes.values():
            for turn in lane.turns:
                turn.end()

    def gone(self, id_: int) -> None:
        """Record that a request was closed."""
        running = self._running.get(id_)
        if running is not None:
            self._abandon(running)

    def running(self) -> dict[str, Any]:
        """Return what this Titanic has now, by name, ready for JSON."""
        return {
            "broker": self._lists_services,
            "claimed": len(self._running),
            "in_flight": sum(lane.in_flight for lane in self._lanes.copy().values()),
            "unstored": self._unstored,
            "services": len(self._offered),
        }

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._maintain_periodically())
            tasks.create_task(self._discover_periodically())

    async def _maintain_periodically(self) -> None:
        renew_at = count_at = 0.0
        while True:
            now = time.monotonic()  # the clock may be set
            count = self._recount or now >= count_at
            self._recount = False
            self._wake.clear()
            held = dict(self._running)
            asked = store.Maintenance(
                self._lease, self._clock, renew_at, self._max_waiting if count else None, tuple(self._offered)
            )
            pause = MAINTENANCE_SECONDS
            try:
                found = await self._writer.submit(store.maintain, asked)
            except StoreError:
                pass  # the writer has logged it
            else:
                renew_at = now + self._lease.seconds / 3 if now >= renew_at else renew_at
                count_at = now + COUNT_SECONDS if count else count_at
                self._apply(found, held)
                if found.next_due is not None:
                    pause = min(pause, max(0.0, found.next_due - self._clock.now()))
                if found.more:
                    pause = 0.0
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    def _apply(self, found: store.Findings, held: dict[int, Running]) -> None:
        if found.waiting is not None:
            self._waiting = found.waiting
        for id_, running in held.items():
            if found.held.get(id_) != running.claimed.attempt:
                self._abandon(running)
        self._put_back_strays(found.held)
        for service in found.services:
            lane = self._lane(service)
            lane.pending = True
            self._fill(lane)
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            lane.observe(max(now - self._maintained_at, MAINTENANCE_SECONDS))
            if lane.idle:
                del self._lanes[lane.service]
        self._maintained_at = now

    def _put_back_strays(self, held: Mapping[int, int]) -> None:
        """Retry requests that were claimed in transactions whose answers were lost."""
        before, self._strays = self._strays, {}
        accepting = frozenset(self._accepting)
        for id_ in held.keys() - self._running.keys():
            if awaited := before.get(id_, accepting) & accepting:
                self._strays[id_] = awaited
            else:
                putting_back = self._writer.submit(store.reschedule, self._retries.reschedule(id_, held[id_]))
                putting_back.add_done_callback(_ignore_failure)

    async def _discover_periodically(self) -> None:
        """Keep track of the services that have workers (C31)."""
        while True:
            self._discover_now.clear()
            try:
                offered = await self._discover()
            except RequestTimeout as error:
                log.warning("%s", error)
                offered = {}
                self._lists_services = False
            except (RequestError, ValueError, TypeError, KeyError) as error:
                log.error("the broker did not list its services, which Titanic needs: %s", error)
                offered = {}
                self._lists_services = False
            else:
                self._lists_services = True
            if not offered.keys() <= self._offered.keys():
                self._wake.set()  # there may be requests for the new services
            self._offered = offered
            self._sizes = {name: size for name, size in self._sizes.items() if name in offered}
            for lane in list(self._lanes.values()):
                lane.credit = offered.get(lane.service, 0)
                self._send(lane, patient=False)
                self._fill(lane)
            await asyncio.sleep(MIN_DISCOVERY_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_SECONDS):
                    await self._discover_now.wait()

    async def _discover(self) -> dict[str, int]:
        """Return the credit of each service that has any."""
        offered, more = await self._credit(b"")
        if more:
            page: list[str] = []
            with suppress(StoreError):
                page = await self._writer.submit(store.pending_after, (self._page, DISCOVERY_PAGE))
            self._page = page[-1] if len(page) == DISCOVERY_PAGE else ""
            # Services with requests in flight are asked for too, so that their lanes keep their credit.
            names = [name for name in {*page, *self._lanes} if name not in offered]
            for each, _ in await asyncio.gather(*(self._credit(name.encode()) for name in names)):
                offered |= each
        return {name: credit for name, credit in offered.items() if credit}

    async def _credit(self, service: bytes) -> tuple[dict[str, int], int]:
        """Return the credit of this service, or of all, and how many services were left out."""
        (answer,) = await self._client.request("mmi.services", service, timeout=DISCOVERY_TIMEOUT_SECONDS)
        listed = json.loads(answer)
        return {str(row["name"]): _capacity(row) for row in listed["services"]}, int(listed["more"])

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _lane(self, service: str) -> Lane:
        lane = self._lanes.get(service)
        if lane is None:
            lane = self._lanes[service] = Lane(service, self._sizes.setdefault(service, pack_size()))
            lane.credit = self._offered.get(service, 0)
        return lane

    def _fill(self, lane: Lane) -> None:
        """Take further requests for the service if there may be some and there is room for them."""
        most, held = lane.room, lane.held
        if self._draining or self._unstored >= MAX_UNSTORED or (self._bytes >= MAX_BYTES and held):
            return
        while lane.turns and lane.gives_turns:
            turn = lane.turns.popleft()
            turn.give()
            lane.held += turn.rows
        if not lane.pending or not lane.credit or lane.claiming:
            return
        if held * 4 > most * 3:  # claiming several costs little more than claiming one
            return
        lane.claiming = True
        limit = most - held
        claim = store.Claim(lane.service, limit, self._lease, self._clock.now(), MAX_BYTES - self._bytes)
        self._writer.submit(store.claim, claim).add_done_callback(partial(self._claimed, lane, lane.accepted, limit))

    def _claimed(self, lane: Lane, accepted: int, limit: int, done: "asyncio.Future[list[store.Claimed]]") -> None:
        lane.claiming = False
        if done.cancelled() or done.exception() is not None:
            return  # the writer has logged the error; the next maintenance tries again
        for claimed in done.result():
            self._add(lane, claimed, row=self._callers.is_row(claimed.uuid))
        if len(done.result()) < limit and lane.accepted == accepted:
            lane.pending = False
        self._send(lane)
        self._fill(lane)

    def _add(self, lane: Lane, claimed: store.Claimed, *, row: bool) -> None:
        """Add a request that was claimed; `row`, if it was submitted as a row."""
        before = self._running.get(claimed.id)
        if before is not None:
            self._abandon(before)
        self._running[claimed.id] = lane.add(claimed, row=row)
        self._bytes += len(claimed.body)

    async def _turn(self, service: str, rows: int, seconds: float) -> Lane | None:
        """Wait until the service's workers can take so many rows, and return its lane; None if that takes longer."""
        if not self._offered.get(service) or self._ending:
            return None
        lane = self._lane(service)
        turn = Turn(rows, asyncio.get_running_loop().create_future())
        lane.turns.append(turn)
        self._fill(lane)
        try:
            await asyncio.wait((turn.over,), timeout=seconds)
        except asyncio.CancelledError:
            if turn.given:
                lane.held -= rows
                self._fill(lane)
            raise
        finally:
            if not turn.given:
                lane.turns.remove(turn)
        return lane if turn.given else None

    async def _accept_running(self, lane: Lane, rows: Sequence[Submission]) -> list[UUID]:
        """Store rows that have their turn and send them to the workers.  Returns their UUIDs, as `accept_rows`."""
        now = self._clock.now()
        accepting = self._keyed.submit_all(
            store.accept_running, [store.Arrival(each, self._lease, now) for each in rows]
        )
        self._accepting.add(accepting)
        accepting.add_done_callback(partial(self._accepted_running, lane, len(rows)))
        # If the caller goes away, the rows are executed all the same.
        return [each if isinstance(each, UUID) else each.uuid for each in await asyncio.shield(accepting)]

    def _accepted_running(self, lane: Lane, count: int, done: "asyncio.Future[list[store.Claimed | UUID]]") -> None:
        self._accepting.remove(done)
        lane.held -= count
        if not done.cancelled() and done.exception() is None:
            claims = [each for each in done.result() if isinstance(each, store.Claimed)]
            self._metrics.accepted += len(claims)
            self._metrics.repeated += count - len(claims)
            self._waiting += len(claims)
            for claimed in claims:
                self._add(lane, claimed, row=True)
            self._send(lane)
        self._fill(lane)

    def _send(self, lane: Lane, *, patient: bool = True) -> None:
        """Send the broker as many requests as the service's workers can take; if `patient`, rows wait for others."""
        while lane.buffer and lane.is_free(patient=patient) and not self._draining:
            sent = lane.take()
            # In a context of its own: the current context may belong to another request, whose trace would continue.
            sent.task = asyncio.get_running_loop().create_task(self._run(sent), context=self._context.copy())
            sent.task.add_done_callback(partial(self._task_done, sent))

    async def _run(self, sent: Sent) -> None:
        self._metrics.attempts += len(sent.members)
        outcomes: Sequence[store.Outcome | store.Reschedule]
        if len(sent.members) == 1:
            outcomes = [await self._execute(sent.members[0])]
        else:
            outcomes = await self._execute_pack(sent)
        self._executed(sent)
        size = sum(len(each.reply or b"") for each in outcomes if isinstance(each, store.Outcome))
        self._bytes += size
        self._unstored += len(outcomes)
        try:
            await self._store_outcomes(sent, outcomes)
        finally:
            self._bytes -= size
            self._unstored -= len(outcomes)

    async def _store_outcomes(self, sent: Sent, outcomes: Sequence[store.Outcome | store.Reschedule]) -> None:
        ended = [each for each in outcomes if isinstance(each, store.Outcome)]
        if len(ended) == len(outcomes) > 1:
            with suppress(StoreError):  # then each is stored by itself
                current = await self._writer.submit_all(store.finish, ended)
                for each in zip(sent.members, ended, current, strict=True):
                    self._ended(*each)
                return
        storing = [self._submit(each) for each in outcomes]
        for running, outcome, stored in zip(sent.members, outcomes, storing, strict=True):
            current = await self._stored(outcome, stored)
            if isinstance(outcome, store.Outcome):
                self._ended(running, outcome, current)
            else:
                self._metrics.retries += 1
                self._wake.set()
                self._callers.changed(running.claimed.uuid)

    def _ended(self, running: Running, outcome: store.Outcome, current: bool) -> None:
        """Record that the outcome of a request was stored, if it was `current`."""
        self._waiting -= 1
        self._metrics.ended(outcome.code)
        self._callers.changed(running.claimed.uuid, outcome if current else None)

    def _executed(self, sent: Sent) -> None:
        """Record that the service has finished a request, and send it the next one."""
        sent.answered = True
        sent.lane.executed(sent)
        self._send(sent.lane)
        self._fill(sent.lane)

    def _task_done(self, sent: Sent, task: "asyncio.Task[None]") -> None:
        # Not in `_run`: a task that is cancelled before its first step never enters it.
        del task
        if not sent.answered:
            self._executed(sent)
        for each in sent.members:
            self._forget(each)
        self._fill(sent.lane)

    async def _execute(self, running: Running) -> store.Outcome | store.Reschedule:
        """Call the service, store its PARTIALs, and return the outcome."""
        claimed = running.claimed
        saving: deque[asyncio.Task[None]] = deque()
        outcome: store.Outcome | store.Reschedule
        try:
            try:
                outcome = await self._call(running, saving)
            except RequestError as error:
                outcome = self._retries.after_error(claimed, error)
            except SettingError as error:  # the request can never be sent
                outcome = self._retries.failure(claimed, Code.MALFORMED, str(error))
            except Exception as error:  # one broken request must not stop the others
                log.exception("%s cannot be dispatched", claimed.uuid.hex, extra=log_fields(claimed))
                outcome = self._retries.reschedule(
                    claimed.id, claimed.attempt, transient_pause(claimed.attempt), repr(error)
                )
            for each in saving:
                await each
        finally:
            for each in saving:
                each.cancel()
        return outcome

    async def _execute_pack(self, sent: Sent) -> Sequence[store.Outcome | store.Reschedule]:
        """Call the service with the rows of a pack, and return the outcome of each.

        If the pack fails as a whole, its requests are not to blame.  They are sent again, each by itself.
        """
        claims = [each.claimed for each in sent.members]
        first, size = claims[0], sent.lane.size
        began = time.monotonic()
        pause = 0.0
        try:
            headers, options = _addressing(first)
            rows = [claimed.body[LENGTH:] for claimed in claims]
            reply = await self._client.request(
                first.service, *rows, timeout=None, headers=headers, options={**options, OPTION: len(rows)}
            )
        except (RequestError, SettingError) as error:
            reason = str(error)
            if isinstance(error, RequestError):
                reason = error.text or reason
                self._metrics.deaths += workers_lost(error)
                if error.code in TRANSIENT_CODES:
                    pause = transient_pause(1)
            size.failed()
        except Exception as error:  # one broken request must not stop the others
            log.exception("a pack of %d requests cannot be dispatched", len(claims), extra=log_fields(first))
            reason, pause = repr(error), transient_pause(1)
        else:
            outcomes = read_reply(reply, len(claims))
            size.replied(len(claims), time.monotonic() - began, worked_seconds(reply), understood=outcomes is not None)
            if outcomes is not None:
                return [self._retries.after_row(*each) for each in zip(claims, outcomes, strict=True)]
            reason = "its worker does not understand packs of rows"
        log.info(
            "%s and %d others: %s; sending each by itself", first.uuid.hex, len(claims) - 1, reason,
            extra=log_fields(first),
        )  # fmt: skip
        return [self._retries.reschedule(claimed.id, claimed.attempt, pause, reason) for claimed in claims]

    async def _call(self, running: Running, saving: "deque[asyncio.Task[None]]") -> store.Outcome | store.Reschedule:
        """Call the service, storing its PARTIALs as they arrive."""
        claimed, size = running.claimed, running.lane.size
        try:
            body = unpack(claimed.body)
            headers, options = _addressing(claimed)
        except ValueError as error:  # another program has written the row
            return self._retries.failure(claimed, Code.MALFORMED, str(error))
        asked = running.row and size.understood is not False
        if asked:
            options[OPTION] = 1
        began = time.monotonic()
        async with aclosing(self._client.stream(claimed.service, *body, headers=headers, options=options)) as parts:
            number = 0
            async for part in parts:
                if part.final:
                    break
                if number == MAX_PARTIALS:
                    reason = f"the reply has more than {MAX_PARTIALS} PARTIALs"
                    return self._retries.failure(claimed, Code.TOO_LARGE, reason)
                if not fits(part):
                    reason = f"PARTIAL {number} is too large to be fetched"
                    return self._retries.failure(claimed, Code.TOO_LARGE, reason)
                saved = store.Partial(claimed.id, claimed.attempt, number, pack(part))
                saving.append(asyncio.create_task(self._store_partial(claimed.uuid, saved)))
                number += 1
                if len(saving) >= MAX_UNSTORED_PARTIALS:
                    await saving.popleft()
        if asked:
            outcomes = read_reply(part, 1) if number == 0 else None
            size.replied(1, time.monotonic() - began, worked_seconds(part), understood=outcomes is not None)
            if outcomes is not None:
                return self._retries.after_row(claimed, outcomes[0])
        return self._retries.success(claimed, part)

    async def _store_partial(self, uuid: UUID, part: store.Partial) -> None:
        await self._stored(part, self._submit(part))
        self._callers.changed(uuid)

    def _submit(self, item: store.Outcome | store.Reschedule | store.Partial) -> "asyncio.Future[Any]":
        if isinstance(item, store.Outcome):
            return self._writer.submit(store.finish, item)
        if isinstance(item, store.Reschedule):
            return self._writer.submit(store.reschedule, item)
        return self._writer.submit(store.add_partials, item)

    async def _stored(
        self, item: store.Outcome | store.Reschedule | store.Partial, storing: "asyncio.Future[Any]"
    ) -> Any:
        """Wait until an item is stored, retrying until the database accepts it."""
        tries = 0
        while True:
            try:
                return await storing
            except StoreError:
                await asyncio.sleep(jittered(0.1, 2.0, tries))
                tries += 1
            storing = self._submit(item)

    def _abandon(self, running: Running) -> None:
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

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, timeout: float) -> int:
        """Stop claiming, wait for running requests, and release the rest.  Return how many had not finished.

        Meanwhile `run` must continue, which renews the lease.
        """
        self._draining = True
        if self._accepting:  # what they claim is released, too
            await asyncio.wait(self._accepting)
        for lane in self._lanes.values():
            for running in list(lane.buffer):
                self._abandon(running)
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
                self._abandon(running)
        left = [each for each in under_way if each.sent is not None and each.sent.task in pending]
        if left:
            services = ", ".join(sorted({each.claimed.service for each in left}))
            log.warning("gave up %d running requests of %s: they are executed again", len(left), services)
        with suppress(StoreError):
            await self._writer.submit(store.release, self._holder)
        return len(left)


def _addressing(claimed: store.Claimed) -> tuple[Any, dict[str, Any]]:
    """Return headers and options of a request.  Raises `ValueError` if its headers are not JSON."""
    headers = json.loads(claimed.headers or "null")
    if headers is None or isinstance(headers, dict):
        headers = {REQUEST_ID: request_id(claimed, headers), **(headers or {})}
    return headers, {"on_behalf": claimed.owner} if claimed.owner else {}


def _capacity(row: Mapping[str, Any]) -> int:
    """Return how many requests the workers of a service can hold, at this broker and at others, used or free."""
    local = int(row["credit"]) + int(row["running"])
    return local + int(row.get("remote_credit", 0)) - int(row.get("remote_running", 0))


def _ignore_failure(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.exception()  # if it failed, the next maintenance finds the same

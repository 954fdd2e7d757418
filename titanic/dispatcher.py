"""Executes stored requests: a client of the broker with many numbered requests over one connection (C31).

A request is claimed only if its service has workers, and only slightly more requests are claimed than these can take.
So a slow service does not delay others, and urgent requests run first.  Requests that are interrupted by the death of a
worker, a broker or a Titanic are retried, but not if they have cost `max_deaths` workers; a handler's answer, even an
error, is the outcome.

Each request is sent on behalf of its owner, so the broker refuses what the owner may not call.
"""

import asyncio
import json
import logging
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final
from uuid import UUID

from ..clients import (
    AsyncClient,
    RequestError,
    RequestRejected,
    RequestTimeout,
    ServiceError,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from ..clients.rows import PackSize
from ..mdp.codes import Code
from ..mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ..mdp.rows import OPTION, Failed, read_reply
from ..mdp.tracing import REQUEST_ID, shown_id
from . import store
from .batches import BatchExecutor, StoreError
from .frames import LENGTH, pack, unpack
from .lanes import Lane, Running, Sent, pack_size
from .metrics import Metrics
from .store.maintenance import MAX_BACKOFF_SECONDS

MAX_BYTES: Final = 256 << 20
"""Size of claimed requests and of unstored outcomes above which each service gets one request at a time."""
MAX_UNSTORED: Final = 1000
"""Number of unstored outcomes above which no further requests are claimed."""
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
BACKOFF_SECONDS: Final = (0.5, 60.0)
"""The first and the longest pause before another attempt; each is twice as long as the one before."""
HANDLER_BACKOFF_SECONDS: Final = (1.0, MAX_BACKOFF_SECONDS)
"""The same after a handler has failed.  A request's own backoff replaces the first pause."""
MAX_REPLY_BYTES: Final = MAX_BODY - 100
"""Maximum size of a reply: when it is fetched, its status comes first."""
TRANSIENT_CODES: Final = frozenset({Code.TIME_PASSED, Code.QUEUE_FULL, Code.WORKER_LOST, Code.DRAINING})
"""Codes after which a request is retried without limit, whether the broker or a handler gave them; but the workers that
the broker reports as lost count towards `max_deaths`."""
NOTHING: Final[dict[str, Any]] = {"broker": False, "claimed": 0, "in_flight": 0, "unstored": 0, "services": 0}
"""What `Dispatcher.running` returns before there is a dispatcher."""
_ATTEMPT: Final = re.compile(r"this was attempt (\d+) of")
_LINKS_LOST: Final = re.compile(r"the links over which it was passed")
"""In the text of the broker's 502: how many workers were lost with the request.  The broker tries several before it
gives up."""

log = logging.getLogger("zmdp.titanic")


class Dispatcher:
    """Claims requests, executes them through `client`, and stores their outcomes.

    Args:
        client: The client that sends the requests.
        writer: Executes statements that write.
        clock: The database's clock.
        lease: Seconds for which claimed requests belong to this Titanic.
        ttl: Seconds to keep results of requests without a ttl of their own; None keeps them until they are closed.
        max_waiting: Maximum number of requests that have not ended.
        max_deaths: Lost workers after which a request fails.
        changed: Called with the UUID of each request whose state or PARTIALs have changed, and with its outcome if
            that was stored.
        is_row: Returns whether a request was submitted as a row by a caller that waits for it.
        metrics: Counts attempts and outcomes.
    """

    def __init__(
        self,
        client: AsyncClient,
        writer: BatchExecutor,
        clock: store.Clock,
        *,
        lease: float,
        ttl: float | None,
        max_waiting: int,
        max_deaths: int,
        changed: Callable[[UUID, store.Outcome | None], None],
        is_row: Callable[[UUID], bool],
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._client = client
        self._writer = writer
        self._clock = clock
        self._ttl = ttl
        self._max_waiting = max_waiting
        self._max_deaths = max_deaths
        self._changed = changed
        self._is_row = is_row
        self._context = copy_context()
        self._holder = secrets.token_hex(8)
        self._lease = store.Lease(self._holder, lease)
        self._lanes: dict[str, Lane] = {}
        self._sizes: dict[str, PackSize] = {}
        """The size of packs for each service that is offered."""
        self._running: dict[int, Running] = {}
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

    def accepted(self, service: str, due: float) -> None:
        """Record that a request was stored."""
        self._waiting += 1
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
        for id_, attempt in found.held.items():
            if id_ not in self._running:  # claimed, but the answer to the transaction was lost
                self._writer.submit(store.reschedule, self._reschedule(id_, attempt)).add_done_callback(_ignore_failure)
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
                self._send(lane)
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
        """Claim requests for the service if there may be some and there is room for them."""
        if not lane.pending or not lane.credit or lane.claiming or self._draining:
            return
        most, held = lane.room, lane.held
        if held * 4 > most * 3:  # claiming several costs little more than claiming one
            return
        if self._unstored >= MAX_UNSTORED or (self._bytes >= MAX_BYTES and held):
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
            before = self._running.get(claimed.id)
            if before is not None:
                self._abandon(before)
            self._running[claimed.id] = lane.add(claimed, row=self._is_row(claimed.uuid))
            self._bytes += len(claimed.body)
        if len(done.result()) < limit and lane.accepted == accepted:
            lane.pending = False
        self._send(lane)
        self._fill(lane)

    def _send(self, lane: Lane) -> None:
        """Send the broker as many requests as the service's workers can take."""
        while lane.buffer and lane.free and not self._draining:
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
        storing = [self._submit(each) for each in outcomes]
        for running, outcome, stored in zip(sent.members, outcomes, storing, strict=True):
            current = await self._stored(outcome, stored)
            if isinstance(outcome, store.Outcome):
                self._waiting -= 1
                self._metrics.ended(outcome.code)
            else:
                self._metrics.retries += 1
                self._wake.set()
            self._changed(running.claimed.uuid, outcome if current and isinstance(outcome, store.Outcome) else None)

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

    async def _execute(self, running: Running) -> store.Outcome | store.Reschedule:
        """Call the service, store its PARTIALs, and return the outcome."""
        claimed = running.claimed
        saving: deque[asyncio.Task[None]] = deque()
        outcome: store.Outcome | store.Reschedule
        try:
            try:
                outcome = await self._call(running, saving)
            except RequestError as error:
                outcome = self._after_error(claimed, error)
            except SettingError as error:  # the request can never be sent
                outcome = self._failure(claimed, Code.MALFORMED, str(error))
            except Exception as error:  # one broken request must not stop the others
                log.exception("%s cannot be dispatched", claimed.uuid.hex, extra=_fields(claimed))
                outcome = self._reschedule(
                    claimed.id, claimed.attempt, _jittered(*BACKOFF_SECONDS, claimed.attempt - 1), repr(error)
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
                self._metrics.deaths += _workers_lost(error)
                if error.code in TRANSIENT_CODES:
                    pause = _jittered(*BACKOFF_SECONDS, 0)
            size.failed()
        except Exception as error:  # one broken request must not stop the others
            log.exception("a pack of %d requests cannot be dispatched", len(claims), extra=_fields(first))
            reason, pause = repr(error), _jittered(*BACKOFF_SECONDS, 0)
        else:
            outcomes = read_reply(reply, len(claims))
            size.replied(len(claims), time.monotonic() - began, understood=outcomes is not None)
            if outcomes is not None:
                return [self._row_outcome(*each) for each in zip(claims, outcomes, strict=True)]
            reason = "its worker does not understand packs of rows"
        log.info(
            "%s and %d others: %s; sending each by itself", first.uuid.hex, len(claims) - 1, reason,
            extra=_fields(first),
        )  # fmt: skip
        return [self._reschedule(claimed.id, claimed.attempt, pause, reason) for claimed in claims]

    def _row_outcome(self, claimed: store.Claimed, outcome: list[bytes] | Failed) -> store.Outcome | store.Reschedule:
        if isinstance(outcome, Failed):
            return self._after_error(claimed, ServiceError(outcome.code, outcome.text, *outcome.detail))
        return self._success(claimed, outcome)

    async def _call(self, running: Running, saving: "deque[asyncio.Task[None]]") -> store.Outcome | store.Reschedule:
        """Call the service, storing its PARTIALs as they arrive."""
        claimed, size = running.claimed, running.lane.size
        try:
            body = unpack(claimed.body)
            headers, options = _addressing(claimed)
        except ValueError as error:  # another program has written the row
            return self._failure(claimed, Code.MALFORMED, str(error))
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
                    return self._failure(claimed, Code.TOO_LARGE, f"the reply has more than {MAX_PARTIALS} PARTIALs")
                if not _fits(part):
                    return self._failure(claimed, Code.TOO_LARGE, f"PARTIAL {number} is too large to be fetched")
                saved = store.Partial(claimed.id, claimed.attempt, number, pack(part))
                saving.append(asyncio.create_task(self._store_partial(claimed.uuid, saved)))
                number += 1
                if len(saving) >= MAX_UNSTORED_PARTIALS:
                    await saving.popleft()
        if asked:
            outcomes = read_reply(part, 1) if number == 0 else None
            size.replied(1, time.monotonic() - began, understood=outcomes is not None)
            if outcomes is not None:
                return self._row_outcome(claimed, outcomes[0])
        return self._success(claimed, part)

    async def _store_partial(self, uuid: UUID, part: store.Partial) -> None:
        await self._stored(part, self._submit(part))
        self._changed(uuid, None)

    def _success(self, claimed: store.Claimed, reply: Sequence[bytes]) -> store.Outcome:
        if not _fits(reply):
            return self._failure(claimed, Code.TOO_LARGE, "the reply is too large to be fetched")
        now = self._clock.now()
        return store.Outcome(claimed.id, self._holder, claimed.attempt, now, pack(reply), ttl=self._ttl)

    def _failure(
        self, claimed: store.Claimed, code: int, text: str, detail: bytes | None = None, deaths: int | None = None
    ) -> store.Outcome:
        text = text.replace("\0", "?")  # PostgreSQL cannot store NUL
        now = self._clock.now()
        return store.Outcome(claimed.id, self._holder, claimed.attempt, now, detail, code, text, self._ttl, deaths)

    def _after_error(self, claimed: store.Claimed, error: RequestError) -> store.Outcome | store.Reschedule:
        text, code = error.text or str(error), error.code
        if code in TRANSIENT_CODES or (code is None and not isinstance(error, ServiceError)):
            lost = _workers_lost(error)
            self._metrics.deaths += lost
            deaths = claimed.deaths + lost
            if deaths > claimed.deaths and deaths >= self._max_deaths:
                reason = f"given up after {deaths} workers were lost while they handled it; the last error: {text}"
                log.warning("%s for service %r: %s", claimed.uuid.hex, claimed.service, reason, extra=_fields(claimed))
                return self._failure(claimed, Code.WORKER_LOST, reason, deaths=deaths)
            pause = _jittered(*BACKOFF_SECONDS, claimed.attempt - 1)
            log.info("%s: %s; retrying in %.1f s", claimed.uuid.hex, error, pause, extra=_fields(claimed))
            return self._reschedule(claimed.id, claimed.attempt, pause, text, deaths=deaths)
        if code == Code.NOT_ALLOWED and isinstance(error, RequestRejected):  # the broker's 403, not a handler's
            return self._failure(claimed, code, f"on behalf of {claimed.owner}: {text}" if claimed.owner else text)
        if claimed.failures < claimed.retries:
            # At least the backoff, plus jitter, so that requests that failed together are not retried together.
            pause = _exponential(
                claimed.backoff or HANDLER_BACKOFF_SECONDS[0], HANDLER_BACKOFF_SECONDS[1], claimed.failures
            )
            pause *= random.uniform(1.0, 1.2)  # noqa: S311 - jitter
            log.info("%s: %s; retrying in %.1f s", claimed.uuid.hex, error, pause, extra=_fields(claimed))
            return self._reschedule(claimed.id, claimed.attempt, pause, text, failures=claimed.failures + 1)
        detail = pack([error.detail]) if error.detail is not None and len(error.detail) <= MAX_REPLY_BYTES else None
        return self._failure(claimed, code or Code.FAILED, text, detail)

    def _reschedule(
        self,
        id_: int,
        attempt: int,
        pause: float = 0.0,
        error: str | None = None,
        *,
        failures: int | None = None,
        deaths: int | None = None,
    ) -> store.Reschedule:
        text = None if error is None else error.replace("\0", "?")
        return store.Reschedule(id_, self._holder, attempt, self._clock.now() + pause, failures, text, deaths)

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
                await asyncio.sleep(_jittered(0.1, 2.0, tries))
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
                extra=_fields(running.claimed),
            )  # fmt: skip
            running.sent.abandon(running)

    def _forget(self, running: Running) -> None:
        self._bytes -= len(running.claimed.body)
        if self._running.get(running.claimed.id) is running:
            del self._running[running.claimed.id]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, timeout: float) -> None:
        """Stop claiming, wait for running requests, and release the rest.

        Meanwhile `run` must continue, which renews the lease.
        """
        self._draining = True
        for lane in self._lanes.values():
            for running in list(lane.buffer):
                self._abandon(running)
        under_way = [running for running in self._running.values() if running.sent is not None]
        if under_way:
            log.info("waiting up to %g s for %d running requests", timeout, len(under_way))
        tasks = {each.sent.task for each in under_way if each.sent is not None and each.sent.task is not None}
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=timeout)
        finally:
            for running in under_way:
                self._abandon(running)
        with suppress(StoreError):
            await self._writer.submit(store.release, self._holder)


def _request_id(claimed: store.Claimed, headers: Any) -> str:
    """Return the id of a request in log lines: the one that its submitter has given it, or else its UUID."""
    given = headers.get(REQUEST_ID, "") if isinstance(headers, dict) else ""
    return given if given and isinstance(given, str) else claimed.uuid.hex


def _addressing(claimed: store.Claimed) -> tuple[Any, dict[str, Any]]:
    """Return headers and options of a request.  Raises `ValueError` if its headers are not JSON."""
    headers = json.loads(claimed.headers or "null")
    if headers is None or isinstance(headers, dict):
        headers = {REQUEST_ID: _request_id(claimed, headers), **(headers or {})}
    return headers, {"on_behalf": claimed.owner} if claimed.owner else {}


def _fields(claimed: store.Claimed) -> dict[str, Any]:
    """Return the fields of a log line about a request."""
    try:
        headers = json.loads(claimed.headers or "null")
    except ValueError:  # another program has written the row
        headers = None
    fields = {"request_id": shown_id(_request_id(claimed, headers)), "service": claimed.service}
    return {**fields, "role": claimed.owner} if claimed.owner else fields


def _capacity(row: Mapping[str, Any]) -> int:
    """Return how many requests the workers of a service can hold, at this broker and at others, used or free."""
    local = int(row["credit"]) + int(row["running"])
    return local + int(row.get("remote_credit", 0)) - int(row.get("remote_running", 0))


def _workers_lost(error: RequestError) -> int:
    """Return how many workers were lost while they handled the request, according to the broker."""
    if error.code != Code.WORKER_LOST or not isinstance(error, WorkerLost | StreamInterrupted):
        return 0
    if _LINKS_LOST.search(error.text):
        return 0
    attempt = _ATTEMPT.search(error.text)
    return 1 if attempt is None else int(attempt[1])


def _fits(part: Sequence[bytes]) -> bool:
    """Return whether a part of a reply is small enough to be fetched."""
    return sum(map(len, part)) <= MAX_REPLY_BYTES and len(part) < MAX_BODY_FRAMES


def _exponential(first: float, most: float, times: int) -> float:
    """Return the pause in seconds after so many others, each twice as long as the one before."""
    return min(first * 2.0 ** min(times, 32), most)


def _jittered(first: float, most: float, times: int) -> float:
    """Return such a pause, shortened at random by up to half."""
    return _exponential(first, most, times) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter


def _ignore_failure(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.exception()  # if it failed, the next maintenance finds the same

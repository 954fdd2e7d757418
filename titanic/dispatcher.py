"""Has stored requests done: a client of the broker, with many numbered requests over one connection (C31).

A request is claimed only if its service has workers, and never many more than these can take, so a slow service holds
nobody else back and what is urgent goes first.  What a worker's, a broker's or a Titanic's death interrupts is tried
again for ever; what a handler answers, an error as well, is the outcome.
"""

import asyncio
import json
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing, suppress
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from ..clients import AsyncClient, Reply, RequestError, RequestTimeout, ServiceError, SettingError
from ..mdp.codes import Code
from ..workers.handling import MAX_BODY, MAX_BODY_FRAMES
from .batches import Batches, StoreError, Work
from .frames import pack, unpack
from .store import store
from .store.clock import Clock

FACTOR: Final = 2
"""Requests given to the broker for each unit of a service's credit: the next is there when one ends."""
HORIZON: Final = 0.05
"""Seconds for which requests are claimed ahead, beyond those, at the speed at which the service does them."""
MOST: Final = 2000
"""Requests claimed for one service, however many its workers take."""
MOST_BYTES: Final = 256 << 20
"""Bytes of claimed requests, and of outcomes that wait to be stored, above which a service gets one at a time."""
MOST_UNSTORED: Final = 1000
"""Outcomes that wait to be stored, above which no more requests are claimed."""
MAX_PARTS: Final = 1_000_000
"""PARTIALs that are kept of one reply."""
PARTS_AHEAD: Final = 64
"""PARTIALs of a stream that may wait to be stored before the next is taken."""
LOOK: Final = 0.5
"""Seconds between two looks at the tables."""
ASK: Final = 0.5
"""Seconds between two questions to the broker, who is there."""
ASK_LEAST: Final = 0.05
"""The same, while requests come for services that were not there."""
ASK_MORE: Final = 100
"""Services that are asked for one by one, each time, at a broker with too many of them to tell of all."""
COUNT: Final = 60.0
"""Seconds between two counts of what waits."""
PATIENCE: Final = 5.0
"""Seconds that the broker has to answer these."""
BACKOFF: Final = (0.5, 60.0)
"""Seconds before the second attempt and before the latest; each pause is twice as long as the one before."""
HANDLER_BACKOFF: Final = (1.0, 3600.0)
"""The same for a handler that failed, if the request does not say."""
MAX_KEPT: Final = MAX_BODY - 100
"""Bytes of a reply: when it is fetched, its status is in front."""
NOT_NOW: Final = frozenset({Code.TIME_PASSED, Code.QUEUE_FULL, Code.WORKER_LOST, Code.DRAINING})
"""Codes after which a request is tried again for ever, whether it is the broker or a handler who gave them."""

Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger("zmdp.titanic")


class _Lane:
    """What is under way for one service."""

    __slots__ = (
        "accepted", "ahead", "buffer", "claiming", "credit", "ended", "in_flight", "pending", "service",
    )  # fmt: skip

    def __init__(self, service: str) -> None:
        self.service = service
        self.credit = 0
        """Requests that all workers of the service together take at a time."""
        self.pending = False
        """There may be requests to claim."""
        self.accepted = 0
        """How many were accepted: whether one came while others were claimed."""
        self.claiming = False
        self.buffer: deque[_Running] = deque()
        """Claimed, not given to the broker yet."""
        self.in_flight = 0
        self.ended = 0
        """Requests that have ended since the last look."""
        self.ahead = 0
        """Requests to claim beyond those that are given to the broker."""

    @property
    def room(self) -> int:
        """Requests that may be claimed."""
        return min(self.credit * FACTOR + self.ahead, MOST)

    def observe(self, seconds: float) -> None:
        """Learn how fast the service is, from what has ended in so many seconds."""
        self.ahead = max(int(self.ended / seconds * HORIZON), self.ahead // 2)
        self.ended = 0

    @property
    def idle(self) -> bool:
        return not ((self.pending and self.credit) or self.claiming or self.buffer or self.in_flight)


class _Running:
    """A request that this Titanic holds, from its claim until its outcome is stored."""

    __slots__ = ("answered", "claimed", "lane", "task")

    def __init__(self, claimed: store.Claimed, lane: _Lane) -> None:
        self.claimed = claimed
        self.lane = lane
        self.task: asyncio.Task[None] | None = None
        self.answered = False
        """There is an outcome, which is being stored."""


class Dispatcher:
    """`changed(uuid)` is told of requests whose state or whose PARTIALs have changed.

    `ttl` (seconds, None for until they are closed) is for how long replies are kept whose requests do not say.
    """

    def __init__(
        self,
        client: AsyncClient,
        writer: Batches,
        clock: Clock,
        *,
        lease: float,
        ttl: float | None,
        max_waiting: int,
        changed: Callable[[UUID], None],
    ) -> None:
        self._client = client
        self._writer = writer
        self._clock = clock
        self._lease = lease
        self._ttl = ttl
        self._max_waiting = max_waiting
        self._changed = changed
        self._context = copy_context()
        self._owner = secrets.token_hex(8)
        self._lanes: dict[str, _Lane] = {}
        self._running: dict[int, _Running] = {}
        self._bytes = 0
        self._unstored = 0
        self._waiting = 0
        """Requests that are neither done nor failed: when last counted, and those of this Titanic since."""
        self._count = False
        """They are to be counted again, now."""
        self._wake = asyncio.Event()
        self._ask_now = asyncio.Event()
        self._offered: dict[str, int] = {}
        """The credit of each service, as the broker told it last."""
        self._draining = False
        self._page = ""
        """Services with pending requests up to this name have been asked for one by one."""
        self._looked = 0.0
        """When the tables were looked at, on the monotonic clock."""

    # ── told by the service ──────────────────────────────────────────────────────────────────────────────────────────

    def room(self) -> bool:
        """Whether one more request may be accepted."""
        if self._waiting < self._max_waiting:
            return True
        self._count = True  # it may be that there is room again
        return False

    def accepted(self, service: str, due: float) -> None:
        """A request was stored."""
        self._waiting += 1
        if due > self._clock.now():
            self._wake.set()
            return
        if not self._offered.get(service):
            self._ask_now.set()  # `_ask` has the tables looked at, if there is somebody now
            return
        lane = self._lane(service)
        lane.accepted += 1
        lane.pending = True
        self._fill(lane)

    def gone(self, id_: int) -> None:
        """A request was closed: nobody wants its reply."""
        running = self._running.get(id_)
        if running is not None:
            self._give_up(running)

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_often())
            tasks.create_task(self._ask_often())

    async def _look_often(self) -> None:
        renew_at = count_at = 0.0
        while True:
            now = self._clock.now()
            renew, count = now >= renew_at, self._count or now >= count_at
            self._count = False
            self._wake.clear()
            held = dict(self._running)
            asked = store.Round(
                self._new_lease(now), now, renew, self._max_waiting if count else None, tuple(self._offered)
            )
            pause = LOOK
            try:
                found = await self._writer.do(store.look, asked)
            except StoreError:
                pass  # whoever runs the transactions tells of it
            else:
                renew_at = now + self._lease / 3 if renew else renew_at
                count_at = now + COUNT if count else count_at
                self._take_in(found, held)
                if found.next_due is not None:
                    pause = min(pause, max(0.0, found.next_due - self._clock.now()))
                if found.more:
                    pause = 0.0
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    def _take_in(self, found: store.Found, held: dict[int, _Running]) -> None:
        self._clock.set(found.ahead)
        if found.waiting is not None:
            self._waiting = found.waiting
        for id_, running in held.items():
            if found.owned.get(id_) != running.claimed.attempt:
                self._give_up(running)
        for id_, attempt in found.owned.items():
            if id_ not in self._running:  # claimed, but its transaction's answer was lost
                self._writer.do(store.put_back, self._again(id_, attempt)).add_done_callback(_look_at)
        for service in found.services:
            lane = self._lane(service)
            lane.pending = True
            self._fill(lane)
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            lane.observe(max(now - self._looked, LOOK))
            if lane.idle:
                del self._lanes[lane.service]
        self._looked = now

    async def _ask_often(self) -> None:
        """Keep up with who is there (C31)."""
        while True:
            self._ask_now.clear()
            try:
                offered = await self._ask()
            except RequestTimeout as error:
                log.warning("%s", error)
                offered = {}
            except (RequestError, ValueError, TypeError, KeyError) as error:
                log.error("the broker does not say who is there, which Titanic needs: %s", error)
                offered = {}
            if not offered.keys() <= self._offered.keys():
                self._wake.set()  # perhaps there are requests for the new ones
            self._offered = offered
            for lane in list(self._lanes.values()):
                lane.credit = offered.get(lane.service, 0)
                self._send(lane)
                self._fill(lane)
            await asyncio.sleep(ASK_LEAST)
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK):
                    await self._ask_now.wait()

    async def _ask(self) -> dict[str, int]:
        """Return the services that have credit, and how much."""
        offered, more = await self._credit(b"")
        if more:
            page: list[str] = []
            with suppress(StoreError):
                page = await self._writer.do(store.pending_after, (self._page, ASK_MORE))
            self._page = page[-1] if len(page) == ASK_MORE else ""
            # Those that were there are asked for again as well; what is under way there goes on.
            names = [name for name in {*page, *self._lanes} if name not in offered]
            for each, _ in await asyncio.gather(*(self._credit(name.encode()) for name in names)):
                offered |= each
        return {name: credit for name, credit in offered.items() if credit}

    async def _credit(self, service: bytes) -> tuple[dict[str, int], int]:
        """Return the credit of this service or of all, and how many services are left out."""
        (answer,) = await self._client.request("mmi.services", service, timeout=PATIENCE)
        told = json.loads(answer)
        credit = {
            str(row["name"]): int(row["credit"]) + int(row["running"]) for row in told["services"]
        }  # free, and used
        return credit, int(told["more"])

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _lane(self, service: str) -> _Lane:
        lane = self._lanes.get(service)
        if lane is None:
            lane = self._lanes[service] = _Lane(service)
            lane.credit = self._offered.get(service, 0)
        return lane

    def _new_lease(self, now: float) -> store.Lease:
        return store.Lease(self._owner, now + self._lease)

    def _fill(self, lane: _Lane) -> None:
        """Claim requests for the service, if there may be some and it has room for them."""
        if not lane.pending or not lane.credit or lane.claiming or self._draining:
            return
        most, held = lane.room, lane.in_flight + len(lane.buffer)
        if held * 4 > most * 3:  # several at a time cost little more than one
            return
        if self._unstored >= MOST_UNSTORED or (self._bytes >= MOST_BYTES and held):
            return
        lane.claiming = True
        now, limit = self._clock.now(), most - held
        claim = store.Claim(lane.service, limit, self._new_lease(now), now, MOST_BYTES - self._bytes)
        self._writer.do(store.claim, claim).add_done_callback(partial(self._claimed, lane, lane.accepted, limit))

    def _claimed(self, lane: _Lane, accepted: int, limit: int, done: "asyncio.Future[list[store.Claimed]]") -> None:
        lane.claiming = False
        if done.cancelled() or done.exception() is not None:
            return  # the next look tells of the trouble, and fills anew
        for claimed in done.result():
            before = self._running.get(claimed.id)
            if before is not None:
                self._give_up(before)
            running = self._running[claimed.id] = _Running(claimed, lane)
            self._bytes += len(claimed.body)
            lane.buffer.append(running)
        if len(done.result()) < limit and lane.accepted == accepted:
            lane.pending = False
        self._send(lane)
        self._fill(lane)

    def _send(self, lane: _Lane) -> None:
        """Give the broker what the service's workers can take."""
        while lane.buffer and lane.in_flight < lane.credit * FACTOR and not self._draining:
            running = lane.buffer.popleft()
            lane.in_flight += 1
            # In a context of its own: where this is called from, another request may be handled, whose trace goes on.
            running.task = asyncio.get_running_loop().create_task(self._run(running), context=self._context.copy())
            running.task.add_done_callback(partial(self._ended, running))

    async def _run(self, running: _Running) -> None:
        outcome = await self._do(running.claimed)
        self._answered(running)
        size = len(outcome.reply or b"") if isinstance(outcome, store.Outcome) else 0
        self._bytes += size
        self._unstored += 1
        try:
            if isinstance(outcome, store.Outcome):
                await self._store(store.finish, outcome)
                self._waiting -= 1
            else:
                await self._store(store.put_back, outcome)
                self._wake.set()
        finally:
            self._bytes -= size
            self._unstored -= 1
        self._changed(running.claimed.uuid)

    def _answered(self, running: _Running) -> None:
        """The service is done with it: the next can go there."""
        running.answered = True
        lane = running.lane
        lane.in_flight -= 1
        lane.ended += 1
        self._send(lane)
        self._fill(lane)

    def _ended(self, running: _Running, task: "asyncio.Task[None]") -> None:
        # Not in `_run`, into which a task that is cancelled before its first step never comes.
        del task
        if not running.answered:
            self._answered(running)
        self._forget(running)

    async def _do(self, claimed: store.Claimed) -> store.Outcome | store.Again:
        """Have the service do it, and its PARTIALs stored; returns how that ended."""
        saving: deque[asyncio.Task[None]] = deque()
        outcome: store.Outcome | store.Again
        try:
            try:
                outcome = await self._call(claimed, saving)
            except RequestError as error:
                outcome = self._failed(claimed, error)
            except SettingError as error:  # it cannot be sent, now or ever
                outcome = self._ends(claimed, Code.MALFORMED, str(error))
            except Exception as error:  # whatever is wrong with this one, others are dispatched
                log.exception("%s cannot be dispatched", claimed.uuid.hex)
                outcome = self._again(claimed.id, claimed.attempt, _pause(*BACKOFF, claimed.attempt - 1), repr(error))
            for each in saving:
                await each
        finally:
            for each in saving:
                each.cancel()
        return outcome

    async def _call(self, claimed: store.Claimed, saving: "deque[asyncio.Task[None]]") -> store.Outcome:
        """Call the service; its PARTIALs are stored as they come, not too many at a time."""
        try:
            body, headers = unpack(claimed.body), json.loads(claimed.headers or "null")
        except ValueError as error:  # somebody else has written it
            return self._ends(claimed, Code.MALFORMED, str(error))
        async with aclosing(self._client.stream(claimed.service, *body, headers=headers)) as parts:
            number = 0
            async for part in parts:
                if part.final:
                    break
                if number == MAX_PARTS:
                    return self._ends(claimed, Code.TOO_LARGE, f"the reply has more than {MAX_PARTS} PARTIALs")
                if not _fits(part):
                    return self._ends(claimed, Code.TOO_LARGE, f"PARTIAL {number} is too large to be fetched")
                saved = store.Partial(claimed.id, claimed.attempt, number, pack(part))
                saving.append(asyncio.create_task(self._save(claimed.uuid, saved)))
                number += 1
                if len(saving) >= PARTS_AHEAD:
                    await saving.popleft()
        return self._done(claimed, part)

    async def _save(self, uuid: UUID, part: store.Partial) -> None:
        await self._store(store.add_parts, part)
        self._changed(uuid)

    def _done(self, claimed: store.Claimed, reply: Reply) -> store.Outcome:
        if not _fits(reply):
            return self._ends(claimed, Code.TOO_LARGE, "the reply is too large to be fetched")
        now = self._clock.now()
        return store.Outcome(claimed.id, self._owner, claimed.attempt, now, pack(reply), ttl=self._ttl)

    def _ends(self, claimed: store.Claimed, code: int, text: str, detail: bytes | None = None) -> store.Outcome:
        text = text.replace("\0", "?")  # which PostgreSQL does not store
        now = self._clock.now()
        return store.Outcome(claimed.id, self._owner, claimed.attempt, now, detail, code, text, self._ttl)

    def _failed(self, claimed: store.Claimed, error: RequestError) -> store.Outcome | store.Again:
        text, code = error.text or str(error), error.code
        if code in NOT_NOW or (code is None and not isinstance(error, ServiceError)):
            # Nobody's fault, or a worker's or a broker's that dies of it: it is tried for ever, but less and less
            # often.
            pause = _pause(*BACKOFF, claimed.attempt - 1)
            log.info("%s: %s: again in %.1f s", claimed.uuid.hex, error, pause)
            return self._again(claimed.id, claimed.attempt, pause, text)
        if claimed.failures < claimed.retries:
            # Not less than was asked for, but a little more, so that what failed together does not come together.
            pause = _growing(claimed.backoff or HANDLER_BACKOFF[0], HANDLER_BACKOFF[1], claimed.failures)
            pause *= random.uniform(1.0, 1.2)  # noqa: S311 - jitter
            log.info("%s: %s: again in %.1f s", claimed.uuid.hex, error, pause)
            return self._again(claimed.id, claimed.attempt, pause, text, claimed.failures + 1)
        detail = pack([error.detail]) if error.detail is not None and len(error.detail) <= MAX_KEPT else None
        return self._ends(claimed, code or Code.FAILED, text, detail)

    def _again(
        self, id_: int, attempt: int, pause: float = 0.0, error: str | None = None, failures: int | None = None
    ) -> store.Again:
        told = None if error is None else error.replace("\0", "?")
        return store.Again(id_, self._owner, attempt, self._clock.now() + pause, failures, told)

    async def _store(self, work: Work[Item, Result], item: Item) -> Result:
        """Have it stored, whatever the database's troubles."""
        tries = 0
        while True:
            try:
                return await self._writer.do(work, item)
            except StoreError:
                await asyncio.sleep(_pause(0.1, 2.0, tries))
                tries += 1

    def _give_up(self, running: _Running) -> None:
        """It is not this Titanic's any more, or nobody's."""
        if running.task is None:
            with suppress(ValueError):
                running.lane.buffer.remove(running)
            self._forget(running)
        elif not running.answered:
            log.info("%s: given up: somebody else has it, it was closed, or Titanic ends", running.claimed.uuid.hex)
            running.task.cancel()

    def _forget(self, running: _Running) -> None:
        self._bytes -= len(running.claimed.body)
        if self._running.get(running.claimed.id) is running:
            del self._running[running.claimed.id]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, timeout: float) -> None:
        """Take no more; wait for the outcomes of what is under way, and leave the rest to others.

        `run` must still run, so that leases are renewed.
        """
        self._draining = True
        for lane in self._lanes.values():
            for running in list(lane.buffer):
                self._give_up(running)
        under_way = [running for running in self._running.values() if running.task is not None]
        if under_way:
            log.info("waiting for %d requests that are under way, up to %g s", len(under_way), timeout)
        tasks = [running.task for running in under_way if running.task is not None]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=timeout)
        finally:
            for running in under_way:
                self._give_up(running)
        with suppress(StoreError):
            await self._writer.do(store.release, self._owner)


def _fits(part: Reply) -> bool:
    """Whether it can be sent to whoever fetches it."""
    return sum(map(len, part)) <= MAX_KEPT and len(part) < MAX_BODY_FRAMES


def _growing(first: float, most: float, times: int) -> float:
    """Seconds: twice as long each time."""
    return min(first * 2.0 ** min(times, 32), most)


def _pause(first: float, most: float, times: int) -> float:
    """The same, and not the same for all."""
    return _growing(first, most, times) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter


def _look_at(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.exception()  # if it failed, the next look finds the same again

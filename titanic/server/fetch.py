"""Answers callers that fetch replies: the service `titanic.reply` of TSP (RFC 9, C28).  Most of them wait.

    titanic.reply     uuid            → 200 body+  the reply; 300 not yet; 400 unknown; 500 the request failed

400 and 500 of any service of Titanic mean that nothing was changed.  Callers that speak X1 get a text with the code,
and a frame with a name for the reason; others get the bare code, which third-party programs compare (C37).

Callers that wait are woken by what this Titanic stores, and by `watch` when another Titanic or an operator has changed
a request.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from typing import Final, Self
from uuid import UUID

from ...mdp.codes import Code
from ...mdp.errors import TitanicError
from ...workers import Last, Request
from ..api.submission import UNKNOWN_UUID, parse_reply_request, unpack
from ..db import store
from ..db.group_commit import BatchExecutor, StoreError

OK: Final = b"200"
NOT_YET: Final = b"300"
MIN_WATCH_SECONDS: Final = 0.02
MAX_WATCH_SECONDS: Final = 0.5
"""The shortest and the longest pause between two looks for changes by other Titanics or an operator."""
WATCH_PAUSE_FACTOR: Final = 20
"""How many times as long as the last look the pause is: so looking takes at most a twentieth of the time."""
MAX_WATCHED: Final = 10_000
"""Requests in one query for such changes: databases limit the parameters of a statement."""
MAX_CALLERS: Final = 2000
"""Maximum number of callers of each service that wait.  Beyond it, those that have waited longest are dismissed."""
NIL: Final = UUID(int=0)
MIN_WAIT_SECONDS: Final = 1.0
"""How long a caller may wait even then: dismissed callers usually come back at once."""


class Waiter:
    """A caller that waits until its request may have changed.

    Args:
        callers: Where it waits.
        group: The callers of the same service.
        seconds: How long it may wait; None for as long as it likes.
        partials: Whether it waits for PARTIALs, too.
    """

    __slots__ = (
        "_callers", "_group", "_happened", "_seconds", "_timer", "dismissed", "outcome", "partials", "since", "uuid",
    )  # fmt: skip

    def __init__(
        self, callers: "Callers", group: "dict[Waiter, None]", seconds: float | None, *, partials: bool = False
    ) -> None:
        self._callers = callers
        self._group = group
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._happened = asyncio.Event()
        self.partials = partials
        self.uuid = NIL
        """The UUID of its request, once that is stored."""
        self.outcome: store.Outcome | None = None
        """How its request has ended, if that is known."""
        self.dismissed = False
        """Whether to answer it with the current state."""
        self.since = 0.0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self._callers.enter(self, self._group)
        if self._seconds is not None:
            self._timer = loop.call_at(self.since + self._seconds, self.dismiss)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._group.pop(self, None)
        if self.uuid is not NIL:
            self._callers.forget(self.uuid, self)

    def watch(self, uuid: UUID, *, new: bool = False) -> None:
        """Have it woken when the request with this UUID may have changed: at once unless the request is `new`."""
        self.uuid = uuid
        self._callers.watch_for(uuid, self)
        if not new:
            self._happened.set()

    def wake(self, outcome: store.Outcome | None = None) -> None:
        """Note that its request may have changed, or has ended with this outcome."""
        if outcome is not None:
            self.outcome = outcome
        self._happened.set()

    def dismiss(self) -> None:
        """Let it wait no longer."""
        self.dismissed = True
        self._happened.set()

    async def change(self) -> None:
        """Wait until the request may have changed since the last call."""
        await self._happened.wait()
        self._happened.clear()


class Callers:
    """The callers that wait, by the UUIDs of their requests.

    Args:
        reader: Executes statements that read.
    """

    def __init__(self, reader: BatchExecutor) -> None:
        self._reader = reader
        self._waiting: defaultdict[UUID, set[Waiter]] = defaultdict(set)
        self._submitting: dict[Waiter, None] = {}
        """The callers of `titanic.request` that wait for a reply, the longest-waiting first."""
        self._fetching: dict[Waiter, None] = {}
        """The callers of `titanic.reply`."""
        self._anyone = asyncio.Event()
        """Set while somebody waits."""
        self._ending = False

    def submitting(self, seconds: float | None) -> Waiter:
        """Return the waiter of a caller of `titanic.request`, which may wait for so long."""
        return Waiter(self, self._submitting, seconds)

    def fetching(self, *, partials: bool) -> Waiter:
        """Return the waiter of a caller of `titanic.reply`."""
        return Waiter(self, self._fetching, None, partials=partials)

    def enter(self, waiter: Waiter, group: dict[Waiter, None]) -> None:
        """Count a waiter among others, of which one is dismissed if there are too many."""
        if self._ending:
            waiter.dismiss()
        if len(group) >= MAX_CALLERS:
            oldest = next(iter(group))
            del group[oldest]
            asyncio.get_running_loop().call_at(oldest.since + MIN_WAIT_SECONDS, oldest.dismiss)
        group[waiter] = None

    def watch_for(self, uuid: UUID, waiter: Waiter) -> None:
        """Have a waiter woken when the request with this UUID may have changed."""
        self._waiting[uuid].add(waiter)
        self._anyone.set()

    def forget(self, uuid: UUID, waiter: Waiter) -> None:
        """Undo `watch_for`."""
        waiting = self._waiting[uuid]
        waiting.discard(waiter)
        if not waiting:
            del self._waiting[uuid]
            if not self._waiting:
                self._anyone.clear()

    def ended(self, uuid: UUID, outcome: store.Outcome | None = None) -> None:
        """Wake the callers that wait for this request, which has ended or was closed; `outcome`, if it is known."""
        for each in self._waiting.get(uuid, ()):
            each.wake(outcome)

    def progressed(self, uuid: UUID) -> None:
        """Wake the callers that wait for more than the end of this request."""
        for each in self._waiting.get(uuid, ()):
            if each.partials:
                each.wake()

    async def watch(self) -> None:
        """Wake callers whose requests another program has changed.  Runs until cancelled."""
        before: dict[UUID, store.Progress] = {}
        known: set[UUID] = set()
        pause = MIN_WATCH_SECONDS
        while True:
            await self._anyone.wait()
            await asyncio.sleep(pause)
            began = time.monotonic()
            # Only those that were there the last time: most have ended before they are looked up.
            waiting = [uuid for uuid in self._waiting if uuid in known]
            known = set(self._waiting)
            now: dict[UUID, store.Progress] = {}
            with suppress(StoreError):  # the callers get the error when they query the database themselves
                for first in range(0, len(waiting), MAX_WATCHED):
                    now |= await self._reader.submit(store.progress, frozenset(waiting[first : first + MAX_WATCHED]))
                for uuid in waiting:
                    found = now.get(uuid)
                    if found is None or found.ended:
                        self.ended(uuid)
                    elif found != before.get(uuid):
                        self.progressed(uuid)
                before = now
            pause = watch_pause(time.monotonic() - began)

    def end(self) -> None:
        """Dismiss all callers, also those that come from now on."""
        self._ending = True
        for each in [*self._submitting, *self._fetching]:
            each.dismiss()


def watch_pause(seconds: float) -> float:
    """Return how long to wait after a look that took so many `seconds`."""
    return max(MIN_WATCH_SECONDS, min(WATCH_PAUSE_FACTOR * seconds, MAX_WATCH_SECONDS))


class Replies:
    """Answers `titanic.reply`.

    Args:
        reader: Executes statements that read.
        callers: The callers that wait.
    """

    def __init__(self, reader: BatchExecutor, callers: Callers) -> None:
        self._reader = reader
        self._callers = callers

    async def reply(self, request: Request) -> AsyncGenerator[list[bytes] | Last, None]:
        """`titanic.reply` (C28)."""
        try:
            wanted = parse_reply_request(request, request.options)
            if wanted.request:
                body = await self._reader.submit(store.fetch_request, lookup(request, wanted.uuid))
                yield Last(_unknown(request) if body is None else [OK, *unpack(body)])
                return
            sent = wanted.start
            with self._callers.fetching(partials=wanted.partials) if wanted.wait else nullcontext() as waiter:
                if waiter is not None:
                    waiter.watch(wanted.uuid)
                found: store.Fetched | None = None
                while True:
                    before, found = found, await self.find(request, wanted.uuid)
                    if found is not None and wanted.partials and not _same_end(found, before):
                        while parts := await self._parts(found, sent):
                            for part in parts:
                                sent += 1
                                yield unpack(part)
                        if found.ended:
                            continue  # if it is closed or retried meanwhile, some PARTIALs were not there any more
                    if found is None or found.ended or waiter is None or waiter.dismissed:
                        break
                    await waiter.change()
            yield Last(final(request, await self.with_reply(found)))
        except TitanicError as error:
            yield Last(refusal(request, error))

    def find(self, request: Request, uuid: UUID) -> "asyncio.Future[store.Fetched | None]":
        """Return the request with this UUID that `request` asks for."""
        return self._reader.submit(store.fetch, lookup(request, uuid))

    async def with_reply(self, found: store.Fetched | None) -> store.Fetched | None:
        """Return `found` with its reply also if that is large; None if it was closed meanwhile."""
        if found is None or found.reply is not None or found.size is None:
            return found
        reply = await self._reader.submit(store.fetch_reply, found.id)
        return None if reply is None else found._replace(reply=reply)

    def _parts(self, found: store.Fetched, start: int) -> "asyncio.Future[list[bytes]]":
        return self._reader.submit(store.fetch_partials, store.PartialsQuery(found.id, found.attempt, start))


def lookup(request: Request, uuid: UUID) -> store.Lookup:
    """Return the look-up of the request with this UUID that `request` asks for."""
    user, admin = request.user, request.admin
    return store.Lookup(uuid, None if admin else user)


def _same_end(found: store.Fetched, before: store.Fetched | None) -> bool:
    """Return whether a request has ended, and had ended in the same way `before`."""
    return before is not None and before.ended and before[:4] == found[:4]


def final(request: Request, found: store.Fetched | None) -> list[bytes]:
    """Return the FINAL for a request in this state."""
    if found is None:
        return _unknown(request)
    if not found.ended:
        return [NOT_YET]
    code = None if found.state == "done" else found.code or Code.FAILED
    return ended_with(request, found.service, found.reply, code, found.error)


def ended_with(request: Request, service: str, reply: bytes | None, code: int | None, error: str | None) -> list[bytes]:
    """Return the FINAL for a request to `service` that has ended: with a reply, or with a failure of this code."""
    if code is None:
        return [OK, *unpack(reply or b"")]
    # The frames after the status distinguish a request that failed from a Titanic that failed.
    detail = [] if reply is None else unpack(reply)
    return [status_frame(request, f"500 {error}"), b"%03d" % code, service.encode(), *detail]


def _unknown(request: Request) -> list[bytes]:
    text = "unknown uuid"
    return refusal(request, TitanicError(text, code=int(Code.MALFORMED), text=text, reason=UNKNOWN_UUID))


def refusal(request: Request, error: TitanicError) -> list[bytes]:
    """Return the frames of an error of Titanic's own: the status and, for callers that speak X1, the reason's name."""
    if "dialect" not in request.options:
        return [status_frame(request, f"{error.code} {error.text}"), error.reason.encode()]
    return [b"%d" % (Code.FAILED if error.code == Code.QUEUE_FULL else error.code or Code.FAILED)]  # TSP has no 429


def status_frame(request: Request, status: str) -> bytes:
    """Return the status frame: the code and, for callers that speak X1, the text (C37)."""
    return status[:3].encode() if "dialect" in request.options else status.encode(errors="replace")

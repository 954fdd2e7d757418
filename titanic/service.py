"""The three services of TSP (RFC 9, C27 to C30): what they answer.

    titanic.request   service body+   → 200 uuid   stored: it is on the disk
    titanic.reply     uuid            → 200 body+  here it is; 300 not yet; 400 unknown; 500 it failed
    titanic.close     uuid            → 200        gone, also if it was never there

A request that fails is answered with 400 or 500 and changes nothing.  Callers that speak X1 get a text with the code;
others get the bare code, which is what third-party programs compare (C37).  See `titanic/submission.py` for what X1's
options add.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from uuid import UUID

from ..mdp.codes import Code
from ..workers import Final as FinalReply
from ..workers import Request
from .batches import Batches, StoreError
from .frames import unpack
from .store import store
from .store.clock import Clock
from .submission import MalformedRequest, ReplyRequest, parse_close, parse_reply_request, parse_submission

OK: Final = b"200"
NOT_YET: Final = b"300"
POLL: Final = 0.5
"""Seconds between two looks for what other Titanics, or an operator, did to requests that somebody waits for."""
MAX_WAITING: Final = 1000
"""Callers that may wait for replies at a time; if there are more, those who have waited longest are told 300."""
FULL: Final = "500 full: too many requests are waiting to be done; try again later"
UNKNOWN: Final = "400 unknown uuid"


class _Waiter:
    """A caller of `titanic.reply` who waits for something to happen."""

    __slots__ = ("dismissed", "happened")

    def __init__(self, *, dismissed: bool) -> None:
        self.happened = asyncio.Event()
        self.dismissed = dismissed
        """He is told what there is now."""

    def dismiss(self) -> None:
        self.dismissed = True
        self.happened.set()


class Service:
    """The handlers, on a `writer` and a `reader` of the database, and `keyed`, which writes requests with keys.

    `room()` tells whether one more request may be accepted; `accepted(service, due)` and `gone(id)` are told of what
    was stored and of what was closed.
    """

    def __init__(
        self,
        writer: Batches,
        keyed: Batches,
        reader: Batches,
        clock: Clock,
        *,
        room: Callable[[], bool],
        accepted: Callable[[str, float], None],
        gone: Callable[[int], None],
    ) -> None:
        self._writer = writer
        self._keyed = keyed
        self._reader = reader
        self._clock = clock
        self._room = room
        self._accepted = accepted
        self._gone = gone
        self._waiters: dict[_Waiter, None] = {}
        """Those who wait for replies, the one who has waited longest first."""
        self._waiting: defaultdict[UUID, set[_Waiter]] = defaultdict(set)
        self._ending = False

    async def request(self, request: Request) -> list[bytes]:
        """`titanic.request` (C27)."""
        try:
            asked = parse_submission(request, request.options, self._clock.now())
            if not self._room():
                return [_status(request, FULL)]
            uuid = await (self._writer if asked.key is None else self._keyed).do(store.accept, asked)
        except (MalformedRequest, StoreError) as error:
            return _refused(request, error)
        if uuid == asked.uuid:
            self._accepted(asked.service, asked.due)
        return [OK, uuid.hex.encode()]

    async def close(self, request: Request) -> list[bytes]:
        """`titanic.close` (C29)."""
        try:
            uuid = parse_close(request, request.options)
            found = await self._writer.do(store.close, uuid)
        except (MalformedRequest, StoreError) as error:
            return _refused(request, error)
        if found is not None:
            self._gone(found)
            self.changed(uuid)
        return [OK]

    async def reply(self, request: Request) -> AsyncGenerator[list[bytes] | FinalReply, None]:
        """`titanic.reply` (C28)."""
        try:
            asked = parse_reply_request(request, request.options)
            sent = asked.start
            with self._waits(asked) as waiter:
                while True:
                    waiter.happened.clear()  # before the look: what happens after it is not missed
                    found = await self._reader.do(store.fetch, asked.uuid)
                    if found is not None and asked.partials:
                        while parts := await self._parts(found, sent):
                            for part in parts:
                                sent += 1
                                yield unpack(part)
                    if found is None or found.ended or waiter.dismissed or self._ending:
                        break
                    await waiter.happened.wait()
            if found is not None and found.reply is None and found.size is not None:
                reply = await self._reader.do(store.fetch_reply, found.id)
                found = None if reply is None else found._replace(reply=reply)  # None: it was closed meanwhile
            yield FinalReply(_told(request, found))
        except (MalformedRequest, StoreError) as error:
            yield FinalReply(_refused(request, error))

    def _parts(self, found: store.Fetched, start: int) -> "asyncio.Future[list[bytes]]":
        return self._reader.do(store.fetch_parts, store.Parts(found.id, found.attempt, start))

    @contextmanager
    def _waits(self, asked: ReplyRequest) -> Iterator["_Waiter"]:
        """One who waits for something to happen to the request, unless he does not want to."""
        waiter = _Waiter(dismissed=not asked.wait)
        if waiter.dismissed:
            yield waiter
            return
        if len(self._waiters) >= MAX_WAITING:
            oldest = next(iter(self._waiters))
            del self._waiters[oldest]
            oldest.dismiss()
        self._waiters[waiter] = None
        self._waiting[asked.uuid].add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.pop(waiter, None)
            self._waiting[asked.uuid].discard(waiter)
            if not self._waiting[asked.uuid]:
                del self._waiting[asked.uuid]

    def changed(self, uuid: UUID) -> None:
        """Something happened to the request: those who wait for it look."""
        for each in self._waiting.get(uuid, ()):
            each.happened.set()

    async def watch(self) -> None:
        """Look now and then for what others did to the requests that somebody here waits for.  Runs until cancelled."""
        before: dict[UUID, store.Seen] = {}
        while True:
            await asyncio.sleep(POLL)
            waiting = frozenset(self._waiting)
            if not waiting:
                continue
            with suppress(StoreError):  # those who wait are told when they look themselves
                now = await self._reader.do(store.states, waiting)
                for uuid in waiting:
                    if uuid not in now or now[uuid].ended or now[uuid] != before.get(uuid):
                        self.changed(uuid)
                before = now

    def end(self) -> None:
        """Answer those who wait."""
        self._ending = True
        for uuid in list(self._waiting):
            self.changed(uuid)


def _told(request: Request, found: store.Fetched | None) -> list[bytes]:
    """The FINAL for a request in this state."""
    if found is None:
        return [_status(request, UNKNOWN)]
    if found.state == "done":
        return [OK, *unpack(found.reply or b"")]
    if found.state != "failed":
        return [NOT_YET]
    # The frames after the status tell a request that failed from a Titanic that could not look: the code that the
    # service gave, and its detail if there is one.
    detail = [] if found.reply is None else unpack(found.reply)
    return [_status(request, f"500 {found.error}"), b"%03d" % (found.code or Code.FAILED), *detail]


def _refused(request: Request, error: MalformedRequest | StoreError) -> list[bytes]:
    return [_status(request, f"400 {error}" if isinstance(error, MalformedRequest) else f"500 {error.text}")]


def _status(request: Request, told: str) -> bytes:
    """Return the status frame: the code and, for callers that speak X1, the text (C37)."""
    return (told[:3] if "dialect" in request.options else told).encode(errors="replace")

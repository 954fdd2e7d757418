"""The three services of TSP (RFC 9, C27 to C30).

    titanic.request   service body+   → 200 uuid   the request is on disk
    titanic.reply     uuid            → 200 body+  the reply; 300 not yet; 400 unknown; 500 the request failed
    titanic.close     uuid            → 200        deleted, or there was no such request

A request belongs to the role that submitted it, which the broker tells.  To other roles, except admins, it is unknown.

400 and 500 mean that nothing was changed.  Callers that speak X1 get a text with the code; others get the bare code,
which third-party programs compare (C37).  `titanic/submission.py` has the options.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from typing import Final
from uuid import UUID

from ..mdp.codes import Code
from ..workers import Last, Request
from . import store
from .acceptance import Acceptance
from .backlog import Backlog
from .batches import StoreError
from .callers import Callers, RowsWaiter
from .database import Database
from .dispatcher import Dispatcher
from .frames import unpack
from .metrics import Metrics
from .rows import RowReplies, asks_for_rows, ended_as, outcome_of, parse_rows, remaining_seconds
from .submission import MalformedRequest, Submission, parse_close, parse_reply_request, parse_submission

OK: Final = b"200"
NOT_YET: Final = b"300"
UNKNOWN: Final = "400 unknown uuid"
UUID_IN_USE: Final = "400 uuid cannot be used: choose another"
"""Another owner's request has it."""


class Service:
    """The handlers of Titanic's services.

    Args:
        database: Has the requests.
        acceptance: Stores requests.
        backlog: Says whether there is room for more.
        dispatcher: Executes them.
        callers: Those that wait for replies.
        metrics: Counts what is rejected.
    """

    def __init__(
        self,
        database: Database,
        acceptance: Acceptance,
        backlog: Backlog,
        dispatcher: Dispatcher,
        callers: Callers,
        metrics: Metrics,
    ) -> None:
        self._database = database
        self._acceptance = acceptance
        self._backlog = backlog
        self._dispatcher = dispatcher
        self._callers = callers
        self._metrics = metrics

    async def request(self, request: Request) -> list[bytes]:
        """`titanic.request` (C27)."""
        try:
            return await (self._rows(request) if asks_for_rows(request) else self._single(request))
        except (MalformedRequest, StoreError) as error:
            self._metrics.refused("malformed" if isinstance(error, MalformedRequest) else "database")
            return rejection(request, error)

    async def _single(self, request: Request) -> list[bytes]:
        """Submit a request."""
        wanted = parse_submission(request, request.options, self._database.clock.now(), request.user)
        if full := self._backlog.why_full(wanted.service):
            return self._rejected(request, "full", f"{Code.QUEUE_FULL:d} {full}")
        uuid = await self._acceptance.accept(wanted)
        if uuid is None:
            return self._rejected(request, "uuid-in-use", UUID_IN_USE)
        return [OK, uuid.hex.encode()]

    async def _rows(self, request: Request) -> list[bytes]:
        """Submit the rows of `request`, and wait for their replies."""
        parsed = parse_rows(request, request.options, self._database.clock.now(), request.user)
        if full := self._backlog.why_full(request[0].decode()):  # checked: it is the service's name
            return self._rejected(request, "full", f"{Code.QUEUE_FULL:d} {full}")
        replies = RowReplies(len(parsed))
        with self._callers.waiting_for_rows() as (waiter, watch):
            submitted: dict[int, Submission] = {}
            for index, each in enumerate(parsed):
                if isinstance(each, Submission):
                    submitted[index] = each
                else:
                    self._metrics.refused("malformed")
                    replies.put(index, each)
            rows: dict[UUID, list[int]] = {}  # several, if they have the same key
            if submitted:
                uuids = await self._acceptance.accept_rows(list(submitted.values()), remaining_seconds(request))
                for (index, each), uuid in zip(submitted.items(), uuids, strict=True):
                    if uuid is not None:
                        rows.setdefault(uuid, []).append(index)
                        watch(uuid)
                        if uuid != each.uuid:
                            waiter.wake(uuid)
            await self._collect_rows(request, rows, waiter, replies)
        replies.fill()
        return replies.frames()

    def _rejected(self, request: Request, reason: str, status: str) -> list[bytes]:
        self._metrics.refused(reason)
        return [status_frame(request, status)]

    async def _collect_rows(
        self, request: Request, rows: dict[UUID, list[int]], waiter: RowsWaiter, replies: RowReplies
    ) -> None:
        """Wait until the requests `rows` have ended, or their time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining_seconds(request)):
                while rows and not self._callers.ending and not replies.groups:
                    changes = await waiter.changes()
                    lookups = {
                        uuid: self._database.reader.submit(store.fetch, _lookup(request, uuid))
                        for uuid, ended in changes.items()
                        if ended is None and uuid in rows
                    }
                    for uuid, ended in changes.items():
                        if ended is not None:
                            for index in rows.pop(uuid, ()):
                                replies.put(index, ended_as(ended))
                    for uuid, lookup in lookups.items():
                        outcome = outcome_of(await self._with_reply(await lookup))
                        if outcome is not None:
                            for index in rows.pop(uuid):
                                replies.put(index, outcome)

    async def close(self, request: Request) -> list[bytes]:
        """`titanic.close` (C29)."""
        try:
            uuid = parse_close(request, request.options)
            found = await self._database.writer.submit(store.close, _lookup(request, uuid))
        except (MalformedRequest, StoreError) as error:
            return rejection(request, error)
        if found is not None:
            self._dispatcher.closed(found)
            self._callers.changed(uuid)
        return [OK]

    async def reply(self, request: Request) -> AsyncGenerator[list[bytes] | Last, None]:
        """`titanic.reply` (C28)."""
        try:
            wanted = parse_reply_request(request, request.options)
            if wanted.request:
                body = await self._database.reader.submit(store.fetch_request, _lookup(request, wanted.uuid))
                yield Last([status_frame(request, UNKNOWN)] if body is None else [OK, *unpack(body)])
                return
            sent = wanted.start
            with self._callers.waiting_for_reply(wanted.uuid) if wanted.wait else nullcontext() as waiter:
                while True:
                    found = await self._database.reader.submit(store.fetch, _lookup(request, wanted.uuid))
                    if found is not None and wanted.partials:
                        while parts := await self._parts(found, sent):
                            for part in parts:
                                sent += 1
                                yield unpack(part)
                    if found is None or found.ended or waiter is None or waiter.dismissed or self._callers.ending:
                        break
                    await waiter.change()
            yield Last(_final(request, await self._with_reply(found)))
        except (MalformedRequest, StoreError) as error:
            yield Last(rejection(request, error))

    async def _with_reply(self, found: store.Fetched | None) -> store.Fetched | None:
        """Return `found` with its reply also if that is large; None if it was closed meanwhile."""
        if found is None or found.reply is not None or found.size is None:
            return found
        reply = await self._database.reader.submit(store.fetch_reply, found.id)
        return None if reply is None else found._replace(reply=reply)

    def _parts(self, found: store.Fetched, start: int) -> "asyncio.Future[list[bytes]]":
        return self._database.reader.submit(store.fetch_partials, store.PartialsQuery(found.id, found.attempt, start))

    def end(self) -> None:
        """Answer all callers that wait."""
        self._acceptance.end_turns()
        self._callers.end()


def _lookup(request: Request, uuid: UUID) -> store.Lookup:
    """Return the look-up of the request with this UUID that `request` asks for."""
    user, admin = request.user, request.admin
    return store.Lookup(uuid, None if admin else user)


def _final(request: Request, found: store.Fetched | None) -> list[bytes]:
    """Return the FINAL for a request in this state."""
    if found is None:
        return [status_frame(request, UNKNOWN)]
    if found.state == "done":
        return [OK, *unpack(found.reply or b"")]
    if found.state != "failed":
        return [NOT_YET]
    # The frames after the status distinguish a request that failed from a Titanic that failed.
    detail = [] if found.reply is None else unpack(found.reply)
    code = b"%03d" % (found.code or Code.FAILED)
    return [status_frame(request, f"500 {found.error}"), code, found.service.encode(), *detail]


def rejection(request: Request, error: MalformedRequest | StoreError) -> list[bytes]:
    """Return the frames that reject a request."""
    return [status_frame(request, f"400 {error}" if isinstance(error, MalformedRequest) else f"500 {error.text}")]


def status_frame(request: Request, status: str) -> bytes:
    """Return the status frame: the code and, for callers that speak X1, the text (C37)."""
    if "dialect" not in request.options:
        return status.encode(errors="replace")
    return b"500" if status.startswith(f"{Code.QUEUE_FULL:d}") else status[:3].encode()  # TSP has no 429

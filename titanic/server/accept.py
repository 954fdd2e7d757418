"""The three services of TSP (RFC 9, C27 to C30).

    titanic.request   service body+   → 200 uuid   the request is on disk; with the option `reply`: as titanic.reply
    titanic.reply     uuid            → 200 body+  the reply; 300 not yet; 400 unknown; 500 the request failed
    titanic.close     uuid            → 200        deleted, or there was no such request

A request belongs to the role that submitted it, which the broker tells.  To other roles, except admins, it is unknown.

400 and 500 mean that nothing was changed.  Callers that speak X1 get a text with the code, and a frame with a name for
the reason; others get the bare code, which third-party programs compare (C37).  `titanic/api/submission.py` has the
options.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Final
from uuid import UUID

from ...mdp.codes import Code
from ...mdp.errors import TitanicError
from ...workers import Last, Request
from ..api.submission import (
    UNKNOWN_UUID,
    Submission,
    asks_for_reply,
    parse_close,
    parse_reply_request,
    parse_submission,
    unpack,
)
from ..db import store
from ..db.engine import Database
from .counters import Metrics, Quota
from .dispatch import Dispatcher
from .fetch import Callers

OK: Final = b"200"
NOT_YET: Final = b"300"
CLOSED: Final = "500 the request was closed, or its result has expired, while its key is remembered"
MIN_ANSWER_SECONDS: Final = 0.1
MAX_ANSWER_SECONDS: Final = 1.0
"""How long before its deadline a caller that waits for the reply is answered with 300: a tenth of its time, but at
least and at most this long."""


class Full(TitanicError):
    """There is no room for another request."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code=int(Code.QUEUE_FULL), text=text, reason="full")


class Service:
    """The handlers of Titanic's services.

    Args:
        database: Has the requests.
        quota: Says whether there is room for more.
        dispatcher: Executes them.
        callers: Those that wait for replies.
        metrics: Counts what is rejected.
    """

    def __init__(
        self,
        database: Database,
        quota: Quota,
        dispatcher: Dispatcher,
        callers: Callers,
        metrics: Metrics,
    ) -> None:
        self._database = database
        self._quota = quota
        self._dispatcher = dispatcher
        self._callers = callers
        self._metrics = metrics

    async def request(self, request: Request) -> list[bytes]:
        """`titanic.request` (C27)."""
        try:
            options = request.options
            reply = asks_for_reply(options)
            wanted = parse_submission(request, options, self._database.clock.now(), request.user)
            if full := self._quota.why_full(wanted.service):
                raise Full(full)
            if reply:
                return await self._wait_for_reply(request, wanted)
            uuid = await self._accept(wanted)
            if uuid is None:  # another owner's request has it
                text = "uuid cannot be used: choose another"
                raise TitanicError(text, code=int(Code.MALFORMED), text=text, reason="uuid-in-use")
        except TitanicError as error:
            self._metrics.rejected[error.reason] += 1
            return refusal(request, error)
        return [OK, uuid.hex.encode()]

    async def _wait_for_reply(self, request: Request, wanted: Submission) -> list[bytes]:
        """Submit a request with a key, and answer when it has ended."""
        seconds = _seconds_to_wait(request)
        with self._callers.submitting(seconds) as waiter:
            uuid = await self._accept(wanted)
            waiter.watch(uuid or wanted.uuid, new=uuid == wanted.uuid)
            while True:
                await waiter.change()
                if (ended := waiter.outcome) is not None:
                    return _ended(request, wanted.service, ended.reply, ended.code, ended.error)
                found = await self._with_reply(await self._fetch(request, waiter.uuid))
                if found is None:
                    return [status_frame(request, CLOSED), b"%03d" % Code.FAILED, wanted.service.encode()]
                if found.ended or waiter.dismissed:
                    return _final(request, found)

    async def _accept(self, wanted: Submission) -> UUID | None:
        """Store a request, and return what `store.accept` does.  Raises `StoreError`."""
        database = self._database
        uuid = await (database.writer if wanted.key is None else database.keyed).submit(store.accept, wanted)
        self._dispatcher.accepted([wanted], [uuid])
        return uuid

    async def close(self, request: Request) -> list[bytes]:
        """`titanic.close` (C29)."""
        try:
            uuid = parse_close(request, request.options)
            found = await self._database.writer.submit(store.close, _lookup(request, uuid))
        except TitanicError as error:
            return refusal(request, error)
        if found is not None:
            self._dispatcher.closed(found)
            self._callers.ended(uuid)
        return [OK]

    async def reply(self, request: Request) -> AsyncGenerator[list[bytes] | Last, None]:
        """`titanic.reply` (C28)."""
        try:
            wanted = parse_reply_request(request, request.options)
            if wanted.request:
                body = await self._database.reader.submit(store.fetch_request, _lookup(request, wanted.uuid))
                yield Last(_unknown(request) if body is None else [OK, *unpack(body)])
                return
            sent = wanted.start
            with self._callers.fetching(partials=wanted.partials) if wanted.wait else nullcontext() as waiter:
                if waiter is not None:
                    waiter.watch(wanted.uuid)
                found: store.Fetched | None = None
                while True:
                    before, found = found, await self._fetch(request, wanted.uuid)
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
            yield Last(_final(request, await self._with_reply(found)))
        except TitanicError as error:
            yield Last(refusal(request, error))

    def _fetch(self, request: Request, uuid: UUID) -> "asyncio.Future[store.Fetched | None]":
        return self._database.reader.submit(store.fetch, _lookup(request, uuid))

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
        self._callers.end()


def _lookup(request: Request, uuid: UUID) -> store.Lookup:
    """Return the look-up of the request with this UUID that `request` asks for."""
    user, admin = request.user, request.admin
    return store.Lookup(uuid, None if admin else user)


def _same_end(found: store.Fetched, before: store.Fetched | None) -> bool:
    """Return whether a request has ended, and had ended in the same way `before`."""
    return before is not None and before.ended and before[:4] == found[:4]


def _final(request: Request, found: store.Fetched | None) -> list[bytes]:
    """Return the FINAL for a request in this state."""
    if found is None:
        return _unknown(request)
    if not found.ended:
        return [NOT_YET]
    code = None if found.state == "done" else found.code or Code.FAILED
    return _ended(request, found.service, found.reply, code, found.error)


def _ended(request: Request, service: str, reply: bytes | None, code: int | None, error: str | None) -> list[bytes]:
    """Return the FINAL for a request to `service` that has ended: with a reply, or with a failure of this code."""
    if code is None:
        return [OK, *unpack(reply or b"")]
    # The frames after the status distinguish a request that failed from a Titanic that failed.
    detail = [] if reply is None else unpack(reply)
    return [status_frame(request, f"500 {error}"), b"%03d" % code, service.encode(), *detail]


def _seconds_to_wait(request: Request) -> float | None:
    """Return how long a caller can wait for the reply; None without a limit."""
    if request.deadline is None:
        return None
    left = request.deadline - time.monotonic()
    return max(0.0, left - min(max(left / 10, MIN_ANSWER_SECONDS), MAX_ANSWER_SECONDS))


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

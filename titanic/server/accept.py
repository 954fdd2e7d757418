"""Accepts and closes requests: the services `titanic.request` and `titanic.close` of TSP (RFC 9, C27, C29).

    titanic.request   service body+   → 200 uuid   the request is on disk; with the option `reply`: as titanic.reply
    titanic.close     uuid            → 200        deleted, or there was no such request

A request belongs to the role that submitted it, which the broker tells.  To other roles, except admins, it is unknown.
`titanic/api/submission.py` has the options.
"""

import time
from typing import Final
from uuid import UUID

from ...mdp.codes import Code
from ...mdp.errors import TitanicError
from ...workers import Request
from ..api.submission import Submission, asks_for_reply, parse_close, parse_submission
from ..db import store
from ..db.engine import Database
from .counters import Metrics, Quota
from .dispatch import Dispatcher
from .fetch import OK, Callers, Replies, ended_with, final, lookup, refusal, status_frame

CLOSED: Final = "500 the request was closed, or its result has expired, while its key is remembered"
MIN_ANSWER_SECONDS: Final = 0.1
MAX_ANSWER_SECONDS: Final = 1.0
"""How long before its deadline a caller that waits for the reply is answered with 300: a tenth of its time, but at
least and at most this long."""


class Full(TitanicError):
    """There is no room for another request."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code=int(Code.QUEUE_FULL), text=text, reason="full")


class Submissions:
    """Accepts requests, and closes them.

    Args:
        database: Has the requests.
        quota: Says whether there is room for more.
        dispatcher: Executes them.
        replies: Answers callers that submit a request and wait for its reply.
        callers: The callers that wait.
        metrics: Counts requests that are rejected.
    """

    def __init__(
        self,
        database: Database,
        quota: Quota,
        dispatcher: Dispatcher,
        replies: Replies,
        callers: Callers,
        metrics: Metrics,
    ) -> None:
        self._database = database
        self._quota = quota
        self._dispatcher = dispatcher
        self._replies = replies
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
                    return ended_with(request, wanted.service, ended.reply, ended.code, ended.error)
                found = await self._replies.with_reply(await self._replies.find(request, waiter.uuid))
                if found is None:
                    return [status_frame(request, CLOSED), b"%03d" % Code.FAILED, wanted.service.encode()]
                if found.ended or waiter.dismissed:
                    return final(request, found)

    async def _accept(self, wanted: Submission) -> UUID | None:
        """Store a request, and return its UUID, as `store.accept` does.  Raises `StoreError`."""
        database = self._database
        uuid = await (database.writer if wanted.key is None else database.keyed).submit(store.accept, wanted)
        self._dispatcher.accepted([wanted], [uuid])
        return uuid

    async def close(self, request: Request) -> list[bytes]:
        """`titanic.close` (C29)."""
        try:
            uuid = parse_close(request, request.options)
            found = await self._database.writer.submit(store.close, lookup(request, uuid))
        except TitanicError as error:
            return refusal(request, error)
        if found is not None:
            self._dispatcher.closed(found)
            self._callers.ended(uuid)
        return [OK]


def _seconds_to_wait(request: Request) -> float | None:
    """Return how long a caller can wait for the reply; None without a limit."""
    if request.deadline is None:
        return None
    left = request.deadline - time.monotonic()
    return max(0.0, left - min(max(left / 10, MIN_ANSWER_SECONDS), MAX_ANSWER_SECONDS))

"""Results of attempts to execute requests: an outcome, or another attempt later.  They are decided and stored here.

Attempts that end with the death of a worker, a broker or a Titanic are repeated, unless they cost too many workers.  A
handler's answer, even an error, is the outcome; but errors are retried if the submitter has asked for it.
"""

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from ...clients import RequestError, RequestRejected, ServiceError
from ...mdp.backoff import doubled, jittered
from ...mdp.codes import Code
from ...mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ...mdp.tracing import REQUEST_ID, shown_id
from ..api.submission import pack
from ..db import store
from ..db.group_commit import BatchExecutor
from ..db.store.upkeep import MAX_BACKOFF_SECONDS
from .counters import Metrics, Quota
from .fetch import Callers

BACKOFF_SECONDS: Final = (0.5, 60.0)
"""The first and the longest pause before another attempt; each is twice as long as the one before."""
HANDLER_BACKOFF_SECONDS: Final = (1.0, MAX_BACKOFF_SECONDS)
"""The first and the longest pause after a handler has failed.  A request's own backoff replaces the first."""
MAX_REPLY_BYTES: Final = MAX_BODY - 100
"""Maximum size of a reply: when it is fetched, its status comes first."""
TRANSIENT_CODES: Final = frozenset({Code.TIME_PASSED, Code.QUEUE_FULL, Code.WORKER_LOST, Code.DRAINING})
"""Codes after which a request is retried without limit, whether the broker or a handler gave them; but the workers that
the broker reports as lost count towards `max_deaths`."""

AttemptResult: TypeAlias = store.Outcome | store.Reschedule
"""The result of an attempt: the request has ended, or another attempt follows."""

log = logging.getLogger("zmdp.titanic")


class Retention(NamedTuple):
    """How many seconds to keep the results of requests without a ttl of their own; None until they are closed.

    Services may have their own; failed requests are kept as long as others, unless something else is said of them.
    """

    default: float | None = None
    services: Mapping[str, float] = MappingProxyType({})
    failed_default: float | None = None
    failed_services: Mapping[str, float] = MappingProxyType({})

    def seconds(self, service: str, *, failed: bool) -> float | None:
        """Return how long to keep a result of this service."""
        kept = self.services.get(service, self.default)
        if not failed:
            return kept
        return self.failed_services.get(service, kept if self.failed_default is None else self.failed_default)


class RetryPolicy:
    """Decides whether an attempt that the Titanic `holder` has made is followed by another.

    Args:
        holder: The Titanic's name in the database.
        clock: The database's clock.
        retention: How long to keep results.
        max_deaths: Lost workers after which a request fails.
        metrics: Counts them.
    """

    def __init__(
        self, holder: str, clock: store.Clock, *, retention: Retention, max_deaths: int, metrics: Metrics
    ) -> None:
        self._holder = holder
        self._clock = clock
        self._retention = retention
        self._max_deaths = max_deaths
        self._metrics = metrics

    def success(self, claimed: store.Claimed, reply: Sequence[bytes]) -> store.Outcome:
        """Return the outcome of a request that was answered; it has failed if the reply is too large."""
        if not fits(reply):
            return self.failure(claimed, Code.TOO_LARGE, "the reply is too large to be fetched")
        now, ttl = self._clock.now(), self._retention.seconds(claimed.service, failed=False)
        return store.Outcome(claimed.id, self._holder, claimed.attempt, now, pack(reply), ttl=ttl)

    def failure(
        self, claimed: store.Claimed, code: int, text: str, detail: bytes | None = None, deaths: int | None = None
    ) -> store.Outcome:
        """Return the outcome of a request that has failed, with the frame `detail` if its handler gave one."""
        text = text.replace("\0", "?")  # PostgreSQL cannot store NUL
        now, ttl = self._clock.now(), self._retention.seconds(claimed.service, failed=True)
        return store.Outcome(claimed.id, self._holder, claimed.attempt, now, detail, code, text, ttl, deaths)

    def after_error(self, claimed: store.Claimed, error: RequestError) -> AttemptResult:
        """Return the result of an attempt that has ended with `error`."""
        text, code = error.text or str(error), error.code
        if code in TRANSIENT_CODES or (code is None and not isinstance(error, ServiceError)):
            self._metrics.deaths += error.workers_lost
            deaths = claimed.deaths + error.workers_lost
            if deaths > claimed.deaths and deaths >= self._max_deaths:
                reason = f"given up after {deaths} workers were lost while they handled it; the last error: {text}"
                log.warning(
                    "%s for service %r: %s", claimed.uuid.hex, claimed.service, reason, extra=log_fields(claimed)
                )
                return self.failure(claimed, Code.WORKER_LOST, reason, deaths=deaths)
            pause = transient_pause(claimed.attempt)
            log.info("%s: %s; retrying in %.1f s", claimed.uuid.hex, error, pause, extra=log_fields(claimed))
            return self.reschedule(claimed.id, claimed.attempt, pause, text, deaths=deaths)
        if code == Code.NOT_ALLOWED and isinstance(error, RequestRejected):  # the broker's 403, not a handler's
            return self.failure(claimed, code, f"on behalf of {claimed.owner}: {text}" if claimed.owner else text)
        if claimed.failures < claimed.retries:
            # At least the backoff, plus jitter, so that requests that failed together are not retried together.
            first, longest = HANDLER_BACKOFF_SECONDS
            pause = doubled(claimed.backoff or first, longest, claimed.failures)
            pause *= random.uniform(1.0, 1.2)  # noqa: S311 - jitter
            log.info("%s: %s; retrying in %.1f s", claimed.uuid.hex, error, pause, extra=log_fields(claimed))
            return self.reschedule(claimed.id, claimed.attempt, pause, text, failures=claimed.failures + 1)
        detail = pack([error.detail]) if error.detail is not None and len(error.detail) <= MAX_REPLY_BYTES else None
        return self.failure(claimed, code or Code.FAILED, text, detail)

    def reschedule(
        self,
        id_: int,
        attempt: int,
        pause: float = 0.0,
        error: str | None = None,
        *,
        failures: int | None = None,
        deaths: int | None = None,
    ) -> store.Reschedule:
        """Return that another attempt follows in `pause` seconds.  `error` is why this one failed."""
        text = None if error is None else error.replace("\0", "?")
        return store.Reschedule(id_, self._holder, attempt, self._clock.now() + pause, failures, text, deaths)


class Outcomes:
    """Stores PARTIALs and results of attempts, and wakes the callers that wait for them.

    Args:
        writer: Stores them.
        retries: Decides the results of attempts.
        callers: The callers that wait.
        quota: Told of each request that has ended.
        metrics: Counts outcomes and retries.
    """

    def __init__(
        self, writer: BatchExecutor, retries: RetryPolicy, callers: Callers, quota: Quota, metrics: Metrics
    ) -> None:
        self._writer = writer
        self.retries = retries
        self._callers = callers
        self._quota = quota
        self._metrics = metrics
        self.unstored = 0
        """Results that are not stored yet."""
        self.unstored_bytes = 0
        """Size of their replies."""

    @property
    def failing(self) -> bool:
        """Whether the database has failed to store the last PARTIAL or result."""
        return self._writer.failing

    def add_partial(self, claimed: store.Claimed, number: int, body: bytes, stored: Callable[[int], None]) -> None:
        """Store a PARTIAL, and then call `stored` with its size."""
        saved = store.Partial(claimed.id, claimed.attempt, number, body)
        done = partial(self._partial_stored, claimed.uuid, len(body), stored)
        self._writer.insist(store.add_partials, saved, done)

    def _partial_stored(self, uuid: UUID, size: int, stored: Callable[[int], None], _: None) -> None:
        self._callers.progressed(uuid)
        stored(size)

    def record(self, claimed: store.Claimed, result: AttemptResult, stored: Callable[[AttemptResult], None]) -> None:
        """Store the result of an attempt, and then call `stored` with it."""
        self.unstored += 1
        self.unstored_bytes += _size(result)
        work: Any = store.finish if isinstance(result, store.Outcome) else store.reschedule
        self._writer.insist(work, result, partial(self._stored, claimed, result, stored))

    def _stored(
        self,
        claimed: store.Claimed,
        result: AttemptResult,
        stored: Callable[[AttemptResult], None],
        current: bool | None,
    ) -> None:
        """Tell of a result that was stored; of an outcome only if its attempt was `current`."""
        self.unstored -= 1
        self.unstored_bytes -= _size(result)
        if isinstance(result, store.Outcome):
            self._quota.add(claimed.service, -1)
            self._metrics.ended(result.code)
            self._callers.ended(claimed.uuid, result if current else None)
        else:
            self._metrics.retries += 1
            self._callers.progressed(claimed.uuid)
        stored(result)


def _size(result: AttemptResult) -> int:
    return len(result.reply or b"") if isinstance(result, store.Outcome) else 0


def request_id(claimed: store.Claimed, headers: Any) -> str:
    """Return the id of a request in log lines: the one that its submitter has given it, or else its UUID."""
    given = headers.get(REQUEST_ID, "") if isinstance(headers, dict) else ""
    return given if given and isinstance(given, str) else claimed.uuid.hex


def log_fields(claimed: store.Claimed) -> dict[str, Any]:
    """Return the fields of a log line about a request."""
    try:
        headers = json.loads(claimed.headers or "null")
    except ValueError:  # another program has written the row
        headers = None
    fields = {"request_id": shown_id(request_id(claimed, headers)), "service": claimed.service}
    return {**fields, "role": claimed.owner} if claimed.owner else fields


def fits(part: Sequence[bytes]) -> bool:
    """Return whether a part of a reply is small enough to be fetched."""
    return sum(map(len, part)) <= MAX_REPLY_BYTES and len(part) < MAX_BODY_FRAMES


def transient_pause(attempt: int) -> float:
    """Return the pause in seconds after an attempt that is repeated without limit."""
    return jittered(doubled(*BACKOFF_SECONDS, attempt - 1))

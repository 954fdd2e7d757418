"""Call a service for the rows of one partition.  Runs on executors; needs pyzmq, but neither Spark nor pandas.

The calls have their own event loop, which runs only while the caller waits for rows.  Up to `window` tasks take
requests from one queue and send them over one connection.  Chunks of rows are returned in their original order.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVar

from ...clients import (
    AsyncClient,
    BrokerUnreachable,
    RequestError,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from ...mdp.codes import Code
from ...mdp.keys import ClientKeys
from ...titanic.conversation import no_titanic, raise_for_status
from ...titanic.rows import NO_REPLY
from ...workers.handling import MAX_BODY, Failed
from ...workers.rows import OPTION, Outcome, read_reply
from .availability import Availability
from .packs import Answer, Chunk, PackSize, Request, Row
from .replies import RowFailed, row_answer, unpack_reply

MIN_CHUNK_ROWS: Final = 256
"""A chunk may always have this many rows, however small the window is."""
MAX_CHUNK_ROWS: Final = 16_384
"""Maximum number of rows in a chunk while rows are packed automatically."""
MAX_OUTSTANDING_BYTES: Final = 64 << 20
"""Size of the outstanding requests of a partition, above which no further one is sent."""
RETRYABLE: Final = frozenset({Code.QUEUE_FULL, Code.DRAINING})
"""Codes that mean "try again later", whether sent by the broker or by a handler."""
RETRY_PAUSES_SECONDS: Final = (0.05, 1.0)
"""First and longest pause before such a request is repeated."""
TITANIC_SERVICE: Final = "titanic.request"

T = TypeVar("T")

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """Settings for sending rows, which Spark ships to executors with the plan.  Times are in seconds."""

    broker: str | Sequence[str]
    window: int
    rows_per_request: int | None = 1
    """None: as many as are answered quickly."""
    timeout: float = 60.0
    keep: float = 86400.0
    headers: Mapping[str, str] | None = None
    result: str = "string"
    """`string` and `binary`: the single frame that replies to a row; `frames`: the list of all frames."""
    keys: ClientKeys | None = field(default=None, repr=False)

    def for_slices(self) -> Self:
        """Return the settings for requests that each carry several rows in one frame, as does the reply."""
        return replace(self, rows_per_request=1, result="binary")


def _failure(error: Exception) -> Answer:
    if isinstance(error, RowFailed):
        return Answer(None, error.code, error.text)
    log.error("unexpected error in a request", exc_info=error)
    return Answer(None, int(Code.FAILED), f"{type(error).__name__}: {error}")


def answer_chunks(
    chunks: Iterable[Chunk], settings: CallSettings, lookahead: "Lookahead | None" = None
) -> Generator[Chunk, None, None]:
    """Yield `chunks` in order, with their `answers` set.

    Requests of following chunks are sent while one chunk is waited for.  Closing the generator cancels outstanding
    requests.  Errors of requests go into their rows and are never raised.
    """
    ahead: deque[Chunk] = deque()
    rows_ahead = 0
    lookahead = Lookahead(settings) if lookahead is None else lookahead
    with Calls(settings) as calls:
        for chunk in chunks:
            calls.start(chunk)
            ahead.append(chunk)
            rows_ahead += len(chunk.rows)
            while rows_ahead > lookahead.rows:
                first = ahead.popleft()
                rows_ahead -= len(first.rows)
                calls.finish(first)
                yield first
                lookahead.grow()
        for chunk in ahead:
            calls.finish(chunk)
            yield chunk


class Lookahead:
    """The maximum number of rows in a chunk, and beyond the chunk that is waited for.

    Enough to fill the window, few enough for LIMIT to stop early.  Where rows are packed automatically it grows, since
    a query that has taken many rows is likely to take more.
    """

    def __init__(self, settings: CallSettings) -> None:
        self.rows = max(MIN_CHUNK_ROWS, 2 * settings.window * (settings.rows_per_request or 1))
        self._most = max(self.rows, MAX_CHUNK_ROWS) if settings.rows_per_request is None else self.rows

    def grow(self) -> None:
        """Record that a chunk was taken."""
        self.rows = min(2 * self.rows, self._most)

    def rows_of_size(self, row_bytes: float) -> int:
        """Return the maximum number of rows in a chunk if rows have this size."""
        return max(1, min(self.rows, int(MAX_OUTSTANDING_BYTES / max(row_bytes, 1))))


class Calls:
    """A client, and the tasks that make requests with it while the `with` block lasts."""

    def __init__(self, settings: CallSettings) -> None:
        self._settings = settings
        self._client = AsyncClient(settings.broker, timeout=settings.timeout, key=settings.keys)
        self._loop = asyncio.new_event_loop()
        self._chunks: deque[Chunk] = deque()
        """Chunks with rows that are not sent yet."""
        self._unsent = 0
        """The number of these rows."""
        self._again: deque[Request] = deque()
        """Rows to be sent again, because the request that they shared has failed."""
        self._outstanding = 0
        """Size of the outstanding requests."""
        self._sizes: dict[tuple[str, bool], PackSize] = {}
        """By service, and whether the rows have keys."""
        self._runners: set[asyncio.Task[None]] = set()
        """The tasks that make requests; each ends when no request is waiting."""
        self._availability = Availability(self._client, settings.timeout, self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._loop.run_until_complete(self._close())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        tasks = [*self._runners, *self._availability.probes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def start(self, chunk: Chunk) -> None:
        """Queue the rows of `chunk`."""
        if chunk.unsent:
            self._chunks.append(chunk)
            self._unsent += len(chunk.unsent)
            self._start_runners()

    def finish(self, chunk: Chunk) -> None:
        """Wait until all rows of `chunk` have their answers."""
        if chunk.remaining:
            chunk.done = self._loop.create_future()
            self._loop.run_until_complete(chunk.done)

    def _start_runners(self) -> None:
        for _ in range(min(self._settings.window - len(self._runners), self._unsent + len(self._again))):
            self._runners.add(self._loop.create_task(self._run()))

    async def _run(self) -> None:
        # This loop runs once per request, so it makes few calls and allocates nothing that can be shared.
        while self._outstanding < MAX_OUTSTANDING_BYTES and (taken := self._take()) is not None:
            chunk, indexes, size = taken
            self._outstanding += size
            try:
                await self._request(chunk, indexes, size)
            except Exception as error:  # noqa: BLE001 - an error goes into its rows and must not end the job
                failure = _failure(error)
                for index in indexes:
                    chunk.answer(index, failure)
            if self._outstanding >= MAX_OUTSTANDING_BYTES > self._outstanding - size:
                self._loop.call_soon(self._start_runners)  # those that ended because too much was outstanding
            self._outstanding -= size
        task = asyncio.current_task()
        if task is not None:
            self._runners.discard(task)

    def _take(self) -> Request | None:
        """Return the next request, or None."""
        if self._again:
            return self._again.popleft()
        if not self._unsent:
            return None
        chunk = self._chunks[0]
        most = self._settings.rows_per_request
        if most is None:
            row = chunk.rows[chunk.unsent[-1]]
            most = self._size(row).now(self._unsent)
        indexes, size = chunk.take(most)
        self._unsent -= len(indexes)
        if not chunk.unsent:
            self._chunks.popleft()
        return chunk, indexes, size

    def _size(self, row: Row) -> PackSize:
        key = (row.service or "", row.keyed)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = PackSize(self._settings.timeout, keyed=row.keyed)
        return size

    def _send_again(self, chunk: Chunk, indexes: Sequence[int], most: int) -> None:
        """Queue rows again, in requests of up to `most` rows."""
        for start in range(0, len(indexes), most):
            pack = list(indexes[start : start + most])
            self._again.append((chunk, pack, sum(len(chunk.rows[index].body or b"") for index in pack)))
        self._start_runners()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _request(self, chunk: Chunk, indexes: list[int], size: int) -> None:
        """Make a request with these rows, and set their answers or send them again.  Raises `RowFailed`."""
        row = chunk.rows[indexes[0]]
        if row.service is None:
            raise RowFailed(Code.MALFORMED, "the service is NULL; every row must name a service")
        if row.keyed and row.key is None:
            raise RowFailed(Code.MALFORMED, "the key is NULL; every row sent through Titanic needs a key")
        if size > MAX_BODY:
            raise RowFailed(Code.TOO_LARGE, f"the request has {size} bytes; the limit is {MAX_BODY}")
        needed = (TITANIC_SERVICE, row.service) if row.keyed else (row.service,)
        if self._availability:
            await self._availability.check(needed)
        try:
            if row.keyed:
                await self._request_titanic(row.service, chunk, indexes)
            else:
                await self._request_service(row.service, chunk, indexes)
        except SettingError as error:
            raise RowFailed(Code.MALFORMED, str(error)) from None
        except RequestError as error:
            failed = await self._failed(error, needed)
            most = 0 if row.keyed or len(indexes) == 1 or self._availability else _smaller_pack(error, len(indexes))
            if not most:
                raise failed from None
            self._divide(row, chunk, indexes, most)

    async def _failed(self, error: RequestError, needed: Sequence[str]) -> RowFailed:
        """Return the failure to report, and remember a service that is unavailable."""
        if isinstance(error, RequestTimeout):
            return await self._availability.timed_out(needed, error)
        if isinstance(error, ServiceNotFound):
            failed = RowFailed(Code.NO_WORKER, error.text or str(error))
            self._availability.not_found(needed[0], failed)
            return failed
        return RowFailed(error.code or Code.FAILED, error.text or str(error))

    def _divide(self, row: Row, chunk: Chunk, indexes: Sequence[int], most: int) -> None:
        """Send the rows of a request that failed as a whole in smaller ones, to find those that caused it."""
        if self._settings.rows_per_request is None:
            self._size(row).failed()
        self._send_again(chunk, indexes, most)

    async def _request_service(self, service: str, chunk: Chunk, indexes: list[int]) -> None:
        settings, count = self._settings, len(indexes)
        size = self._sizes.get((service, False)) if settings.rows_per_request is None else None
        asked = count > 1 or (size is not None and size.understood is None)
        options = {OPTION: count} if asked else None
        body = [body for index in indexes if (body := chunk.rows[index].body) is not None]
        began = time.monotonic()
        try:
            reply = await self._client.request(service, *body, headers=settings.headers, options=options)
        except RequestError as error:
            if error.code not in RETRYABLE:
                raise
            reply = await self._retrying(
                began + settings.timeout,
                lambda remaining: self._client.request(
                    service, *body, timeout=remaining, headers=settings.headers, options=options
                ),
                first_error=error,
            )
        outcomes = read_reply(reply, count) if asked else None
        if size is not None:
            if asked:
                size.understood = outcomes is not None
            if not size.understood and count > 1:
                self._divide(chunk.rows[indexes[0]], chunk, indexes, 1)
                return
            if size.understood:
                size.replied(count, time.monotonic() - began)
        if outcomes is not None:
            self._answer(chunk, indexes, outcomes)
            return
        for index, answer in zip(indexes, list(unpack_reply(reply, count, settings.result)), strict=True):
            chunk.answer(index, answer)

    async def _request_titanic(self, service: str, chunk: Chunk, indexes: list[int]) -> None:
        """Submit rows to Titanic under their keys, and set their answers; repeating this returns the same replies.

        The requests are never closed, because running the plan again needs the replies again.
        """
        settings, count = self._settings, len(indexes)
        body = [service.encode()]
        for index in indexes:
            row = chunk.rows[index]
            body += ((row.key or "").encode(errors="surrogateescape"), row.body or b"")
        kept = round(settings.keep * 1000, 3)
        options = {OPTION: count, "key_ttl": kept, "result_ttl": kept}
        began = time.monotonic()
        try:
            reply = await self._retrying(
                began + settings.timeout,
                lambda remaining: self._client.request(
                    TITANIC_SERVICE, *body, timeout=remaining, wait=False, headers=settings.headers, options=options
                ),
                (BrokerUnreachable, ServiceNotFound, WorkerLost),
            )
        except ServiceNotFound:
            raise no_titanic(self._client, TITANIC_SERVICE) from None
        outcomes = read_reply(reply, count, partly=True)
        if outcomes is None:
            raise_for_status(reply)
            raise RowFailed(Code.FAILED, "Titanic does not understand requests with several rows; update it")
        if settings.rows_per_request is None:
            self._size(chunk.rows[indexes[0]]).replied(count, time.monotonic() - began)
        late = [index for index, outcome in zip(indexes, outcomes, strict=False) if outcome == NO_REPLY]
        if late:
            failed = await self._availability.timed_out((TITANIC_SERVICE, service), RequestTimeout(NO_REPLY.text))
            outcomes = [Failed(failed.code, failed.text) if each == NO_REPLY else each for each in outcomes]
        self._answer(chunk, indexes, outcomes)
        if len(outcomes) < count:
            self._send_again(chunk, indexes[len(outcomes) :], count)

    def _answer(self, chunk: Chunk, indexes: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Set the answers of rows, or send those again that a worker has refused for now."""
        again = []
        answers = []
        for index, outcome in zip(indexes, outcomes, strict=False):
            if isinstance(outcome, Failed):
                if outcome.code in RETRYABLE and not chunk.rows[index].keyed:
                    again.append(index)
                    continue
                answers.append((index, Answer(None, outcome.code, outcome.text)))
            else:
                answers.append((index, row_answer(outcome, self._settings.result)))
        for index, answer in answers:
            chunk.answer(index, answer)
        if again:
            self._send_again(chunk, again, 1)

    async def _retrying(
        self,
        deadline: float,
        ask: Callable[[float], Awaitable[T]],
        retryable_types: tuple[type[RequestError], ...] = (),
        first_error: RequestError | None = None,
    ) -> T:
        """Call `ask` with the remaining seconds and return its result.

        Retries until `deadline` after errors whose code is in `RETRYABLE` or whose type is in `retryable_types`.
        `first_error` is such an error of an earlier attempt.
        """
        pause, most = RETRY_PAUSES_SECONDS
        while True:
            if first_error is not None:
                if time.monotonic() + pause >= deadline:
                    raise first_error
                await asyncio.sleep(pause)
                pause = min(2 * pause, most)
            try:
                return await ask(max(deadline - time.monotonic(), 0.001))
            except RequestError as error:
                if error.code not in RETRYABLE and not isinstance(error, retryable_types):
                    raise
                first_error = error


def _smaller_pack(error: RequestError, rows: int) -> int:
    """Return how many rows to send again together, after `error` of a request with this many; 0 if not to send them."""
    if isinstance(error, RequestTimeout | WorkerLost | StreamInterrupted):
        return 1  # each trial costs the whole timeout, or workers
    if isinstance(error, ServiceError) or error.code == Code.TOO_LARGE:
        return (rows + 1) // 2
    return 0

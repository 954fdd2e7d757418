"""Call a service for the rows of one partition.  Runs on executors; needs pyzmq, but neither Spark nor pandas.

The calls have their own event loop, which runs only while the caller waits for rows.  Up to `window` tasks take
requests from one queue and send them over one connection.  Chunks of rows are returned in their original order.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, TypeVar

from ...clients import (
    AsyncClient,
    BrokerUnreachable,
    RequestError,
    RequestTimeout,
    ServiceNotFound,
    SettingError,
    ZmdpError,
)
from ...mdp.codes import Code
from ...mdp.keys import ClientKeys
from ...titanic import AsyncTitanic
from ...workers.handling import MAX_BODY, MAX_BODY_FRAMES

OK: Final = 200
"""The code of a row that has its reply, as in Titanic."""
MAX_PACKED_BYTES: Final = 4 << 20
"""Maximum size of the rows in one request.  Larger ones gain nothing, and their replies must fit in a message too."""
MIN_CHUNK_ROWS: Final = 256
"""A chunk may always have this many rows, however small the window is."""
PROBE_TIMEOUT_SECONDS: Final = 0.5
"""How long an unreachable broker may take to answer when it is probed again."""
RECHECK_SECONDS: Final = 1.0
"""Interval between such probes; rows fail immediately in between."""
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
    rows_per_request: int = 1
    timeout: float = 60.0
    keep: float = 86400.0
    headers: Mapping[str, str] | None = None
    result: str = "string"
    """`string` and `binary`: the single frame that replies to a row; `frames`: the list of all frames."""
    keys: ClientKeys | None = field(default=None, repr=False)


class Row(NamedTuple):
    """The request of one row."""

    service: str | None
    body: bytes | None
    """None if the row is not to be sent."""
    key: str | None = None
    keyed: bool = False
    """Whether the row goes through Titanic and so needs a key."""


class Answer(NamedTuple):
    """The result of a row: its reply and code 200, or another code and an error; all None if it was not sent."""

    reply: bytes | str | list[bytes] | None = None
    code: int | None = None
    error: str | None = None


class RowFailed(Exception):
    """A request failed; code and text go into its rows."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def _failure(error: Exception) -> Answer:
    if isinstance(error, RowFailed):
        return Answer(None, error.code, error.text)
    log.error("unexpected error in a request", exc_info=error)
    return Answer(None, int(Code.FAILED), f"{type(error).__name__}: {error}")


class Chunk:
    """Rows that are processed together; `tag` is returned with them unchanged."""

    def __init__(self, rows: Sequence[Row], tag: Any = None) -> None:
        self.rows = rows
        self.tag = tag
        self.answers = [NOT_SENT] * len(rows)
        self.remaining = 0
        """Requests that are not done."""
        self.done: asyncio.Future[None] | None = None


NOT_SENT: Final = Answer()


def answer_chunks(chunks: Iterable[Chunk], settings: CallSettings) -> Generator[Chunk, None, None]:
    """Yield `chunks` in order, with their `answers` set.

    Requests of following chunks are sent while one chunk is waited for.  Closing the generator cancels outstanding
    requests.  Errors of requests go into their rows and are never raised.
    """
    ahead: deque[Chunk] = deque()
    rows_ahead, most = 0, max_chunk_rows(settings)
    with Calls(settings) as calls:
        for chunk in chunks:
            calls.start(chunk)
            ahead.append(chunk)
            rows_ahead += len(chunk.rows)
            while rows_ahead > most:
                first = ahead.popleft()
                rows_ahead -= len(first.rows)
                calls.finish(first)
                yield first
        for chunk in ahead:
            calls.finish(chunk)
            yield chunk


def max_chunk_rows(settings: CallSettings) -> int:
    """Return the maximum number of rows in a chunk: enough to fill the window, few enough for LIMIT to stop early."""
    return max(MIN_CHUNK_ROWS, 2 * settings.window * settings.rows_per_request)


class Calls:
    """A client, and the tasks that make requests with it while the `with` block lasts."""

    def __init__(self, settings: CallSettings) -> None:
        self._settings = settings
        self._client = AsyncClient(settings.broker, timeout=settings.timeout, key=settings.keys)
        self._titanic = AsyncTitanic(self._client)
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[tuple[Chunk, list[int]]] = deque()
        """Requests not yet started: a chunk and the indexes of its rows that share the request."""
        self._runners: set[asyncio.Task[None]] = set()
        """The tasks that make requests; each ends when no request is waiting."""
        self._unavailable: dict[str, _Unavailable] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._loop.run_until_complete(self._close())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        tasks = [
            *self._runners,
            *(missing.probe for missing in self._unavailable.values() if missing.probe is not None),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def start(self, chunk: Chunk) -> None:
        """Queue the requests of `chunk`."""
        for request in pack_rows(chunk.rows, self._settings.rows_per_request):
            chunk.remaining += 1
            self._waiting.append((chunk, request))
        for _ in range(min(self._settings.window - len(self._runners), len(self._waiting))):
            self._runners.add(self._loop.create_task(self._run()))

    def finish(self, chunk: Chunk) -> None:
        """Wait until all rows of `chunk` have their answers."""
        if chunk.remaining:
            chunk.done = self._loop.create_future()
            self._loop.run_until_complete(chunk.done)

    async def _run(self) -> None:
        # This loop runs once per row, so it makes few calls and allocates nothing that can be shared.
        waiting, settings = self._waiting, self._settings
        while waiting:
            chunk, indexes = waiting.popleft()
            rows, answers = chunk.rows, chunk.answers
            body = [body for index in indexes if (body := rows[index].body) is not None]
            try:
                reply = await self._reply(rows[indexes[0]], body)
                for index, answer in zip(indexes, unpack_reply(reply, len(indexes), settings), strict=True):
                    answers[index] = answer
            except Exception as error:  # noqa: BLE001 - an error goes into its rows and must not end the job
                failure = _failure(error)
                for index in indexes:
                    answers[index] = failure
            chunk.remaining -= 1
            if chunk.done is not None and not chunk.remaining:
                chunk.done.set_result(None)
        task = asyncio.current_task()
        if task is not None:
            self._runners.discard(task)

    async def _reply(self, row: Row, body: list[bytes]) -> list[bytes]:
        """Return the frames of the reply to `body`: the bodies of `row` and of the rows packed with it.

        Raises `RowFailed`.
        """
        service, _, key, keyed = row
        if service is None:
            raise RowFailed(Code.MALFORMED, "the service is NULL; every row must name a service")
        if keyed and key is None:
            raise RowFailed(Code.MALFORMED, "the key is NULL; every row sent through Titanic needs a key")
        if (size := sum(map(len, body))) > MAX_BODY:
            raise RowFailed(Code.TOO_LARGE, f"the request has {size} bytes; the limit is {MAX_BODY}")
        needed = (TITANIC_SERVICE, service) if keyed else (service,)
        if self._unavailable:
            await self._check_available(needed)
        began = time.monotonic()
        try:
            if key is not None:
                return await self._through_titanic(service, body, key, began + self._settings.timeout)
            try:
                return await self._client.request(service, *body, headers=self._settings.headers)
            except RequestError as error:
                if error.code not in RETRYABLE:
                    raise
                return await self._retry(service, body, began + self._settings.timeout, error)
        except RequestTimeout as error:
            raise await self._timed_out(needed, error) from None
        except ServiceNotFound as error:
            failed = RowFailed(Code.NO_WORKER, error.text or str(error))
            self._unavailable.setdefault(needed[0], _Unavailable(failed))
            raise failed from None
        except SettingError as error:
            raise RowFailed(Code.MALFORMED, str(error)) from None
        except RequestError as error:
            raise RowFailed(error.code or Code.FAILED, error.text or str(error)) from None

    async def _retry(self, service: str, body: Sequence[bytes], deadline: float, error: RequestError) -> list[bytes]:
        """Repeat a request that failed with `error`, whose code is in `RETRYABLE`."""
        return await self._retrying(
            deadline,
            lambda remaining: self._client.request(service, *body, timeout=remaining, headers=self._settings.headers),
            first_error=error,
        )

    async def _through_titanic(self, service: str, body: Sequence[bytes], key: str, deadline: float) -> list[bytes]:
        """Submit the request to Titanic under `key` and return its reply; repeating this returns the same reply.

        The request is never closed, because running the plan again needs the reply again.
        """
        keep, headers = self._settings.keep, self._settings.headers
        ticket = await self._retrying(
            deadline,
            lambda remaining: self._titanic.submit(service, *body, key=key, key_ttl=keep, ttl=keep, headers=headers),
        )
        try:
            return await self._retrying(deadline, ticket.result, (BrokerUnreachable, ServiceNotFound))
        except RequestTimeout as error:
            text = f"{error}; the request continues, and the same key returns its reply later"
            raise type(error)(text, service=service, code=error.code) from None

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

    # ── unavailable services ──────────────────────────────────────────────────────────────────────────────────────────

    async def _timed_out(self, needed: Sequence[str], error: RequestTimeout) -> RowFailed:
        """Return the failure to report, and remember an unavailable service so that following rows fail immediately."""
        failed = RowFailed(Code.TIME_PASSED, error.text or str(error))
        if isinstance(error, BrokerUnreachable):
            self._unavailable.setdefault(needed[0], _Unavailable(failed))
            return failed
        for service in needed:
            if service in self._unavailable or not await self._available(service, default=True):
                failed = RowFailed(
                    Code.NO_WORKER, f"no worker offered service {service!r} within {self._settings.timeout:g} s"
                )
                self._unavailable.setdefault(service, _Unavailable(failed))
                break
        return failed

    async def _check_available(self, needed: Sequence[str]) -> None:
        """Fail immediately if a required service is known to be unavailable; probe it again every `RECHECK_SECONDS`.

        Without this, each window of rows would wait for the whole `timeout`.  Raises `RowFailed`.
        """
        for service in needed:
            missing = self._unavailable.get(service)
            if missing is None:
                continue
            if missing.probe is None and time.monotonic() >= missing.until:
                missing.probe = self._loop.create_task(self._probe(service, missing))
            if missing.probe is not None:
                await asyncio.shield(missing.probe)
            if self._unavailable.get(service) is missing:
                raise RowFailed(missing.failed.code, missing.failed.text)

    async def _probe(self, service: str, missing: "_Unavailable") -> None:
        if await self._available(service, default=False):
            self._unavailable.pop(service, None)
        missing.until = time.monotonic() + RECHECK_SECONDS
        missing.probe = None

    async def _available(self, service: str, *, default: bool) -> bool:
        """Return whether a worker offers `service`; `default` if the broker does not answer."""
        try:
            return await self._client.available(service, timeout=min(self._settings.timeout, PROBE_TIMEOUT_SECONDS))
        except ZmdpError:
            return default


class _Unavailable:
    """A broker or service that did not answer."""

    def __init__(self, failed: RowFailed) -> None:
        self.failed = failed
        self.until = time.monotonic() + RECHECK_SECONDS
        """When to probe again."""
        self.probe: asyncio.Task[None] | None = None
        """The probe that is running."""


# ── from rows to requests and back ───────────────────────────────────────────────────────────────────────────────────


def pack_rows(rows: Sequence[Row], most: int) -> Iterator[list[int]]:
    """Yield the indexes of the rows in each request: up to `most` consecutive rows for the same service.

    A row with a key is a request of its own.  Rows without a body are not sent.
    """
    pack: list[int] = []
    size = 0
    for index, row in enumerate(rows):
        if row.body is None:
            continue
        if pack and (
            len(pack) >= most
            or size + len(row.body) > MAX_PACKED_BYTES
            or row.keyed
            or rows[pack[0]].keyed
            or row.service != rows[pack[0]].service
        ):
            yield pack
            pack, size = [], 0
        pack.append(index)
        size += len(row.body)
    if pack:
        yield pack


def unpack_reply(reply: Sequence[bytes], count: int, settings: CallSettings) -> Iterable[Answer]:
    """Return the answers of the `count` rows packed in a request.  Raises `RowFailed` if it lacks frames."""
    if settings.result == "frames":
        return [Answer(list(reply), OK)]
    if len(reply) != count:
        rows = "one row" if count == 1 else f"{count} rows"
        raise RowFailed(
            Code.FAILED, f"the reply has {_count_frames(len(reply))}; a request of {rows} needs {_count_frames(count)}"
        )
    if settings.result == "binary":
        return [Answer(frame, OK) for frame in reply]
    return map(_decode, reply)


def _decode(frame: bytes) -> Answer:
    try:
        return Answer(frame.decode(), OK)
    except UnicodeDecodeError as error:
        return Answer(None, Code.FAILED, f"the reply is not valid UTF-8 ({error}); use result='binary'")


def _count_frames(count: int) -> str:
    return "one frame" if count == 1 else f"{count} frames"


def check_rows_per_request(rows: object) -> None:
    """Raise `SettingError` unless a request can hold this many rows."""
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_BODY_FRAMES:
        raise SettingError(
            f"rows_per_request is {rows!r}; expected 1 to {MAX_BODY_FRAMES}, the maximum number of frames in a request"
        )

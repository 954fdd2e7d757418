"""Calls for the rows of one partition: what runs on the executors for `pipeline.py`.  Needs pyzmq; no Spark, no pandas.

The calls have their own event loop, which runs only while a caller waits for rows.  Up to `window` tasks take requests
from one queue, so that many are outstanding, over one connection.  Pieces of rows are answered in the order in which
they came.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from ...titanic import AsyncTitanic
from ...workers.handling import MAX_BODY, MAX_BODY_FRAMES

DONE: Final = 200
"""The code of a row that has its reply, as Titanic says it."""
MAX_PACK: Final = 4 << 20
"""Bytes of rows that are sent together; more would gain nothing, and their replies have to fit in a message as well."""
SMALLEST_PIECE: Final = 256
"""Rows that are handed out together, or more: twice what may be outstanding."""
PROBE: Final = 0.5
"""Seconds in which a broker that could not be reached must answer when it is asked whether it is back."""
HOLD: Final = 1.0
"""Seconds between two such questions; rows that come meanwhile fail at once."""
NOT_NOW: Final = frozenset({Code.QUEUE_FULL, Code.DRAINING})
"""Codes that mean "try again later", whether the broker or a handler gives them."""
PAUSES: Final = (0.05, 1.0)
"""Seconds before a request is repeated after such a code: at first, and at most."""
TITANIC: Final = "titanic.request"

T = TypeVar("T")

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How rows are sent.  Goes to the executors with the plan."""

    broker: str | Sequence[str]
    window: int
    rows_per_request: int = 1
    timeout: float = 60.0
    keep: float = 86400.0
    headers: Mapping[str, str] | None = None
    result: str = "string"
    """`string` and `binary`: the one frame that is the reply to a row; `frames`: the list of all that came."""


class Row(NamedTuple):
    """What is asked for one row."""

    service: str | None
    body: bytes | None
    """None: the row is not sent."""
    key: str | None = None
    keyed: bool = False
    """It goes through Titanic, and must have a key."""


class Answer(NamedTuple):
    """What a row gets: a reply and the code 200, or a code and what went wrong; nothing if it was not sent."""

    reply: bytes | str | list[bytes] | None = None
    code: int | None = None
    error: str | None = None


class Failed(Exception):
    """Why a request brought nothing, as it is told in the row."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def _failure(error: Exception) -> Answer:
    if isinstance(error, Failed):
        return Answer(None, error.code, error.text)
    log.error("a request could not be made", exc_info=error)
    return Answer(None, int(Code.FAILED), f"{type(error).__name__}: {error}")


class Piece:
    """Rows that are handed out together, with `tag`, whatever the caller wants back with them."""

    def __init__(self, rows: Sequence[Row], tag: Any = None) -> None:
        self.rows = rows
        self.tag = tag
        self.answers = [NOTHING] * len(rows)
        self.left = 0
        """Requests that are not done."""
        self.done: asyncio.Future[None] | None = None


NOTHING: Final = Answer()


def answered(pieces: Iterable[Piece], settings: Settings) -> Generator[Piece, None, None]:
    """Each of `pieces` with its `answers`, in order.

    While one is waited for, requests of the next are sent already.  Closing the generator cancels what is outstanding.
    Raises nothing on account of a row.
    """
    ahead: deque[Piece] = deque()
    rows_ahead, most = 0, piece_size(settings)
    with Calls(settings) as calls:
        for piece in pieces:
            calls.start(piece)
            ahead.append(piece)
            rows_ahead += len(piece.rows)
            while rows_ahead > most:
                first = ahead.popleft()
                rows_ahead -= len(first.rows)
                calls.finish(first)
                yield first
        for piece in ahead:
            calls.finish(piece)
            yield piece


def piece_size(settings: Settings) -> int:
    """Rows of a piece, at most: enough to keep the window full, and few enough for whoever wants only the first."""
    return max(SMALLEST_PIECE, 2 * settings.window * settings.rows_per_request)


class Calls:
    """A client and the tasks that make requests with it, while the `with` block lasts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = AsyncClient(settings.broker, timeout=settings.timeout)
        self._titanic = AsyncTitanic(self._client)
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[tuple[Piece, list[int]]] = deque()
        """Requests that have not begun: the piece, and the numbers of its rows that go in the request."""
        self._runners: set[asyncio.Task[None]] = set()
        """The tasks that make the requests; each ends when nothing is waiting."""
        self._missing: dict[str, _Missing] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._loop.run_until_complete(self._close())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        tasks = [*self._runners, *(missing.look for missing in self._missing.values() if missing.look is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def start(self, piece: Piece) -> None:
        """Queue the requests of `piece`."""
        for request in packs(piece.rows, self._settings.rows_per_request):
            piece.left += 1
            self._waiting.append((piece, request))
        for _ in range(min(self._settings.window - len(self._runners), len(self._waiting))):
            self._runners.add(self._loop.create_task(self._run()))

    def finish(self, piece: Piece) -> None:
        """Wait until all rows of `piece` have their answers."""
        if piece.left:
            piece.done = self._loop.create_future()
            self._loop.run_until_complete(piece.done)

    async def _run(self) -> None:
        # Each row passes through here: few calls, and nothing is made for a row that can be made once.
        waiting, settings = self._waiting, self._settings
        while waiting:
            piece, numbers = waiting.popleft()
            rows, answers = piece.rows, piece.answers
            body = [body for number in numbers if (body := rows[number].body) is not None]
            try:
                reply = await self._reply(rows[numbers[0]], body)
                for number, answer in zip(numbers, read(reply, len(numbers), settings), strict=True):
                    answers[number] = answer
            except Exception as error:  # noqa: BLE001 - an error belongs to its rows and must not end the job
                failure = _failure(error)
                for number in numbers:
                    answers[number] = failure
            piece.left -= 1
            if piece.done is not None and not piece.left:
                piece.done.set_result(None)
        task = asyncio.current_task()
        if task is not None:
            self._runners.discard(task)

    async def _reply(self, row: Row, body: list[bytes]) -> list[bytes]:
        """The frames of the reply to `body`, the bodies of `row` and of others that are sent with it.

        Raises `Failed`.
        """
        service, _, key, keyed = row
        if service is None:
            raise Failed(Code.MALFORMED, "the service is NULL: a row names the service that it is for")
        if keyed and key is None:
            raise Failed(Code.MALFORMED, "the key is NULL: a row that goes through Titanic has a key of its own")
        if (size := sum(map(len, body))) > MAX_BODY:
            raise Failed(Code.TOO_LARGE, f"the row has {size} bytes: a request may have {MAX_BODY}")
        needed = (TITANIC, service) if keyed else (service,)
        if self._missing:
            await self._check_there(needed)
        began = time.monotonic()
        try:
            if key is not None:
                return await self._through_titanic(service, body, key, began + self._settings.timeout)
            try:
                return await self._client.request(service, *body, headers=self._settings.headers)
            except RequestError as error:
                if error.code not in NOT_NOW:
                    raise
                return await self._again(service, body, began + self._settings.timeout, error)
        except RequestTimeout as error:
            raise await self._timed_out(needed, error) from None
        except ServiceNotFound as error:
            failed = Failed(Code.NO_WORKER, error.text or str(error))
            self._missing.setdefault(needed[0], _Missing(failed))
            raise failed from None
        except SettingError as error:
            raise Failed(Code.MALFORMED, str(error)) from None
        except RequestError as error:
            raise Failed(error.code or Code.FAILED, error.text or str(error)) from None

    async def _again(self, service: str, body: Sequence[bytes], deadline: float, error: RequestError) -> list[bytes]:
        """Repeat a request that ended with `error`, which is one of `NOT_NOW`."""
        return await self._patiently(
            deadline,
            lambda left: self._client.request(service, *body, timeout=left, headers=self._settings.headers),
            refused=error,
        )

    async def _through_titanic(self, service: str, body: Sequence[bytes], key: str, deadline: float) -> list[bytes]:
        """The same for a key, however often it is asked: Titanic has it done once and keeps the reply.

        It is never closed: who runs the plan again wants the reply again.
        """
        keep, headers = self._settings.keep, self._settings.headers
        ticket = await self._patiently(
            deadline,
            lambda left: self._titanic.submit(service, *body, key=key, key_ttl=keep, ttl=keep, headers=headers),
        )
        try:
            return await self._patiently(deadline, ticket.result, (BrokerUnreachable, ServiceNotFound))
        except RequestTimeout as error:
            told = f"{error}; it goes on: the same key gives its reply later"
            raise type(error)(told, service=service, code=error.code) from None

    async def _patiently(
        self,
        deadline: float,
        ask: Callable[[float], Awaitable[T]],
        passing: tuple[type[RequestError], ...] = (),
        refused: RequestError | None = None,
    ) -> T:
        """Return what `ask` returns; it is given the seconds that are left.

        After an error that is one of `NOT_NOW` or of the types in `passing`, ask again, as long as there is time.
        `refused` is such an error, if it was asked before.
        """
        pause, most = PAUSES
        while True:
            if refused is not None:
                if time.monotonic() + pause >= deadline:
                    raise refused
                await asyncio.sleep(pause)
                pause = min(2 * pause, most)
            try:
                return await ask(max(deadline - time.monotonic(), 0.001))
            except RequestError as error:
                if error.code not in NOT_NOW and not isinstance(error, passing):
                    raise
                refused = error

    # ── what is not there ────────────────────────────────────────────────────────────────────────────────────────────

    async def _timed_out(self, needed: Sequence[str], error: RequestTimeout) -> Failed:
        """What to tell; and if it is because something is missing, the next rows need not wait as long."""
        failed = Failed(Code.TIME_PASSED, error.text or str(error))
        if isinstance(error, BrokerUnreachable):
            self._missing.setdefault(needed[0], _Missing(failed))
            return failed
        for service in needed:
            if service in self._missing or not await self._available(service, unless=True):
                waited = f"nobody offers service {service!r}: none came within {self._settings.timeout:g} s"
                failed = Failed(Code.NO_WORKER, waited)
                self._missing.setdefault(service, _Missing(failed))
                break
        return failed

    async def _check_there(self, needed: Sequence[str]) -> None:
        """Tell at once what the last request found missing; once in a while look whether it is back.

        Else each row, or each window of them, would wait for `timeout`.  Raises `Failed`.
        """
        for service in needed:
            missing = self._missing.get(service)
            if missing is None:
                continue
            if missing.look is None and time.monotonic() >= missing.until:
                missing.look = self._loop.create_task(self._look(service, missing))
            if missing.look is not None:
                await asyncio.shield(missing.look)
            if self._missing.get(service) is missing:
                raise Failed(missing.failed.code, missing.failed.text)

    async def _look(self, service: str, missing: "_Missing") -> None:
        if await self._available(service, unless=False):
            self._missing.pop(service, None)
        missing.until = time.monotonic() + HOLD
        missing.look = None

    async def _available(self, service: str, *, unless: bool) -> bool:
        """Whether somebody offers `service`; `unless` is what to believe if the broker does not say."""
        try:
            return await self._client.available(service, timeout=min(self._settings.timeout, PROBE))
        except ZmdpError:
            return unless


class _Missing:
    """A broker, or a service, that was not there."""

    def __init__(self, failed: Failed) -> None:
        self.failed = failed
        self.until = time.monotonic() + HOLD
        """Until when nobody looks again."""
        self.look: asyncio.Task[None] | None = None
        """The look that is under way."""


# ── from rows to requests and back ───────────────────────────────────────────────────────────────────────────────────


def packs(rows: Sequence[Row], most: int) -> Iterator[list[int]]:
    """The numbers of the rows that go in each request: up to `most` that follow on one another for the same service.

    A row with a key goes alone: key and request are one.  Rows without a body go nowhere.
    """
    pack: list[int] = []
    size = 0
    for number, row in enumerate(rows):
        if row.body is None:
            continue
        if pack and (
            len(pack) >= most
            or size + len(row.body) > MAX_PACK
            or row.keyed
            or rows[pack[0]].keyed
            or row.service != rows[pack[0]].service
        ):
            yield pack
            pack, size = [], 0
        pack.append(number)
        size += len(row.body)
    if pack:
        yield pack


def read(reply: Sequence[bytes], count: int, settings: Settings) -> Iterable[Answer]:
    """The answers of the `count` rows that were sent together.  Raises `Failed` if it has not a frame each."""
    if settings.result == "frames":
        return [Answer(list(reply), DONE)]
    if len(reply) != count:
        of = "a row's request is" if count == 1 else f"a request of {count} rows, a frame each, is"
        raise Failed(Code.FAILED, f"the reply has {_frames(len(reply))}: the reply to {of} {_frames(count)}")
    if settings.result == "binary":
        return [Answer(frame, DONE) for frame in reply]
    return map(_text, reply)


def _text(frame: bytes) -> Answer:
    try:
        return Answer(frame.decode(), DONE)
    except UnicodeDecodeError as error:
        return Answer(None, Code.FAILED, f"the reply is no text in UTF-8 ({error}): ask for result='binary'")


def _frames(count: int) -> str:
    return "one frame" if count == 1 else f"{count} frames"


def check_rows_per_request(rows: object) -> None:
    """Raises `SettingError` if not so many rows fit in a request."""
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_BODY_FRAMES:
        raise SettingError(
            f"rows_per_request is {rows!r}: it takes 1 to {MAX_BODY_FRAMES}, as many frames as a request may have"
        )

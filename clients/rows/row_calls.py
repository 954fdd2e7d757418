"""Send each row as a request, over one connection, and return the rows in order with their outcomes.

A row is sent with a callback rather than from a task, with which it takes 2.5 times as long.  All rows of a turn travel
in one message.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Protocol

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.errors import (
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    ZmdpError,
)
from ...mdp.limits import MAX_BODY
from .availability import Asker, Availability

MIN_WINDOW: Final = 64
MAX_WINDOW: Final = 1024
"""Bounds of a window that adapts; a limit of the service makes any window smaller."""
WINDOW_SECONDS: Final = 0.1
"""How long a window of requests may take to be answered for it to grow, at most a tenth of the timeout: rows wait in
the service's queue for about as long."""
ROWS_AHEAD: Final = 4
"""Rows that may be sent while an earlier one is waited for, in windows."""
MAX_OUTSTANDING_BYTES: Final = 64 << 20
"""Size of the rows sent, and of their replies that have not been taken, above which no further row is sent."""

GROUPS_KEPT: Final = 1024
"""Groups whose options stay encoded."""
LIMITED: Final = frozenset({"limited", "limit-passed"})
"""The reasons of errors of requests that a limit has kept from starting."""

RowOutcome = list[bytes] | RequestError
"""The reply to a row, or why the row failed."""

log = logging.getLogger("zmdp.client")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How to send rows.  Times are in seconds."""

    window: int | None = None
    """Maximum number of outstanding requests.  None: as many as are answered quickly."""
    timeout: float = 60.0
    headers: Mapping[str, str] | None = None
    """Sent with each request."""
    group: str = ""
    """The group of the rows that name none."""
    retry: Any = None
    """The `Retry` of each request, or None."""


class Direct(Protocol):
    """Sends requests without a task: the dialog of an `AsyncClient`."""

    max_outstanding: int

    def begin_row(self, row: "Row", service: bytes, body: bytes, timeout: float, options: bytes, retry: Any) -> Any:
        """Send a request and return it."""

    def cancel(self, call: Any) -> None:
        """Cancel a request, unless it has ended."""


class Caller(Asker, Protocol):
    """The client over which the requests are made: an `AsyncClient`."""

    protocol: str

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""

    async def request(
        self,
        service: str,
        *frames: bytes,
        timeout: float,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        retry: Any = None,
    ) -> list[bytes]:
        """Call `service` and return the frames of its reply."""

    def _direct_dialog(self) -> Direct | None:
        """Return the dialog, or None if requests need a task."""

    async def close(self) -> None:
        """Close the connection."""


Connect = Callable[[], Caller]
"""Returns a new client."""


class Keyed(Protocol):
    """Sends rows with keys, through a service that remembers them: sending one again returns the same reply."""

    through: str
    """The service through which the rows are sent."""

    async def request(self, service: str, row: bytes, key: str, group: str, timeout: float) -> list[bytes]:
        """Send a row and return its reply.  Raises `RequestTimeout` if there is none in time."""


Route = Callable[[Caller], Keyed]
"""Makes a `Keyed` that uses a client."""


class Row:
    """A row: the request that is sent for it, and its outcome.

    A row without a body is not sent, nor is one that has been given an `error`.  `tag` belongs to the caller.
    """

    __slots__ = ("body", "call", "calls", "done", "group", "key", "outcome", "place", "service", "size", "tag")

    calls: "RowCalls"

    def __init__(
        self,
        service: str,
        body: bytes | None,
        key: str = "",
        group: str = "",
        *,
        error: RequestError | None = None,
        tag: Any = None,
    ) -> None:
        self.service = service
        self.body: Any = body
        self.key = key
        self.group = group
        self.tag = tag
        self.outcome: RowOutcome | None = error
        self.done = body is None or error is not None
        """Whether the outcome is there."""
        self.size = 0
        """The bytes of the row and its reply."""
        self.call: Any = None
        """Its request, while that is outstanding."""
        self.place = 0
        """The number of outstanding requests when it was sent, with its own."""

    def put(self, outcome: Any) -> None:
        """Take the reply or the error."""
        self.calls.answered(self, outcome)


class RowCalls:
    """The rows that were sent and have not been taken, until `close`."""

    def __init__(
        self, client: Caller, settings: RowSettings, loop: asyncio.AbstractEventLoop, keyed: Keyed | None = None
    ) -> None:
        self.rows: deque[Row] = deque()
        """In the order in which they are taken."""
        self._client = client
        self._settings = settings
        self._options = lru_cache(GROUPS_KEPT)(partial(_encoded_options, settings))
        """The options of a group's rows."""
        self._loop = loop
        self._keyed = keyed
        self._direct: Direct | None = None
        self._window = self._most = settings.window or MAX_WINDOW
        self._outstanding = 0
        self._bytes = 0
        self._probe: Row | None = None
        """The row that measures how long a window of requests takes."""
        self._probe_sent_at = 0.0
        self._again: deque[Row] = deque()
        """Rows to be sent again as soon as the window allows it."""
        self._limited = False
        """A limit has held rows back, which has been logged."""
        self._wake: Callable[[], None] | None = None
        """Wakes `wait` or `wait_async`."""
        self._wake_below = 0
        self._room: asyncio.Event | None = None
        """Set once further rows may be sent, while `feed` waits for that."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._availability = Availability(client, settings.timeout, loop)

    async def open(self) -> None:
        """Prepare the client.  From now on rows can be sent, even while the event loop does not run."""
        if self._keyed is None:
            self._direct = self._client._direct_dialog()
        if self._direct is not None:
            self._most = min(self._most, self._direct.max_outstanding)
        self._window = self._most if self._settings.window else min(MIN_WINDOW, self._most)

    @property
    def full(self) -> bool:
        """Whether no further row may be sent for now."""
        return (
            self._outstanding >= self._window
            or self._bytes >= MAX_OUTSTANDING_BYTES
            or len(self.rows) >= ROWS_AHEAD * self._window
            or bool(self._again)
        )

    def send(self, row: Row) -> None:
        """Send a row."""
        self.rows.append(row)
        if row.done:
            return
        row.calls = self
        row.size = len(row.body)
        self._bytes += row.size
        self._begin(row)

    def wait(self, *, last: bool = False) -> None:
        """Run the event loop until the first row has its outcome; or, unless these are the `last`, until others may be
        sent.
        """
        if not self.rows[0].done:
            self._wake = self._loop.stop
            self._wake_below = -1 if last else self._window * 3 // 4  # not for each row
            while self._wake is not None:
                self._loop.run_forever()  # until it is stopped by `wake`

    async def feed(self, rows: AsyncIterable[Row]) -> None:
        """Send rows as they come, in the running event loop, whenever others may be sent."""
        try:
            async for row in rows:
                self.send(row)
                if row is self.rows[0] and row.done:
                    self.wake()
                while self.full:
                    self._room = asyncio.Event()
                    await self._room.wait()
        finally:
            self.wake()

    async def wait_async(self) -> None:
        """Wait until the first row has its outcome, or `feed` ends."""
        if not (self.rows and self.rows[0].done):
            woken = asyncio.Event()
            self._wake, self._wake_below = woken.set, -1
            await woken.wait()

    def wake(self) -> None:
        """Wake `wait` or `wait_async`."""
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self) -> Iterator[Row]:
        """Remove and yield the first rows, as far as they have their outcomes."""
        rows = self.rows
        while rows and rows[0].done:
            row = rows.popleft()
            self._bytes -= row.size
            if self._room is not None:
                self._tell_room(self._room)
            yield row

    def _tell_room(self, room: asyncio.Event) -> None:
        """Let others be sent, if there is room for some."""
        if self._outstanding <= self._window * 3 // 4 and not self.full:
            room.set()
            self._room = None

    async def close(self) -> None:
        """Cancel everything that is outstanding."""
        if self._direct is not None:
            for row in self.rows:
                if row.call is not None:
                    self._direct.cancel(row.call)
        tasks = [*self._tasks, *self._availability.probes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, row: Row) -> None:
        """Make the request of a row."""
        self._outstanding += 1
        row.place = self._outstanding
        adapts = self._settings.window is None or self._window < self._most
        if adapts and self._outstanding >= self._window and self._probe is None:
            self._probe, self._probe_sent_at = row, time.monotonic()
        if len(row.body) > MAX_BODY:
            text = f"the request has {len(row.body)} bytes; the limit is {MAX_BODY}"
            self._settle(row, RequestRejected(text, service=row.service, code=Code.TOO_LARGE, text=text))
        elif self._direct is None or self._availability:
            self._start(self._request(row))
        else:
            settings = self._settings
            try:
                service, options = wire.service_name(row.service), self._options(row.group)
                row.call = self._direct.begin_row(row, service, row.body, settings.timeout, options, settings.retry)
            except ZmdpError as error:
                self.answered(row, error)

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _request(self, row: Row) -> None:
        """Make the request of a row from a task, for a client that needs one, or if its service may be unavailable."""
        settings, keyed = self._settings, self._keyed
        try:
            unavailable = await self._availability.check(self._needed(row))
            if unavailable is not None:
                self._settle(row, unavailable)
                return
            group = row.group or settings.group
            if keyed is None:
                reply = await self._client.request(
                    row.service, row.body, timeout=settings.timeout, headers=settings.headers,
                    options={"group": group} if group else None, retry=settings.retry,
                )  # fmt: skip
            else:
                reply = await keyed.request(row.service, row.body, row.key, group, settings.timeout)
        except Exception as error:  # noqa: BLE001 - no row may wait for ever
            self.answered(row, error)
        else:
            self.answered(row, reply)

    def _needed(self, row: Row) -> Sequence[str]:
        """Return the services without which a row has no reply."""
        return (row.service,) if self._keyed is None else (self._keyed.through, row.service)

    def answered(self, row: Row, outcome: list[bytes] | Exception) -> None:
        """Process the reply to a row's request, or its error."""
        row.call = None
        limited = isinstance(outcome, RequestError) and outcome.reason in LIMITED
        if row is self._probe and not limited:
            self._adapt(time.monotonic() - self._probe_sent_at)
        if isinstance(outcome, list):
            self._settle(row, outcome)
        elif limited:  # it has not started, so it has not failed
            self._start(self._held_back(row, outcome))
        elif isinstance(outcome, RequestTimeout):
            self._start(self._timed_out(row, outcome))
        else:
            if isinstance(outcome, ServiceNotFound):
                self._availability.not_found(self._needed(row)[0], outcome)
            self._settle(row, _row_error(row, outcome))

    async def _timed_out(self, row: Row, error: RequestTimeout) -> None:
        """Settle a row that has no reply in time, or send it again if it has waited behind too many others."""
        failed = await self._availability.timed_out(self._needed(row), error)
        least = MIN_WINDOW if self._settings.window is None else self._most
        if self._availability or row.place <= min(self._window, least):
            self._settle(row, failed)
        else:
            self._send_later(row, least)

    async def _held_back(self, row: Row, error: Exception) -> None:
        """Send a row again that a limit has held back, with a window of half of those that it waited with."""
        if not self._limited:
            self._limited = True
            log.warning("rows wait for a limit of service %r and are sent again: %s", row.service, error)
        seconds = error.retry_after if isinstance(error, RetryLater) else None
        await asyncio.sleep(seconds or 0.0)
        self._send_later(row, row.place // 2)

    def _send_later(self, row: Row, window: int) -> None:
        """Send a row again that has waited behind too many others: no more than such a window."""
        if row is self._probe:
            self._probe = None
        self._window = max(1, min(self._window, window))
        self._outstanding -= 1
        self._again.append(row)
        self._send_again()

    def _send_again(self) -> None:
        while self._again and self._outstanding < self._window:
            self._begin(self._again.popleft())

    def _adapt(self, seconds: float) -> None:
        """Adapt the window to the time that its probe took."""
        self._probe = None
        target = min(WINDOW_SECONDS, self._settings.timeout / 10)
        if seconds <= target:
            self._window = min(2 * self._window, self._most)
        elif self._window < MIN_WINDOW:  # a limit has held rows back: their time is that of their turns
            self._window = min(self._window + 1, self._most)
        elif seconds > 2 * target:
            self._window = min(max(MIN_WINDOW, int(self._window * target / seconds)), self._most)

    def _settle(self, row: Row, outcome: RowOutcome) -> None:
        """Set the outcome of a row."""
        row.outcome = outcome
        row.done = True
        if row is self._probe:  # it has failed without being sent
            self._probe = None
        if isinstance(outcome, list):
            size = len(outcome[0]) if len(outcome) == 1 else sum(map(len, outcome))
            row.size += size
            self._bytes += size
        self._outstanding -= 1
        if self._again:
            self._loop.call_soon(self._send_again)
        if self._wake is not None and (self.rows[0].done or (self._outstanding <= self._wake_below and not self.full)):
            self.wake()
        if self._room is not None:
            self._tell_room(self._room)


def _encoded_options(settings: RowSettings, group: str) -> bytes:
    """Return the options of the rows of a group."""
    options: dict[str, Any] = {"headers": dict(settings.headers)} if settings.headers else {}
    if group or settings.group:
        options["group"] = group or settings.group
    return wire.encode_options(options) if options else b""


def _row_error(row: Row, error: Exception) -> RequestError:
    """Return the error of a row for the exception that its request has raised."""
    if isinstance(error, RequestError):
        return error.with_traceback(None)
    if isinstance(error, SettingError):
        return RequestRejected(str(error), service=row.service, code=Code.MALFORMED, text=str(error))
    log.error("unexpected error in a request to service %r", row.service, exc_info=error)
    return ServiceError(Code.FAILED, f"{type(error).__name__}: {error}", service=row.service)


def answer_rows(
    rows: Iterable[Row], settings: RowSettings, connect: Connect, keyed: Route | None = None
) -> Generator[Row, None, None]:
    """Yield `rows` in order, with their outcomes.  Rows with keys need `keyed`, which sends them.

    The requests have their own connection and event loop, which runs only while the caller waits for a row.  Closing
    the generator cancels outstanding requests.  Errors of requests go into their rows and are never raised.
    """
    client = connect()
    loop = asyncio.new_event_loop()
    calls = RowCalls(client, settings, loop, None if keyed is None else keyed(client))
    try:
        loop.run_until_complete(calls.open())
        for row in rows:
            calls.send(row)
            while calls.full:
                calls.wait()
                yield from calls.take()
        while calls.rows:
            calls.wait(last=True)
            yield from calls.take()
    finally:
        try:
            loop.run_until_complete(calls.close())
            loop.run_until_complete(client.close())
        finally:
            loop.close()


async def answer_rows_async(
    rows: AsyncIterable[Row], settings: RowSettings, client: Caller
) -> AsyncGenerator[Row, None]:
    """Yield `rows` in order, with their outcomes, from requests over `client`.  See `answer_rows`.

    Rows are read in a task, so that an outcome does not wait until the next row is there.
    """
    loop = asyncio.get_running_loop()
    calls = RowCalls(client, settings, loop)
    await calls.open()
    feeding = loop.create_task(calls.feed(rows))
    try:
        while True:
            if feeding.done():
                feeding.result()  # raises what the source of the rows has raised
                if not calls.rows:
                    break
            for each in calls.take():
                yield each
            if calls.rows or not feeding.done():
                await calls.wait_async()
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await calls.close()

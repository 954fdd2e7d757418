"""Send the rows of chunks as requests, over one connection.

Up to `window` tasks take requests from one queue.  Chunks may be waited for in any order; their rows are sent in order.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ...mdp.codes import Code, request_error
from ...mdp.errors import (
    RequestError,
    RequestRejected,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from ...mdp.limits import MAX_BODY
from ...mdp.rows import OPTION, Failed, Outcome, is_plain, read_reply, worked_seconds
from .availability import Asker, Availability
from .packs import LONGEST_SECONDS, TARGET_SECONDS, Chunk, Pack, PackSize, RowOutcome

MAX_OUTSTANDING_BYTES: Final = 64 << 20
"""Size of the outstanding requests above which no further one is sent."""
RETRYABLE: Final = frozenset({Code.QUEUE_FULL, Code.DRAINING})
"""Codes that mean "try again later", whether sent by the broker or by a handler."""
FIRST_PAUSE_SECONDS: Final = 0.05
"""How long to wait before such a request is repeated; each following pause is twice as long."""
MAX_PAUSE_SECONDS: Final = 1.0
"""The longest of these pauses."""
_FRAMES: Final = {bytes}

log = logging.getLogger("zmdp.client")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How to send rows.  Times are in seconds."""

    window: int = 64
    """Maximum number of outstanding requests."""
    rows_per_request: int | None = None
    """None: as many as are answered quickly."""
    timeout: float = 60.0
    headers: Mapping[str, str] | None = None
    """Sent with each request."""


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
    ) -> list[bytes]:
        """Call `service` and return the frames of its reply."""


class Keyed(Protocol):
    """Sends rows with keys, through a service that remembers them: sending one again returns the same reply."""

    through: str
    """The service through which the rows are sent."""
    first_rows: int
    """Number of rows in the first requests."""
    max_rows: int
    """Maximum number of rows in a request."""
    max_requests: int
    """Maximum number of outstanding requests, if the window is larger."""
    target_seconds: float
    """How long a request should take."""
    retryable: tuple[type[RequestError], ...]
    """Errors after which a request is repeated until its timeout."""

    async def request(self, service: str, pack: Pack, timeout: float) -> Sequence[RowOutcome]:
        """Send rows and return their outcomes, perhaps only of the first ones: then the others are sent again.

        Those that are a `RequestTimeout` had no reply in time.
        """


Route = Callable[[Caller], Keyed]
"""Returns what sends rows with keys over a client."""


class RowCalls:
    """The rows that wait and the tasks that send them, until `close`."""

    def __init__(
        self, client: Caller, settings: RowSettings, loop: asyncio.AbstractEventLoop, keyed: Keyed | None = None
    ) -> None:
        self._client = client
        self._settings = settings
        self._loop = loop
        self._keyed = keyed
        self._window = settings.window if keyed is None else min(settings.window, keyed.max_requests)
        self._packs = client.protocol == "X1"
        """Whether requests can say that they pack rows."""
        self._chunks: deque[Chunk] = deque()
        """Chunks with rows that are not sent yet."""
        self._unsent = 0
        """The number of these rows."""
        self._again: deque[Pack] = deque()
        """Rows to be sent again, because the request that they shared has failed."""
        self._requests = 0
        """Outstanding requests."""
        self._outstanding = 0
        """Their size."""
        self._sizes: dict[str, PackSize] = {}
        """By service, if rows are packed automatically."""
        self._runners: set[asyncio.Task[None]] = set()
        """The tasks that make requests; each ends when no request is waiting."""
        self._availability = Availability(client, settings.timeout, loop)

    def start(self, chunk: Chunk) -> None:
        """Queue the rows of `chunk`."""
        if chunk.unsent:
            self._chunks.append(chunk)
            self._unsent += chunk.unsent
            self._start_runners()

    async def finish(self, chunk: Chunk) -> None:
        """Wait until all rows of `chunk` have their outcomes."""
        if chunk.missing:
            chunk.done = self._loop.create_future()
            await chunk.done

    async def close(self) -> None:
        """Cancel everything that is outstanding."""
        tasks = [*self._runners, *self._availability.probes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_runners(self) -> None:
        for _ in range(min(self._window - len(self._runners), self._unsent + len(self._again))):
            self._runners.add(self._loop.create_task(self._run()))

    async def _run(self) -> None:
        # This loop runs once per request, so it makes few calls and allocates nothing that can be shared.
        while self._outstanding < MAX_OUTSTANDING_BYTES and (pack := self._take()) is not None:
            self._requests += 1
            self._outstanding += pack.size
            try:
                await self._request(pack)
            except RequestError as error:
                pack.fail(error)
            except Exception as error:
                log.exception("unexpected error in a request")
                text = f"{type(error).__name__}: {error}"
                pack.fail(ServiceError(Code.FAILED, text, service=pack.chunk.service))
            self._requests -= 1
            if self._outstanding >= MAX_OUTSTANDING_BYTES > self._outstanding - pack.size:
                self._loop.call_soon(self._start_runners)  # those that ended because too much was outstanding
            self._outstanding -= pack.size
        task = asyncio.current_task()
        if task is not None:
            self._runners.discard(task)

    def _take(self) -> Pack | None:
        """Return the next request; None if there is none, or if it should wait for further rows."""
        if self._again:
            return self._again.popleft()
        if not self._unsent:
            return None
        chunk = self._chunks[0]
        size = self._size(chunk)
        most = self._settings.rows_per_request or 1 if size is None else size.now(self._unsent, self._requests)
        if not most:
            return None
        pack = chunk.take(most)
        self._unsent -= len(pack)
        if not chunk.unsent:
            self._chunks.popleft()
        return pack

    def _size(self, chunk: Chunk) -> PackSize | None:
        """Return how many rows a request should have; None if that is fixed."""
        if self._settings.rows_per_request is not None or not self._packs:
            return None
        size = self._sizes.get(chunk.service)
        if size is None:
            keyed, most_seconds = self._keyed, self._settings.timeout / 10
            if keyed is None:
                size = PackSize(target=min(TARGET_SECONDS, most_seconds), longest=min(LONGEST_SECONDS, most_seconds))
            else:
                target = min(keyed.target_seconds, most_seconds)
                size = PackSize(rows=keyed.first_rows, most=keyed.max_rows, target=target, understood=True)
            self._sizes[chunk.service] = size
        return size

    def _send_again(self, pack: Pack, most: int, start: int = 0) -> None:
        """Queue rows again, from the row `start` on, in requests of up to `most` rows."""
        self._again.extend(pack.part(at, min(at + most, len(pack))) for at in range(start, len(pack), most))
        self._start_runners()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _request(self, pack: Pack) -> None:
        """Make a request with these rows, and set their outcomes or send them again.  Raises `RequestError`."""
        service, keyed = pack.chunk.service, self._keyed
        if pack.size > MAX_BODY:
            raise _rejected(service, Code.TOO_LARGE, f"the request has {pack.size} bytes; the limit is {MAX_BODY}")
        needed = (service,) if keyed is None else (keyed.through, service)
        if self._availability:
            unavailable = await self._availability.check(needed)
            if unavailable is not None:
                pack.fail(unavailable)
                return
        try:
            if keyed is None:
                await self._request_service(service, pack)
            else:
                await self._request_keyed(keyed, service, pack)
        except SettingError as error:
            raise _rejected(service, Code.MALFORMED, str(error)) from None
        except RequestError as error:
            failed = await self._failed(error, needed)
            most = 0 if keyed or len(pack) == 1 or self._availability else _smaller_pack(error, len(pack))
            if not most:
                raise failed from None
            size = self._size(pack.chunk)
            if size is not None:
                size.failed()
            self._send_again(pack, most)

    async def _failed(self, error: RequestError, needed: Sequence[str]) -> RequestError:
        """Return the error to report, and remember a service that is unavailable."""
        if isinstance(error, RequestTimeout):
            return await self._availability.timed_out(needed, error)
        if isinstance(error, ServiceNotFound):
            self._availability.not_found(needed[0], error)
        return error

    async def _request_service(self, service: str, pack: Pack) -> None:
        settings, count, size = self._settings, len(pack), self._size(pack.chunk)
        asked = self._packs and (count > 1 or (size is not None and size.understood is None))
        options = {OPTION: count} if asked else None
        timeout, pause = settings.timeout, FIRST_PAUSE_SECONDS
        began = time.monotonic()
        while True:
            try:
                reply = await self._client.request(
                    service, *pack.rows, timeout=timeout, headers=settings.headers, options=options
                )
                break
            except RequestError as error:
                timeout = await _pause(error, pause, began + settings.timeout)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
        outcomes = read_outcomes(reply, count, service) if asked else None
        if size is not None:
            if asked or size.understood:
                seconds, worked = time.monotonic() - began, worked_seconds(reply) if asked else None
                size.replied(count, seconds, worked, understood=not asked or outcomes is not None)
            if not size.understood and count > 1:
                self._send_again(pack, 1)
                return
        if outcomes is None:
            if count > 1 and len(reply) != count:
                text = f"the reply has {_frames(len(reply))}; a request of {count} rows needs {_frames(count)}"
                raise RequestError(text, service=service, code=Code.FAILED, text=text)
            outcomes = list(reply) if count > 1 else [reply[0] if len(reply) == 1 else list(reply)]
        self._settle(pack, outcomes)

    def _settle(self, pack: Pack, outcomes: Sequence[RowOutcome]) -> None:
        """Set the outcomes of rows, and send those again that a worker has refused for now."""
        if set(map(type, outcomes)) == _FRAMES:
            pack.settle(outcomes)
            return
        start = 0
        for at, outcome in enumerate(outcomes):
            if isinstance(outcome, RequestError) and outcome.code in RETRYABLE:
                pack.settle(outcomes[start:at], start)
                start = at + 1
                self._send_again(pack.part(at, start), 1)
        pack.settle(outcomes[start:], start)

    async def _request_keyed(self, keyed: Keyed, service: str, pack: Pack) -> None:
        """Send rows with their keys.  Repeating this returns the same replies."""
        timeout, pause = self._settings.timeout, FIRST_PAUSE_SECONDS
        began = time.monotonic()
        while True:
            try:
                outcomes = await keyed.request(service, pack, timeout)
                break
            except RequestError as error:
                timeout = await _pause(error, pause, began + self._settings.timeout, keyed.retryable)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
        size = self._size(pack.chunk)
        if size is not None:
            size.replied(len(pack), time.monotonic() - began)
        late = next((each for each in outcomes if isinstance(each, RequestTimeout)), None)
        if late is not None:
            failed = await self._availability.timed_out((keyed.through, service), late)
            outcomes = [failed if isinstance(each, RequestTimeout) else each for each in outcomes]
        pack.settle(outcomes)
        if len(outcomes) < len(pack):
            self._send_again(pack, len(pack), len(outcomes))


async def _pause(
    error: RequestError, seconds: float, deadline: float, retryable: tuple[type[RequestError], ...] = ()
) -> float:
    """Wait before a request that has failed is repeated, and return what is left of its time.

    Raises `error` if it should not be repeated, or there is no time.  It should be after errors whose code is in
    `RETRYABLE` or whose type is in `retryable`.
    """
    if (error.code not in RETRYABLE and not isinstance(error, retryable)) or time.monotonic() + seconds >= deadline:
        raise error
    await asyncio.sleep(seconds)
    return max(deadline - time.monotonic(), 0.001)


def read_outcomes(reply: Sequence[bytes], count: int, service: str, *, partly: bool = False) -> list[RowOutcome] | None:
    """Return the outcomes of the `count` rows of a pack; `partly`, of its first rows.

    None if the worker does not understand packs.
    """
    if is_plain(reply, count):
        return list(reply[1:])
    outcomes = read_reply(reply, count, partly=partly)
    return None if outcomes is None else [_row_outcome(each, service) for each in outcomes]


def _row_outcome(outcome: Outcome, service: str) -> RowOutcome:
    if isinstance(outcome, Failed):
        return request_error(service, outcome.code, outcome.text, *outcome.detail)
    return outcome[0] if len(outcome) == 1 else outcome


def _smaller_pack(error: RequestError, rows: int) -> int:
    """Return how many rows to send again together, after `error` of a request with this many; 0 if not to send them."""
    if isinstance(error, RequestTimeout | WorkerLost | StreamInterrupted):
        return 1  # each trial costs the whole timeout, or workers
    if isinstance(error, ServiceError) or error.code == Code.TOO_LARGE:
        return (rows + 1) // 2
    return 0


def _rejected(service: str, code: int, text: str) -> RequestRejected:
    return RequestRejected(text, service=service, code=code, text=text)


def _frames(count: int) -> str:
    return "one frame" if count == 1 else f"{count} frames"

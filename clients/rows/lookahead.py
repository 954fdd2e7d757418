"""Chunks in, chunks out: how many are sent before the first one is waited for."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from typing import Final, Protocol

from .calls import MAX_OUTSTANDING_BYTES, Caller, Route, RowCalls, RowSettings
from .packs import Chunk, RowOutcome

MIN_CHUNK_ROWS: Final = 256
"""A chunk may always have this many rows, however small the window is."""
MAX_CHUNK_ROWS: Final = 16_384
"""Maximum number of rows in a chunk while rows are packed automatically."""


class ClosingCaller(Caller, Protocol):
    """A client that is closed afterwards."""

    async def close(self) -> None:
        """Close the connection."""


Connect = Callable[[], ClosingCaller]
"""Returns a new client."""


class Lookahead:
    """The maximum number of rows in a chunk, and beyond the chunk that is waited for.

    Enough to fill the window, few enough for a caller that stops early.  Where rows are packed automatically it grows,
    since a caller that has taken many rows is likely to take more, but not beyond what their replies take in memory.
    """

    def __init__(self, settings: RowSettings, most: int | None = None) -> None:
        self.rows = (
            max(MIN_CHUNK_ROWS, 2 * settings.window * (settings.rows_per_request or 1)) if most is None else most
        )
        self._most = max(self.rows, MAX_CHUNK_ROWS) if settings.rows_per_request is None else self.rows
        self._ahead: deque[Chunk] = deque()
        self._rows_ahead = 0
        self._bytes_ahead = 0

    def add(self, chunk: Chunk) -> None:
        """Record that the rows of `chunk` are being sent."""
        self._ahead.append(chunk)
        self._rows_ahead += len(chunk.rows)
        self._bytes_ahead += chunk.size

    def next(self, *, last: bool = False) -> Chunk | None:
        """Return the chunk to wait for, or None if others may be sent before.

        None with `last`, when there are no others, means that there is no chunk.
        """
        full = self._rows_ahead > self.rows or self._bytes_ahead > MAX_OUTSTANDING_BYTES
        if not self._ahead or not (full or last):
            return None
        chunk = self._ahead.popleft()
        self._rows_ahead -= len(chunk.rows)
        self._bytes_ahead -= chunk.size
        return chunk

    def taken(self, chunk: Chunk) -> None:
        """Record that a chunk with its outcomes was taken."""
        rows = min(2 * self.rows, self._most)
        size = sum(map(outcome_size, chunk.outcomes))
        if size * rows > MAX_OUTSTANDING_BYTES * len(chunk.rows):
            rows = MAX_OUTSTANDING_BYTES * len(chunk.rows) // size
        self.rows = max(1, rows)

    def rows_of_size(self, row_bytes: float) -> int:
        """Return the maximum number of rows in a chunk if rows have this size."""
        return max(1, min(self.rows, int(MAX_OUTSTANDING_BYTES / max(row_bytes, 1))))


def outcome_size(outcome: RowOutcome | None) -> int:
    """Return the size of a row's reply in bytes; 0 if it has none."""
    if isinstance(outcome, bytes):
        return len(outcome)
    return sum(map(len, outcome)) if isinstance(outcome, list) else 0


def answer_chunks(
    chunks: Iterable[Chunk],
    settings: RowSettings,
    connect: Connect,
    lookahead: Lookahead | None = None,
    keyed: Route | None = None,
) -> Generator[Chunk, None, None]:
    """Yield `chunks` in order, with their outcomes.

    Requests of following chunks are sent while one chunk is waited for.  The calls have their own connection and event
    loop, which runs only while the caller waits for a chunk.  Closing the generator cancels outstanding requests.
    Errors of requests go into their rows and are never raised.
    """
    lookahead = Lookahead(settings) if lookahead is None else lookahead
    client = connect()
    loop = asyncio.new_event_loop()
    calls = RowCalls(client, settings, loop, None if keyed is None else keyed(client))
    try:
        for chunk in chunks:
            calls.start(chunk)
            lookahead.add(chunk)
            while (first := lookahead.next()) is not None:
                loop.run_until_complete(calls.finish(first))
                yield first
                lookahead.taken(first)
        while (first := lookahead.next(last=True)) is not None:
            loop.run_until_complete(calls.finish(first))
            yield first
    finally:
        try:
            loop.run_until_complete(calls.close())
            loop.run_until_complete(client.close())
        finally:
            loop.close()


async def answer_chunks_async(
    chunks: AsyncIterable[Chunk], settings: RowSettings, client: Caller, lookahead: Lookahead
) -> AsyncGenerator[Chunk, None]:
    """Yield `chunks` in order, with their outcomes, from requests over `client`.  See `answer_chunks`."""
    calls = RowCalls(client, settings, asyncio.get_running_loop())
    try:
        async for chunk in chunks:
            calls.start(chunk)
            lookahead.add(chunk)
            while (first := lookahead.next()) is not None:
                await calls.finish(first)
                yield first
                lookahead.taken(first)
        while (first := lookahead.next(last=True)) is not None:
            await calls.finish(first)
            yield first
    finally:
        await calls.close()

"""The rows of `Client.map` and `AsyncClient.map`: what they take, in chunks, and what they yield."""

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Mapping
from typing import Final, TypedDict

from ..mdp import wire
from ..mdp.errors import RequestError, SettingError
from .arguments import check_legacy, checked_timeout
from .defaults import DEFAULT_TOTAL_TIMEOUT, MAX_OUTSTANDING
from .reply import Reply
from .rows import AUTO, Chunk, Lookahead, RowSettings, checked_rows_per_request

DEFAULT_WINDOW: Final = 64
CHUNKS_AHEAD: Final = 8
"""The rows that are sent ahead are divided into so many chunks, because the outcomes of a chunk come together."""
MAX_CHUNK_BYTES: Final = 4 << 20
"""Size of the rows from which on a chunk is full."""

MapOutcome = Reply | RequestError
"""The reply to a row, or why the row failed."""


class MapSettings(TypedDict, total=False):
    """Keyword arguments of `map`, which `Client.map` describes."""

    window: int
    rows_per_request: int | str
    timeout: float
    headers: Mapping[str, str] | None


def checked_settings(
    protocol: str,
    *,
    window: int = DEFAULT_WINDOW,
    rows_per_request: int | str = AUTO,
    timeout: float = DEFAULT_TOTAL_TIMEOUT,
    headers: Mapping[str, str] | None = None,
) -> RowSettings:
    """Return the settings that these arguments describe.  Raises `SettingError`."""
    if protocol != "X1":
        check_legacy(True, headers)
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_OUTSTANDING:
        raise SettingError(f"window is {window!r}; expected a number of requests from 1 to {MAX_OUTSTANDING}")
    headers = {} if headers is None else headers
    if not isinstance(headers, Mapping) or not all(isinstance(each, str) for pair in headers.items() for each in pair):
        raise SettingError(f"headers are {headers!r:.200}; expected a mapping of strings to strings")
    wire.encode_options({"headers": dict(headers)})
    rows = checked_rows_per_request(rows_per_request)
    return RowSettings(
        window=window, rows_per_request=rows, timeout=checked_timeout(timeout), headers=dict(headers) or None
    )


def outcomes(chunk: Chunk) -> Generator[MapOutcome, None, None]:
    """Yield the outcome of each row."""
    for outcome in chunk.outcomes:
        if isinstance(outcome, RequestError):
            yield outcome
        else:
            yield Reply((outcome,) if isinstance(outcome, bytes) else outcome, service=chunk.service, final=True)


class _Filling:
    """The chunk that is being filled."""

    def __init__(self, service: str, lookahead: Lookahead) -> None:
        self._service = service
        self._lookahead = lookahead
        self._rows: list[bytes] = []
        self._bytes = 0

    def add(self, row: bytes) -> Chunk | None:
        """Add a row.  Return the chunk if it is full."""
        if type(row) is not bytes:
            if not isinstance(row, bytes | bytearray | memoryview):
                raise SettingError(
                    f"a row is of type {type(row).__name__}: expected bytes, the only frame of a request"
                )
            row = bytes(row)
        self._rows.append(row)
        self._bytes += len(row)
        if CHUNKS_AHEAD * len(self._rows) < self._lookahead.rows and self._bytes < MAX_CHUNK_BYTES:
            return None
        return self.rest()

    def rest(self) -> Chunk:
        """Return the chunk as it is, and begin another one."""
        chunk = Chunk(self._service, self._rows)
        self._rows, self._bytes = [], 0
        return chunk


def chunks(service: str, rows: Iterable[bytes], lookahead: Lookahead) -> Generator[Chunk, None, None]:
    """Yield the rows in chunks, as they are needed."""
    if not isinstance(rows, Iterable):
        raise SettingError(f"rows is {rows!r:.100}: it must be a list or another iterable of bytes")
    filling = _Filling(service, lookahead)
    for row in rows:
        if (full := filling.add(row)) is not None:
            yield full
    yield filling.rest()


async def chunks_async(
    service: str, rows: Iterable[bytes] | AsyncIterable[bytes], lookahead: Lookahead
) -> AsyncGenerator[Chunk, None]:
    """Yield the rows in chunks, as they are needed."""
    if not isinstance(rows, AsyncIterable):
        for chunk in chunks(service, rows, lookahead):
            yield chunk
        return
    filling = _Filling(service, lookahead)
    async for row in rows:
        if (full := filling.add(row)) is not None:
            yield full
    yield filling.rest()

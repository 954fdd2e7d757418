"""The settings and rows of `Client.map` and `AsyncClient.map`."""

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Mapping
from typing import Any, Final, TypedDict

from ..mdp.codes import Code
from ..mdp.errors import SettingError
from .calls.arguments import DEFAULT_TOTAL_TIMEOUT, MAX_OUTSTANDING, check_legacy, checked_timeout
from .calls.ask import encode_options, in_group
from .calls.retry import Retry
from .rows import Row, RowSettings

RETRY: Final = Retry(attempts=1 << 30, codes={Code.QUEUE_FULL, Code.DRAINING}, backoff=0.05, max_backoff=1.0)
"""Rows that are refused for now are sent again until their timeout."""


class MapSettings(TypedDict, total=False):
    """Keyword arguments of `map`, which `Client.map` describes."""

    window: int | None
    timeout: float
    headers: Mapping[str, str] | None
    group: str


def checked_settings(
    protocol: str,
    *,
    window: int | None = None,
    timeout: float = DEFAULT_TOTAL_TIMEOUT,
    headers: Mapping[str, str] | None = None,
    group: str = "",
) -> RowSettings:
    """Return the settings that these arguments describe.  Raises `SettingError`."""
    if protocol != "X1":
        check_legacy(headers, group)
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_OUTSTANDING
    ):
        raise SettingError(f"window is {window!r}; expected a number of requests from 1 to {MAX_OUTSTANDING}")
    encode_options(in_group(None, group), headers, wait=True)
    return RowSettings(
        window=window,
        timeout=checked_timeout(timeout),
        headers=dict(headers) if headers else None,
        group=group,
        retry=RETRY if protocol == "X1" else None,
    )


def _row(service: str, row: Any) -> Row:
    if type(row) is not bytes:
        if not isinstance(row, bytes | bytearray | memoryview):
            raise SettingError(f"a row is of type {type(row).__name__}: expected bytes, the only frame of a request")
        row = bytes(row)
    return Row(service, row)


def rows_of(service: str, rows: Iterable[bytes]) -> Generator[Row, None, None]:
    """Yield the rows as they are needed.  Raises `SettingError`."""
    if not isinstance(rows, Iterable):
        raise SettingError(f"rows is {rows!r:.100}: it must be a list or another iterable of bytes")
    for row in rows:
        yield _row(service, row)


async def rows_of_async(service: str, rows: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncGenerator[Row, None]:
    """Yield the rows as they are needed.  Raises `SettingError`."""
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield _row(service, row)
    else:
        for each in rows_of(service, rows):
            yield each

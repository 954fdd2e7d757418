"""Rows that are returned together, and how many of them go into a request."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from ...mdp.errors import RequestError, SettingError
from ...mdp.limits import MAX_BODY_FRAMES

AUTO: Final = "auto"
MAX_PACKED_BYTES: Final = 4 << 20
"""Maximum size of the rows in one request.  Larger ones gain nothing, and their replies must fit in a message too."""
MAX_AUTO_ROWS: Final = MAX_BODY_FRAMES - 1
"""Maximum number of rows in an automatic pack: its reply has one more frame."""
WORK_SECONDS: Final = 0.01
"""How long a worker should work at a pack: a request costs it, the broker and the client about 0.1 ms in all."""
LONGEST_SECONDS: Final = 1.0
"""How long the request of such a pack may take, at most a tenth of the timeout: it waits in a queue."""
TARGET_SECONDS: Final = 0.1
"""How long the request of a pack should take if the worker does not say how long it has worked."""
MIN_PACKS: Final = 8
"""The default of `PackSize.min_packs`."""
MAX_GROWTH: Final = 8
"""By how much packs grow at a time."""

RowOutcome = bytes | list[bytes] | RequestError
"""The reply to a row, as its single frame or a list of several, or why the row failed."""


class Chunk:
    """Rows for one service that are returned together; `tag` is returned with them unchanged.

    With `keys`, one for each row, they are sent by the `Keyed` that belongs to the calls.
    """

    def __init__(self, service: str, rows: Sequence[bytes], tag: Any = None, keys: Sequence[str] = ()) -> None:
        self.service = service
        self.rows = rows
        self.tag = tag
        self.keys = keys
        self.size = sum(map(len, rows))
        """The bytes of the rows."""
        self.outcomes: list[RowOutcome] = []
        """One for each row, once the chunk is returned."""
        self.outcomes[:] = rows  # the places for the outcomes
        self.done: asyncio.Future[None] | None = None
        """Set while somebody waits for the rows."""
        self.missing = len(rows)
        """Rows without an outcome."""
        self.unsent = len(rows)
        """Rows that are in no request yet, the last ones."""

    def take(self, most: int) -> "Pack":
        """Return the next rows for one request: up to `most`, and not above `MAX_PACKED_BYTES` unless it is one."""
        start = len(self.rows) - self.unsent
        end = start + min(most, self.unsent)
        pack = Pack(self, start, end)
        if pack.size > MAX_PACKED_BYTES and end - start > 1:
            size, end = len(self.rows[start]), start + 1
            while size + len(self.rows[end]) <= MAX_PACKED_BYTES:
                size += len(self.rows[end])
                end += 1
            pack = Pack(self, start, end)
        self.unsent -= end - start
        return pack


class Pack:
    """Consecutive rows of a chunk that share a request."""

    __slots__ = ("chunk", "rows", "size", "start")

    def __init__(self, chunk: Chunk, start: int, end: int) -> None:
        self.chunk = chunk
        self.start = start
        self.rows = chunk.rows[start:end]
        self.size = sum(map(len, self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the rows, if they have any."""
        return self.chunk.keys[self.start : self.start + len(self.rows)]

    def part(self, start: int, end: int) -> "Pack":
        """Return some of the rows as a pack of their own."""
        return Pack(self.chunk, self.start + start, self.start + end)

    def settle(self, outcomes: Sequence[RowOutcome], at: int = 0) -> None:
        """Set the outcomes of rows, from the row `at` on."""
        chunk, start = self.chunk, self.start + at
        chunk.outcomes[start : start + len(outcomes)] = outcomes
        chunk.missing -= len(outcomes)
        if not chunk.missing and chunk.done is not None and not chunk.done.done():
            chunk.done.set_result(None)

    def fail(self, error: RequestError) -> None:
        """Set the same error as the outcome of all rows."""
        self.settle([error.with_traceback(None)] * len(self.rows))


class PackSize:
    """How many rows a request to one service should have.

    A single row asks whether the service's workers understand packs, unless that is known.  From then on, packs grow
    while they take less than half the target, and are halved if they take twice as long.

    Args:
        rows: the size to begin with.
        most: the maximum size.
        target: how long a request should take, in seconds, if its worker does not say how long it has worked.
        longest: how long it should take at most, if the worker says so; the target is then `WORK_SECONDS` of work.
        min_packs: so many requests are made before one waits for the rows that it lacks; the rows that are there are
            divided among them, so that several workers get some.
        understood: whether the workers understand packs; None if that is not known yet.
    """

    def __init__(
        self,
        *,
        rows: int = 1,
        most: int = MAX_AUTO_ROWS,
        target: float = TARGET_SECONDS,
        longest: float = LONGEST_SECONDS,
        min_packs: int = MIN_PACKS,
        understood: bool | None = None,
    ) -> None:
        self.rows = rows
        self.understood = understood
        self._most = most
        self._target = target
        self._longest = longest
        self._min_packs = min_packs

    def now(self, waiting: int, outstanding: int) -> int:
        """Return how many of the `waiting` rows to pack while so many requests are outstanding; 0 to wait for more."""
        free = self._min_packs - outstanding
        if free <= 0:
            return self.rows if waiting >= self.rows else 0
        return min(self.rows, -(-waiting // free))

    def replied(self, rows: int, seconds: float, worked: float | None = None, *, understood: bool = True) -> None:
        """Record that a request with this many rows was answered after `seconds`.

        Its worker says how long it has worked at them, if that is known, and has understood the pack or not.
        """
        self.understood = understood
        load = seconds / self._target if worked is None else max(worked / WORK_SECONDS, seconds / self._longest)
        if not understood:
            self.rows = 1
        elif load < 0.5 and rows == self.rows:
            growth = int(1 / max(load, 1 / MAX_GROWTH))
            self.rows = min(growth * self.rows, self._most)
        elif load > 2 and rows >= self.rows:
            self.rows = max(1, self.rows // 2)

    def failed(self) -> None:
        """Record that a request failed in a way that concerns all its rows."""
        self.rows = 1


def checked_rows_per_request(rows: object) -> int | None:
    """Return the number of rows in a request, or None for `AUTO`.  Raises `SettingError`."""
    if rows == AUTO:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_BODY_FRAMES:
        raise SettingError(
            f"rows_per_request is {rows!r}; expected {AUTO!r}, or 1 to {MAX_BODY_FRAMES}, the maximum number of frames "
            "in a request"
        )
    return rows

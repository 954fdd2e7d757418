"""How many rows go into a request: rows are packed as long as requests are answered quickly."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ...clients import SettingError
from ...workers.handling import MAX_BODY_FRAMES

AUTO: Final = "auto"
MAX_PACKED_BYTES: Final = 4 << 20
"""Maximum size of the rows in one request.  Larger ones gain nothing, and their replies must fit in a message too."""
MAX_AUTO_ROWS: Final = MAX_BODY_FRAMES - 1
"""Maximum number of rows in an automatic pack: its reply has one more frame."""
FIRST_KEYED_ROWS: Final = 16
"""Number of rows in the first requests to Titanic, which answers rows one by one and so need not be asked first."""
MAX_KEYED_ROWS: Final = 128
"""Maximum number of rows in a request to Titanic."""
TARGET_SECONDS: Final = 0.1
"""How long the request of a pack should take, at most a tenth of the timeout: the longer, the later a failure is seen,
and the more rows wait for the slowest."""
KEYED_TARGET_SECONDS: Final = 0.5
"""The same through Titanic, which commits to disk."""
MIN_PACKS: Final = 8
"""The rows that are waiting are divided among this many requests at least, so that several workers get some."""


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


NOT_SENT: Final = Answer()


class Chunk:
    """Rows that are returned together; `tag` is returned with them unchanged."""

    def __init__(self, rows: Sequence[Row], tag: Any = None) -> None:
        self.rows = rows
        self.tag = tag
        self.answers = [NOT_SENT] * len(rows)
        self.unsent = [index for index, row in enumerate(rows) if row.body is not None]
        """The rows that are in no request yet, the first one last."""
        self.unsent.reverse()
        self.remaining = len(self.unsent)
        """Rows without an answer."""
        self.done: Any = None
        """A future, if somebody waits for the rows."""

    def answer(self, index: int, answer: Answer) -> None:
        """Set the answer of a row."""
        self.answers[index] = answer
        self.remaining -= 1
        if not self.remaining and self.done is not None:
            self.done.set_result(None)

    def take(self, most: int) -> tuple[list[int], int]:
        """Return the indexes of the next rows for one request, and their size.

        They are up to `most` consecutive rows for the same service, none or all of them with keys.
        """
        rows, unsent = self.rows, self.unsent
        first = rows[unsent[-1]]
        pack: list[int] = []
        size = 0
        while unsent and len(pack) < most:
            row = rows[unsent[-1]]
            size += len(row.body or b"")
            if pack and (
                size > MAX_PACKED_BYTES
                or row.service != first.service
                or row.keyed != first.keyed
                or (row.keyed and (row.key is None or first.key is None))
            ):
                size -= len(row.body or b"")
                break
            pack.append(unsent.pop())
        return pack, size


Request: TypeAlias = tuple[Chunk, list[int], int]
"""A chunk, the indexes of the rows that share the request, and their size."""


class PackSize:
    """How many rows a request to one service should have.

    A single row asks whether the service's workers understand packs, which Titanic does.  From then on, packs double in
    size while requests take less than half the target, and are halved if they take twice as long.
    """

    def __init__(self, timeout: float, *, keyed: bool = False) -> None:
        self.rows = FIRST_KEYED_ROWS if keyed else 1
        self.understood: bool | None = True if keyed else None
        """Whether the workers understand packs; None if that is not known yet."""
        self._most = MAX_KEYED_ROWS if keyed else MAX_AUTO_ROWS
        self._target = min(KEYED_TARGET_SECONDS if keyed else TARGET_SECONDS, timeout / 10)

    def now(self, waiting: int) -> int:
        """Return how many rows to pack while this many are waiting."""
        return min(self.rows, max(1, waiting // MIN_PACKS))

    def replied(self, rows: int, seconds: float) -> None:
        """Record that a request with this many rows was answered."""
        if seconds < self._target / 2 and rows == self.rows:
            self.rows = min(2 * self.rows, self._most)
        elif seconds > 2 * self._target and rows >= self.rows:
            self.rows = max(1, self.rows // 2)

    def failed(self) -> None:
        """Record that a request failed in a way that concerns all its rows."""
        self.rows = 1


def check_rows_per_request(rows: object) -> int | None:
    """Return the number of rows in a request, or None for `AUTO`.  Raises `SettingError`."""
    if rows == AUTO:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_BODY_FRAMES:
        raise SettingError(
            f"rows_per_request is {rows!r}; expected {AUTO!r}, or 1 to {MAX_BODY_FRAMES}, the maximum number of frames "
            "in a request"
        )
    return rows

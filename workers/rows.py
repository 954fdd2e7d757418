"""Requests that pack several rows, and their replies: a reply or an error for each row.  See docs/reference/rows.md."""

import json
import time
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final

from ..mdp.codes import Code
from ..mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ..mdp.rows import OPTION, Failed, Outcome
from .request import Request

MAX_GROUP_BYTES: Final = 4 << 20
"""Replies of this size are sent on while further rows are worked on."""
MAX_GROUP_FRAMES: Final = MAX_BODY_FRAMES - 1
"""Maximum number of frames after a marker."""
_RAW_OPTION: Final = b'"rows"'
_IN_GROUP: Final[Outcome] = []
"""Stands for an outcome that is in a group already."""


def _of_pack(name: str, *, writable: bool = False) -> Any:
    """Return an attribute of rows that is the pack's."""

    def assign(row: "RowRequest", value: object) -> None:
        setattr(row._pack, name, value)

    return property(lambda row: getattr(row._pack, name), assign if writable else None)


class RowRequest(Request):
    """One row of a pack, as a request of its own: what a handler gets.

    There is one of these for every row, so it only refers to the pack, which has all the rest.
    """

    __slots__ = ("_pack",)

    def __init__(self, frame: bytes, pack: Request) -> None:
        list.__init__(self, (frame,))
        self._pack = pack

    service = _of_pack("service")
    address = _of_pack("address")
    deadline = _of_pack("deadline")
    cancelled = _of_pack("cancelled")
    _options = _of_pack("_options")
    _values = _of_pack("_values", writable=True)  # the options, once they are decoded
    _attempt = _of_pack("_attempt")


def is_pack(request: Request) -> bool:
    """Return whether each frame of `request` is a row, and its client understands a reply to each."""
    raw = request._options.raw
    return bool(raw) and _RAW_OPTION in raw and request.options.get(OPTION) == len(request)


class Pack:
    """The rows of a request, and the outcomes so far.

    A request of a client that does not pack is a pack that is not `marked`: of one row if there is a codec, else with a
    row for each frame.  Its reply has only frames, or is the failure of its first row that failed.
    """

    def __init__(self, request: Request, *, coded: bool = False) -> None:
        marked = is_pack(request)
        self._request = request
        self._one_row = coded and not marked
        self._began = time.perf_counter()
        self._start(1 if self._one_row else len(request), marked=marked)

    def _start(self, count: int, *, marked: bool = True) -> None:
        self.marked = marked
        self.groups: deque[list[bytes]] = deque()
        """Groups of replies that are ready to be sent as PARTIALs."""
        self._outcomes: list[Outcome | None] = [None] * count
        self._next = 0
        """The first row that is not in a group: its outcome, or that of a row before it, is missing."""
        self._group = _Group()

    def row(self, index: int) -> Request:
        """Return a row as a request of its own."""
        return self._request if self._one_row else RowRequest(self._request[index], self._request)

    def __iter__(self) -> Iterator[Request]:
        """Yield the rows, each made when it is needed."""
        if self._one_row:
            return iter((self._request,))
        return map(RowRequest, self._request, repeat(self._request))

    def record(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of a row."""
        outcomes = self._outcomes
        if index == self._next and self.marked and self._group.add(outcome):  # the most frequent
            outcomes[index] = _IN_GROUP
            self._next = index = index + 1
            if index == len(outcomes) or outcomes[index] is None:
                return
        else:
            outcomes[index] = outcome
        if not self.marked or index > self._next:
            return
        while self._next < len(self._outcomes):
            following = self._outcomes[self._next]
            if following is None:
                return
            if not self._group.add(following):
                self.groups.append(self._group.frames())
                self._group = _Group()
                self._group.add(following)
            self._outcomes[self._next] = _IN_GROUP
            self._next += 1

    def last(self) -> Outcome:
        """Return the end of the reply, once all outcomes are recorded and `groups` are sent."""
        if self.marked:
            return self._group.frames(time.perf_counter() - self._began)
        frames: list[bytes] = []
        for outcome in self._outcomes:
            if isinstance(outcome, Failed):
                return outcome
            frames += outcome or []
        return frames


class _Group:
    """Consecutive outcomes that are sent together, behind a marker."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        """How many frames reply to each row."""
        self._failed: dict[int, Failed] = {}
        self._frames: list[bytes] = []
        self._bytes = 0

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome.  Return False if the group is full, and it belongs into the next."""
        if type(outcome) is list and len(outcome) == 1:  # the most frequent
            size = self._bytes + len(outcome[0])
            if size <= MAX_GROUP_BYTES and len(self._frames) < MAX_GROUP_FRAMES:
                self._bytes = size
                self._counts.append(1)
                self._frames += outcome
                return True
        if isinstance(outcome, Failed):
            size = 100 + 6 * len(outcome.text)
            if self._counts and self._bytes + size > MAX_GROUP_BYTES:
                return False
            self._failed[len(self._counts)] = outcome
            self._counts.append(0)
            self._bytes += size
            return True
        size = sum(map(len, outcome))
        if size > MAX_BODY or len(outcome) > MAX_GROUP_FRAMES:
            text = f"the reply to the row has {size} bytes in {len(outcome)} frames, too many for a reply"
            return self.add(Failed(Code.TOO_LARGE, text))
        if self._counts and (
            self._bytes + size > MAX_GROUP_BYTES or len(self._frames) + len(outcome) > MAX_GROUP_FRAMES
        ):
            return False
        self._counts.append(len(outcome))
        self._frames += outcome
        self._bytes += size
        return True

    def frames(self, seconds: float | None = None) -> list[bytes]:
        """Return the marker and the frames of all replies; `seconds` is how long the worker has worked at the pack."""
        marker: dict[str, Any] = {OPTION: len(self._counts)}
        if seconds is not None:
            marker["ms"] = round(seconds * 1000, 3)
        if self._failed or len(self._frames) != len(self._counts) or 0 in self._counts:
            marker["frames"] = self._counts
        if self._failed:
            marker["failed"] = {
                str(index): [each.code, each.text, bool(each.detail)] for index, each in self._failed.items()
            }
        return [json.dumps(marker, separators=(",", ":")).encode(), *self._frames]

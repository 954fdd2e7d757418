"""Requests that have ended lately: the tails that follow them (`mmi.tail`), and the failures (`mmi.failures`).

A tail is a bounded list that its reader fetches by asking again.  It ends some seconds after it was asked for last, so
nothing has to be known about the reader, which may be at another broker.
"""

import json
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from ...wire.names import show
from ..core.service_metrics import OK

MAX_TAILS: Final = 10
"""Tails at the same time; one more ends the one that was asked for least recently."""
MAX_TAIL_ROWS: Final = 1000
"""Requests that a tail holds until they are fetched; further ones are counted."""
DEFAULT_LIMIT: Final = 100
"""Requests in a second that a tail holds, unless its reader asks for another number; further ones are counted."""
KEPT: Final = 10.0
"""Seconds after which a tail ends that is not asked for."""

MAX_FAILURES: Final = 50
"""Maximum number of failed requests that are remembered."""
MAX_AT_ONCE: Final = 10
"""Maximum number of failures of one turn that are remembered: a million requests may fail together."""
MAX_TEXT: Final = 200
"""Characters of a text that are remembered."""


class Tail:
    """The requests that have ended since one reader asked last."""

    __slots__ = ("asked", "failed", "left_out", "limit", "rows", "second", "service", "taken", "token")

    def __init__(self, limit: int, service: str, failed: bool, now: float) -> None:
        self.token = secrets.token_hex(8)
        self.limit = limit
        self.service = service
        """The service whose requests it shows; empty for all."""
        self.failed = failed
        """Whether requests that succeeded are left out."""
        self.asked = now
        """When it was asked for last."""
        self.rows: list[dict[str, Any]] = []
        self.left_out = 0
        """Number of further requests that have ended."""
        self.second = now
        """When the current second began."""
        self.taken = 0
        """Rows in this second."""

    def append(self, row: dict[str, Any]) -> None:
        """Add a request."""
        self.rows.append(row)


class Tails:
    """All tails."""

    def __init__(self) -> None:
        self._tails: dict[str, Tail] = {}
        """The tails by token, in the order in which they were asked for."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._tails)

    def tidy(self, now: float) -> None:
        """Forget those that were not asked for lately."""
        while self._tails:
            oldest = next(iter(self._tails.values()))
            if now - oldest.asked <= KEPT:
                return
            del self._tails[oldest.token]

    def wanting(self, name: bytes, outcome: str, now: float) -> Iterator[Tail]:
        """Yield the tails that take a request that has ended now; those that have enough of them count it."""
        for tail in self._tails.values():
            if (tail.failed and outcome == OK) or (tail.service and tail.service != show(name)):
                continue
            if now - tail.second >= 1.0:
                tail.second, tail.taken = now, 0
            if tail.taken >= tail.limit or len(tail.rows) >= MAX_TAIL_ROWS:
                tail.left_out += 1
            else:
                tail.taken += 1
                yield tail

    def answer(self, asked: bytes, now: float) -> dict[str, Any] | None:
        """Return the rows of the tail named in `asked`, or begin another; None if the question is malformed."""
        options = _parse(asked)
        if options is None:
            return None
        self.tidy(now)
        tail = self._tails.pop(options["tail"], None)
        if tail is None:
            tail = Tail(options["limit"], options["service"], options["failed"], now)
            while len(self._tails) >= MAX_TAILS:
                del self._tails[next(iter(self._tails))]
        self._tails[tail.token] = tail
        tail.asked = now
        rows, tail.rows = tail.rows, []
        left_out, tail.left_out = tail.left_out, 0
        return {
            "tail": tail.token,
            "requests": [_with_age(row, now) for row in rows],
            "left_out": left_out,
        }


class Failures:
    """The latest failures, the newest first."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MAX_FAILURES)
        self._turn_at = 0.0
        self._taken = 0
        """Number of requests that failed in the turn at `_turn_at`."""

    def take(self, now: float) -> bool:
        """Return whether to remember one more request that has failed now."""
        if now != self._turn_at:
            self._turn_at, self._taken = now, 0
        self._taken += 1
        return self._taken <= MAX_AT_ONCE

    def add(self, row: dict[str, Any], text: str, now: float) -> None:
        """Remember a request that has failed."""
        self._rows.appendleft((now, {**row, "text": text[:MAX_TEXT]}))

    def answer(self, service: str, now: float) -> dict[str, Any]:
        """Return those of a service, or all if the name is empty."""
        return {
            "failures": [
                {**row, "ago_seconds": round(now - at, 3)}
                for at, row in self._rows
                if not service or row["service"] == service
            ]
        }


def _with_age(row: dict[str, Any], now: float) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if name != "ended"}
    shown["ago_seconds"] = round(now - row["ended"], 3)
    return shown


def _parse(asked: bytes) -> dict[str, Any] | None:
    """Return the options of a question, with their defaults; None if they are malformed."""
    options: dict[str, Any] = {"tail": "", "limit": DEFAULT_LIMIT, "service": "", "failed": False}
    if not asked:
        return options
    try:
        given = json.loads(asked)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    for name, default in list(options.items()):
        options[name] = given.get(name, default)
        if type(options[name]) is not type(default):
            return None
    return options if 0 < options["limit"] <= MAX_TAIL_ROWS else None

"""Several requests with keys in one request to `titanic.request`, which waits for their replies.

The caller sends `service (key body)+` with the option `rows`, the number of pairs, and options that apply to all.  The
reply is that to a pack (docs/reference/rows.md), but may cover only the first rows: the caller asks again for the
others, which is safe because each has a key.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..mdp.codes import Code
from ..mdp.rows import OPTION, Failed, Outcome
from ..workers import Request
from ..workers.rows import Pack
from . import store
from .frames import pack, unpack
from .submission import OPTIONS, MalformedRequest, Submission, parse_submission
from .uuids import new_uuid

MIN_ANSWER_SECONDS: Final = 0.1
MAX_ANSWER_SECONDS: Final = 1.0
"""How long before a request's deadline it is answered, with 408 for each row without a reply: a tenth of its time, but
at least and at most this long."""
NO_REPLY: Final = Failed(
    Code.TIME_PASSED, "no reply in time; the request continues, and the same key returns its reply later"
)


def asks_for_rows(request: Request) -> bool:
    """Return whether a request to `titanic.request` has several rows."""
    return bool(request._options.raw) and OPTION in request.options


def parse_rows(
    frames: Sequence[bytes], options: Mapping[str, Any], now: float, owner: str
) -> list[Submission | Failed]:
    """Return the submission for each row, or the failure of a row that breaks a rule.

    Raises:
        MalformedRequest: The whole request breaks a rule.
    """
    rows = options[OPTION]
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1 or len(frames) != 1 + 2 * rows:
        raise MalformedRequest("rows must be the number of pairs of key and body after the service's name")
    if "key" in options or "uuid" in options:
        raise MalformedRequest("with rows, each row has its own key")
    shared = {name: value for name, value in options.items() if name not in {OPTION, "wait"}}
    first = parse_submission((frames[0], b""), {**shared, "key": "k"}, now, owner)  # checks what applies to all rows
    others: list[Any]
    _, service, _, created, due, _, *others = first
    parsed: list[Submission | Failed] = []
    for key, body in zip(frames[1::2], frames[2::2], strict=True):
        try:
            text = OPTIONS["key"].from_wire("key", key.decode(errors="surrogateescape"))
            parsed.append(Submission(new_uuid(), service, pack((body,)), created, due, text, *others))
        except MalformedRequest as error:
            parsed.append(Failed(Code.MALFORMED, str(error)))
    return parsed


def outcome_of(found: store.Fetched | None) -> Outcome | None:
    """Return the outcome of a row whose request is in this state; None if it has not ended."""
    if found is None:
        return Failed(Code.FAILED, "the request was closed, or its result has expired, while its key is remembered")
    return ended_as(found) if found.ended else None


def ended_as(ended: store.Fetched | store.Outcome) -> Outcome:
    """Return the outcome of a row whose request has ended."""
    return unpack(ended.reply or b"") if ended.code is None else Failed(ended.code, ended.error or "", (b"",))


def remaining_seconds(request: Request) -> float | None:
    """Return how long to wait for the rows of `request`; None without a limit."""
    if request.deadline is None:
        return None
    left = request.deadline - time.monotonic()
    return max(0.0, left - min(max(left / 10, MIN_ANSWER_SECONDS), MAX_ANSWER_SECONDS))


class RowReplies(Pack):
    """The reply to several rows."""

    def __init__(self, count: int) -> None:
        self.missing = count
        self._start(count)

    def put(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of a row."""
        self.missing -= 1
        self.record(index, outcome)

    def fill(self) -> None:
        """Record that the others have no reply."""
        for index, outcome in enumerate(self._outcomes):
            if outcome is None:
                self.record(index, NO_REPLY)

    def frames(self) -> list[bytes]:
        """Return the reply: to all rows, or to as many as it can hold."""
        return self.groups[0] if self.groups else self._group.frames()

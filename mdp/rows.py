"""Packs of rows on the wire, as clients and workers know them: see "Rows" in docs/reference/x1.md."""

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

OPTION: Final = "rows"
"""The option of a request that says how many rows it packs."""
_MARKER: Final = b'{"rows":'
_PLAIN: Final = re.compile(rb'\{"rows":(\d{1,9})(?:,"ms":\d{1,9}(?:\.\d{1,9})?)?\}')
"""The marker of a group in which a single frame replies to each row."""
_WORKED: Final = re.compile(rb'\{"rows":\d{1,9},"ms":(\d{1,9}(?:\.\d{1,9})?)[,}]')


class Failed(NamedTuple):
    """A failure, as a worker reports it to the client."""

    code: int
    text: str
    detail: tuple[bytes, ...] = ()


Outcome = list[bytes] | Failed
"""The frames that reply to a row, or its failure."""


def is_plain(reply: Sequence[bytes], count: int) -> bool:
    """Return whether a pack of `count` rows has a single frame for each, after a marker.  This is the usual reply."""
    marker = _PLAIN.fullmatch(reply[0]) if len(reply) == count + 1 else None
    return marker is not None and int(marker[1]) == count


def worked_seconds(reply: Sequence[bytes]) -> float | None:
    """Return how long the worker has worked at the rows of a pack, if it says so."""
    worked = _WORKED.match(reply[0]) if reply else None
    return None if worked is None else float(worked[1]) / 1000


def read_reply(reply: Sequence[bytes], count: int, *, partly: bool = False) -> list[Outcome] | None:
    """Return the outcomes of the `count` rows of a pack; `partly`, of its first rows.

    None if the worker does not understand packs.
    """
    if is_plain(reply, count):
        return [[frame] for frame in reply[1:]]
    outcomes: list[Outcome] = []
    at = 0
    while at < len(reply):
        if not reply[at].startswith(_MARKER):
            return None
        try:
            marker = json.loads(reply[at])
            rows, failures = marker[OPTION], marker.get("failed", {})
            counts = marker.get("frames") or [1] * rows
            if len(counts) != rows or not all(type(each) is int and each >= 0 for each in counts):
                return None
            at += 1
            for index, size in enumerate(counts):
                failure = failures.get(str(index))
                if failure is None:
                    outcomes.append(list(reply[at : at + size]))
                else:
                    code, text, own = failure
                    outcomes.append(Failed(int(code), str(text), (b"",) if own else ()))
                at += size
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
    complete = len(outcomes) == count or (partly and 0 < len(outcomes) < count)
    return outcomes if complete and at == len(reply) else None

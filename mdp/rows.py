"""Packs of rows on the wire, as clients and workers know them: see "Rows" in docs/x1.md."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

OPTION: Final = "rows"
"""The option of a request that says how many rows it packs."""
_MARKER: Final = b'{"rows":'


class Failed(NamedTuple):
    """A failure, as a worker reports it to the client."""

    code: int
    text: str
    detail: tuple[bytes, ...] = ()


Outcome = list[bytes] | Failed
"""The frames that reply to a row, or its failure."""


@lru_cache(maxsize=2048)
def plain_marker(rows: int) -> bytes:
    """Return the marker of a group in which a single frame replies to each row."""
    return b'{"rows":%d}' % rows


def read_reply(reply: Sequence[bytes], count: int, *, partly: bool = False) -> list[Outcome] | None:
    """Return the outcomes of the `count` rows of a pack; `partly`, of its first rows.

    None if the worker does not understand packs.
    """
    if len(reply) == count + 1 and reply[0] == plain_marker(count):  # the most frequent
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

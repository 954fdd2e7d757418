"""Which type a reply has: what the header Accept prefers (RFC 9110, 12.5.1) of what there is."""

import re
from collections.abc import Sequence
from typing import Final

from ....mdp.http.problems import Problem

MEDIA_TYPE: Final = re.compile(rb"[\w.+!#$&^-]+/[\w.+!#$&^-]+", re.ASCII)
_QUALITY: Final = re.compile(rb"q\s*=\s*([01](?:\.\d{0,3})?)", re.IGNORECASE)


def preferred(accept: bytes, offered: Sequence[bytes], *more: bytes) -> bytes:
    """Return the type that a client prefers; of several that it likes equally, the first of `offered`.

    Raises `Problem` 406 if it accepts none of them; that also names `more`, types that are had otherwise.
    """
    wanted: dict[bytes, float] = {}
    for each in accept.lower().split(b","):
        kind, *parameters = map(bytes.strip, each.split(b";"))
        quality = next((float(found[1]) for one in parameters if (found := _QUALITY.fullmatch(one))), 1.0)
        wanted[kind] = max(min(quality, 1.0), wanted.get(kind, 0.0))
    best = max(offered, key=lambda kind: _quality(kind, wanted), default=b"")
    if not best or not _quality(best, wanted):
        had = ", ".join(each.decode() for each in (*offered, *more))
        text = f"the Accept of the request is {accept[:200].decode('latin-1')!r}, but the service replies with: {had}"
        raise Problem("not-acceptable", text)
    return best


def _quality(kind: bytes, wanted: dict[bytes, float]) -> float:
    """Return the quality of a type: that of the most specific range that it is in."""
    for each in (kind, kind.partition(b"/")[0] + b"/*", b"*/*"):
        if each in wanted:
            return wanted[each]
    return 0.0

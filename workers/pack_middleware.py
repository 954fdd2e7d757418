"""Middleware around packs of rows: called once for each pack, where a handler is called for each row."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..mdp.codes import Code
from ..mdp.rows import Failed
from .request import Request
from .rows import Pack


class PackMiddleware(NamedTuple):
    """What surrounds a pack of rows, and what handles each row within.

    `around` is called with the pack and with a function that handles its rows, and returns nothing; a coroutine
    function's returns a coroutine.  If `around` raises before it calls that, all rows fail.
    """

    around: Callable[[Request, Callable[[Request], Any]], Any]
    row_handler: Any


NOT_CALLED = Failed(
    Code.FAILED, "middleware did not call call_next for a pack of rows: for these it calls that, or raises"
)


def failed_pack(request: Request, failure: Failed) -> Pack:
    """Return a pack of which each row has failed."""
    pack = Pack(request)
    for index in range(len(request)):
        pack.record(index, failure)
    return pack

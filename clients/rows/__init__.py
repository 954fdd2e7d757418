"""Send many rows to a service, packed into few requests: the engine of `Client.map` and `AsyncClient.map`."""

from .calls import Caller, Keyed, RowCalls, RowSettings
from .lookahead import Lookahead, answer_chunks, answer_chunks_async
from .packs import AUTO, MAX_AUTO_ROWS, Chunk, PackSize, RowOutcome, checked_rows_per_request

__all__ = [
    "AUTO",
    "MAX_AUTO_ROWS",
    "Caller",
    "Chunk",
    "Keyed",
    "Lookahead",
    "PackSize",
    "RowCalls",
    "RowOutcome",
    "RowSettings",
    "answer_chunks",
    "answer_chunks_async",
    "checked_rows_per_request",
]

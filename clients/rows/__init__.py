"""Send many rows to a service, one request for each: the engine of `Client.map` and `AsyncClient.map`."""

from .row_calls import Caller, Connect, Keyed, Route, Row, RowOutcome, RowSettings, answer_rows, answer_rows_async

__all__ = [
    "Caller",
    "Connect",
    "Keyed",
    "Route",
    "Row",
    "RowOutcome",
    "RowSettings",
    "answer_rows",
    "answer_rows_async",
]

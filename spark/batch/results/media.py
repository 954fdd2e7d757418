"""Replies for programs that know only HTTP: rows in the type that they accept.

The HTTP gateway finds `ABOUT` in the workers' description of a service, and sends the type that its caller prefers as
the header `accept`.  The FINAL is then one frame of that type: JSON has rows as objects, or the value that a job
returned, and lines of JSON are the events, the last of which is the result:

    {"event": "result", …the description of the result…, "data": rows, the value, or null if `path` is set}
"""

import json
from typing import TYPE_CHECKING, Any, Final

from ....mdp.errors import ServiceError
from ....workers import Request
from ...client.sql_values import plain
from ..failures import UNPROCESSABLE, unprocessable

if TYPE_CHECKING:
    import pyarrow as pa

JSON: Final = "application/json"
_LINES: Final = ("application/x-ndjson", "application/jsonl")
MEDIA_TYPES: Final = {
    JSON: "json",
    "text/csv": "csv",
    "application/vnd.apache.arrow.stream": "arrow",
    **dict.fromkeys(_LINES, "json"),
}
"""The types, and the format of the rows in each."""
ABOUT: Final[dict[str, Any]] = {"media_types": [*MEDIA_TYPES]}
"""Sent by the workers as the description of their services."""


def media_type_of(request: Request) -> str | None:
    """Return the type that the caller wants, or None.  Raises `ServiceError` 422 for an unknown type."""
    kind = request.headers.get("accept")
    if kind is not None and kind not in MEDIA_TYPES:
        raise unprocessable(f"the header accept is {kind[:100]!r}; expected one of {', '.join(MEDIA_TYPES)}")
    return kind


def rendered(kind: str, result: list[bytes]) -> list[bytes]:
    """Return the frames of a FINAL with a result in the type `kind`.

    Raises `ServiceError` 422 if it is too large or a value that is not JSON's; the detail has the description of the
    result, or the value.
    """
    description, data = result
    if kind in _LINES:
        return [b'{"event": "result", %b, "data": %b}' % (description[1:-1], data or b"null")]
    described = json.loads(description)
    job = described["job"]
    if described["path"] is not None:
        text = f"the result of job {job} is too large for a reply; fetch it with: mdp-spark fetch {job} --format csv"
        raise ServiceError(UNPROCESSABLE, text, description)
    if described["format"] == "value" and kind != JSON:
        text = f"job {job} has run, and returned a value instead of rows, which is in the data: accept {JSON}"
        raise ServiceError(UNPROCESSABLE, text, data)
    return [data]


def csv_rows(rows: "pa.Table | pa.RecordBatch", *, header: bool = True) -> bytes:
    """Return rows as CSV.  Raises what PyArrow raises for columns that CSV cannot represent."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.csv  # noqa: PLC0415

    for at, each in enumerate(rows.schema):
        if pa.types.is_duration(each.type) or pa.types.is_binary(each.type):  # as in JSON
            texts = pa.array(map(plain, rows.column(at).to_pylist()), pa.string())
            rows = rows.set_column(at, each.name, texts)
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(rows, sink, pyarrow.csv.WriteOptions(include_header=header))
    return bytes(sink.getvalue())

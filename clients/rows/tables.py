"""Call services whose handlers take and return Arrow data.  Needs pyarrow.

Each request carries a slice of a batch as a frame of Arrow's IPC stream format (codec `arrow`), and the reply must have
as many rows.  No row becomes a Python object.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ...mdp.codecs import Coder
from ...mdp.codes import Code
from ...mdp.errors import SettingError, ZmdpError
from ...mdp.limits import check_number
from .arrow import OK, Outcome, answer
from .row_calls import Connect, Row, RowSettings, answer_rows

ARROW: Final = "arrow"
"""The name of the codec."""
MAX_SLICE_ROWS: Final = 5000
MAX_SLICE_BYTES: Final = 1 << 20
"""A request has no more rows than this, and about this size at most, unless `rows_per_request` is given."""
WINDOW: Final = 16
"""Outstanding requests, unless `window` is given: each has the rows of thousands of others."""
ERROR: Final = "error"
"""The name of a second column of replies: NULL, or why the row failed."""


def map_tables(
    batches: Iterable[pa.RecordBatch],
    service: str,
    added: Sequence[str],
    settings: RowSettings,
    connect: Connect,
    name: str | None,
    kind: pa.DataType,
    rows_per_request: int | None,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches with three more columns: replies of the type `kind`, code and error, named `added`.

    The last column of each batch is what to send, and is left out: it is sent under this `name`, or without one it is
    a struct of all columns.  There is a batch for each request.
    """
    coder = Coder(ARROW)

    def slices() -> Iterator[Row]:
        for batch in batches:
            if not batch.num_rows:
                continue
            column = batch.columns[-1]
            sent = pa.RecordBatch.from_struct_array(column) if name is None else pa.record_batch([column], [name])
            rows = rows_per_request or _slice_rows(sent.nbytes / sent.num_rows)
            for start in range(0, batch.num_rows, rows):
                yield Row(service, coder.encode(sent.slice(start, rows))[0], tag=batch.slice(start, rows))

    settings = replace(settings, window=settings.window or WINDOW)
    with closing(answer_rows(slices(), settings, connect)) as answered:
        for row in answered:
            batch = row.tag
            columns = _columns(coder, row.outcome, batch.num_rows, kind)
            yield pa.RecordBatch.from_arrays([*batch.columns[:-1], *columns], [*batch.schema.names[:-1], *added])


def check_rows_per_request(rows: Any, codec: str | None) -> None:
    """Raise `SettingError` unless `rows` is None or, for tables, a number."""
    if rows is None:
        return
    if codec is None:
        raise SettingError(f"rows_per_request is {rows!r}, but without codec='arrow' each row is a request")
    check_number("rows_per_request", rows, whole=True)
    if rows < 1:
        raise SettingError(f"rows_per_request is {rows!r}; it must be 1 or more")


def _slice_rows(row_bytes: float) -> int:
    return max(1, min(MAX_SLICE_ROWS, int(MAX_SLICE_BYTES / max(row_bytes, 1))))


def _columns(coder: Coder, outcome: Outcome, count: int, kind: pa.DataType) -> list[pa.Array]:
    """Return reply, code and error of the rows of a request, as arrays."""
    reply, code, error = answer(outcome, "frames")
    if code == OK:
        try:
            return _read_reply(coder.decode(reply), count, kind)  # type: ignore[arg-type]  # it is a list of frames
        except (ZmdpError, ValueError, TypeError, pa.ArrowException) as wrong:
            code, error = Code.FAILED, f"the reply cannot be used: {wrong}"
    return [pa.nulls(count, kind), pa.repeat(pa.scalar(code, pa.int32()), count), pa.repeat(pa.scalar(error), count)]


def _read_reply(table: pa.Table | None, count: int, kind: pa.DataType) -> list[pa.Array]:
    if table is None or table.num_rows != count or not table.num_columns:
        shape = "nothing" if table is None else f"{table.num_rows} rows of {table.num_columns} columns"
        raise ValueError(f"it has {shape}, for {count} rows")
    replies = table.column(0).cast(kind).combine_chunks()
    if ERROR not in table.column_names[1:]:
        return [replies, pa.repeat(pa.scalar(OK, pa.int32()), count), pa.nulls(count, pa.string())]
    errors = table.column(ERROR).cast(pa.string()).combine_chunks()
    failed = pc.is_valid(errors)
    codes = pc.if_else(failed, pa.scalar(int(Code.FAILED), pa.int32()), pa.scalar(OK, pa.int32()))
    return [pc.if_else(failed, pa.scalar(None, kind), replies), codes, errors]

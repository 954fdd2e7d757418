"""Call services whose handlers take and return Arrow data.  Needs pyarrow.

Each request carries a slice of a batch as a frame of Arrow's IPC stream format (codec `arrow`), and the reply must have
as many rows.  No row becomes a Python object.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from ...mdp.codecs import Coder
from ...mdp.codes import Code
from ...mdp.errors import ZmdpError
from .arrow import OK, answer
from .calls import RowSettings
from .lookahead import Connect, Lookahead, answer_chunks
from .packs import Chunk, RowOutcome

ARROW: Final = "arrow"
"""The name of the codec."""
MAX_SLICE_ROWS: Final = 5000
MAX_SLICE_BYTES: Final = 1 << 20
"""A request has no more rows than this, and about this size at most, unless `rows_per_request` is given."""
MAX_AHEAD: Final = 16
"""Requests whose replies may wait for that of an earlier one."""
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
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches with three more columns: replies of the type `kind`, code and error, named `added`.

    The last column of each batch is what to send, and is left out: it is sent under this `name`, or without one it is
    a struct of all columns.
    """
    coder = Coder(ARROW)

    def chunks() -> Iterator[Chunk]:
        for batch in batches:
            if not batch.num_rows:
                continue
            column = batch.columns[-1]
            sent = pa.RecordBatch.from_struct_array(column) if name is None else pa.record_batch([column], [name])
            rows = settings.rows_per_request or _slice_rows(sent.nbytes / sent.num_rows)
            slices = [sent.slice(start, rows) for start in range(0, sent.num_rows, rows)]
            requests = [coder.encode(each)[0] for each in slices]
            yield Chunk(service, requests, (batch, [each.num_rows for each in slices]))

    each_alone = replace(settings, rows_per_request=1)
    lookahead = Lookahead(each_alone, most=min(settings.window, MAX_AHEAD))
    with closing(answer_chunks(chunks(), each_alone, connect, lookahead)) as replies:
        for chunk in replies:
            batch, counts = chunk.tag
            slices = [_columns(coder, reply, count, kind) for reply, count in zip(chunk.outcomes, counts, strict=True)]
            columns = [pa.concat_arrays(parts) for parts in zip(*slices, strict=True)]
            names = [*batch.schema.names[:-1], *added]
            yield pa.RecordBatch.from_arrays([*batch.columns[:-1], *columns], names)


def _slice_rows(row_bytes: float) -> int:
    return max(1, min(MAX_SLICE_ROWS, int(MAX_SLICE_BYTES / max(row_bytes, 1))))


def _columns(coder: Coder, outcome: RowOutcome, count: int, kind: pa.DataType) -> list[pa.Array]:
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

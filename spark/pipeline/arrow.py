"""Call services whose handlers take and return Arrow data.  Runs on executors.

Each request carries a slice of a partition as a frame of Arrow's IPC stream format (codec `arrow`), and the reply must
have as many rows.  No row becomes a Python object.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from ...clients import ZmdpError
from ...clients.rows import Chunk, Lookahead, RowOutcome, answer_chunks
from ...mdp.codecs import Coder
from ...mdp.codes import Code
from ..python_workers import exempt_imports_from_collection
from .batches import OK, answer
from .settings import CallSettings

MAX_SLICE_ROWS: Final = 5000
MAX_SLICE_BYTES: Final = 1 << 20
"""A request has no more rows than this, and about this size at most, unless `rows_per_request` is given."""
MAX_AHEAD: Final = 16
"""Requests whose replies may wait for that of an earlier one."""
ERROR: Final = "error"
"""The name of a second column of replies: NULL, or why the row failed."""


def call_arrow(
    batches: Iterator[Any], service: str, added: Sequence[str], settings: CallSettings, name: str | None, kind: Any
) -> Iterator[Any]:
    """Yield Arrow record batches with replies of the type `kind`.

    The last column of each batch is what to send: under this `name`, or without one it is a struct of all columns.
    """
    import pyarrow as pa  # noqa: PLC0415 - optional on the driver

    coder = Coder("arrow")

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
    with closing(answer_chunks(chunks(), each_alone, settings.connect, lookahead)) as replies:
        for chunk in replies:
            batch, counts = chunk.tag
            slices = [_columns(coder, reply, count, kind) for reply, count in zip(chunk.outcomes, counts, strict=True)]
            columns = [pa.concat_arrays(parts) for parts in zip(*slices, strict=True)]
            names = [*batch.schema.names[:-1], *added]
            yield pa.RecordBatch.from_arrays([*batch.columns[:-1], *columns], names)
    exempt_imports_from_collection()


def _slice_rows(row_bytes: float) -> int:
    return max(1, min(MAX_SLICE_ROWS, int(MAX_SLICE_BYTES / max(row_bytes, 1))))


def _columns(coder: Coder, outcome: RowOutcome, count: int, kind: Any) -> list[Any]:
    """Return reply, code and error of the rows of a request, as arrays."""
    import pyarrow as pa  # noqa: PLC0415

    reply, code, error = answer(outcome, "frames")
    if code == OK:
        try:
            return _read_reply(coder.decode(reply), count, kind)  # type: ignore[arg-type]  # it is a list of frames
        except (ZmdpError, ValueError, TypeError, pa.ArrowException) as wrong:
            code, error = Code.FAILED, f"the reply cannot be used: {wrong}"
    return [pa.nulls(count, kind), pa.repeat(pa.scalar(code, pa.int32()), count), pa.repeat(pa.scalar(error), count)]


def _read_reply(table: Any, count: int, kind: Any) -> list[Any]:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

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

"""Send the rows of Arrow batches, and make columns of the replies: the engine of `Client.map_arrow`.  Needs pyarrow.

A row is a frame.  With the codec `arrow`, for services whose handlers take and return Arrow data, a request carries a
slice of a batch, as a frame of Arrow's IPC stream format, and the reply must have as many rows.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ...mdp.codecs import Coder
from ...mdp.codes import Code
from ...mdp.errors import RequestError, RequestRejected, RequestTimeout, ServiceNotFound, SettingError, ZmdpError
from ...mdp.limits import check_number
from .row_calls import Connect, Route, Row, RowOutcome, RowSettings, answer_rows

MIN_BATCH_ROWS: Final = 256
"""The first batch that is yielded has no more rows; each following one may have twice as many."""
MAX_BATCH_ROWS: Final = 16_384
MAX_BATCH_BYTES: Final = 64 << 20
"""A batch whose rows, or whose replies, are more or larger is divided, since its rows are in memory twice."""
OK: Final = 200
"""The code of a row that has its reply, as in Titanic."""
RESULTS: Final = {"string": pa.string(), "binary": pa.binary(), "frames": pa.list_(pa.binary())}
"""The types of the column of replies: the only frame, as text or as bytes, or all frames."""
ARROW: Final = "arrow"
"""The name of the codec."""
MAX_SLICE_ROWS: Final = 5000
MAX_SLICE_BYTES: Final = 1 << 20
"""A request has no more rows than this, and about this size at most, unless `rows_per_request` is given."""
WINDOW: Final = 16
"""Outstanding requests, unless `window` is given: each has the rows of thousands of others."""
ERROR: Final = "error"
"""The name of a second column of replies: NULL, or why the row failed."""

Outcome = RowOutcome | None
"""None if the row was not sent."""
Columns = Callable[[Sequence[Outcome]], list[pa.Array]]
"""Makes reply, code and error of rows, as arrays."""


# ── arguments ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_result(result: str) -> None:
    """Raise `SettingError` unless `result` is one of `RESULTS`."""
    if result not in list(RESULTS):
        raise SettingError(f"result is {result!r}; expected one of {', '.join(RESULTS)}")


def added_names(output: str, columns: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Return the names of the added columns: those of the reply, its code and the error.

    Raises `SettingError` if one of the `columns` has such a name; names are equal if `fold` makes them equal.
    """
    if not isinstance(output, str) or not output:
        raise SettingError(f"output is {output!r}; expected the name of a column")
    added = [output, f"{output}_code", f"{output}_error"]
    taken = set(map(fold, columns))
    clashes = [name for name in added if fold(name) in taken]
    if clashes:
        raise SettingError(f"column {clashes[0]!r} already exists; choose another output than {output!r}")
    return added


def check_rows_per_request(rows: Any, codec: str | None) -> None:
    """Raise `SettingError` unless `rows` is None or, for tables, a number."""
    if rows is None:
        return
    if codec is None:
        raise SettingError(f"rows_per_request is {rows!r}, but without codec='arrow' each row is a request")
    check_number("rows_per_request", rows, whole=True)
    if rows < 1:
        raise SettingError(f"rows_per_request is {rows!r}; it must be 1 or more")


def _reply_type(result: str | pa.DataType, codec: str | None) -> pa.DataType:
    if codec is None:
        check_result(result)
        return RESULTS[result]
    if codec != ARROW:
        raise SettingError(f"codec is {codec!r}; expected {ARROW!r}, or None for a frame per row")
    try:
        kind = pa.type_for_alias(result) if isinstance(result, str) else result
    except ValueError:
        kind = None
    if not isinstance(kind, pa.DataType):
        raise SettingError(f"result is {result!r}; expected a pyarrow.DataType or the name of one")
    return kind


def _check_input(schema: pa.Schema, selected: str | Sequence[str], codec: str | None) -> None:
    several = codec is not None and isinstance(selected, list | tuple) and len(selected) > 0
    names = list(selected) if several else [selected]
    if not all(isinstance(name, str) for name in names):
        expected = "the name of a column, or a list of names with codec='arrow'"
        raise SettingError(f"input is {selected!r}; expected {expected}")
    for name in names:
        count = schema.names.count(name)
        if count != 1:
            found = f"{count} columns {name!r}" if count else f"no column {name!r}, only {', '.join(schema.names)}"
            raise SettingError(f"input is {selected!r}, but the data has {found}")
    if codec is None:
        kind = schema.field(names[0]).type
        try:
            pa.nulls(0, kind).cast(pa.binary())
        except pa.ArrowNotImplementedError:
            raise SettingError(
                f"input is {selected!r}, of type {kind}; expected strings or bytes: cast it, or use codec='arrow'"
            ) from None


# ── map_arrow ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def map_arrow(
    service: str,
    data: Any,
    selected: str | Sequence[str],
    output: str,
    codec: str | None,
    result: str | pa.DataType,
    rows_per_request: int | None,
    settings: RowSettings,
    connect: Connect,
) -> Generator[pa.RecordBatch, None, None]:
    """Return the batches of `data` with the replies; `selected` is the `input` of `Client.map_arrow`.

    Raises `SettingError` if an argument is invalid.
    """
    kind = _reply_type(result, codec)
    check_rows_per_request(rows_per_request, codec)
    if not hasattr(data, "__arrow_c_stream__"):
        raise SettingError(f"data is of type {type(data).__name__}; expected Arrow data, such as a pyarrow.Table")
    reader = pa.RecordBatchReader.from_stream(data)
    added = added_names(output, reader.schema.names)
    _check_input(reader.schema, selected, codec)
    schema = reader.schema
    for name, type_ in zip(added, (kind, pa.int32(), pa.string()), strict=True):
        schema = schema.append(pa.field(name, type_))

    batches = _with_input(reader, selected)
    if codec is None:
        mapped = map_rows(batches, service, added, settings, connect, result=result)
    else:
        sent_as = selected if isinstance(selected, str) else None
        mapped = map_tables(batches, service, added, settings, connect, sent_as, kind, rows_per_request)
    return _yielded(mapped, schema, reader)


def _yielded(
    mapped: Generator[pa.RecordBatch, None, None], schema: pa.Schema, reader: pa.RecordBatchReader
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches with this schema, which has the metadata of the data's own."""
    empty = True
    with reader, closing(mapped):
        for batch in mapped:
            empty = False
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    if empty:  # so that the caller gets the schema
        yield pa.RecordBatch.from_pylist([], schema)


def _with_input(reader: pa.RecordBatchReader, selected: str | Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, with the data to send as a further column."""
    for batch in reader:
        sent = batch.column(selected) if isinstance(selected, str) else batch.select(list(selected)).to_struct_array()
        yield pa.RecordBatch.from_arrays([*batch.columns, sent], [*batch.schema.names, ""])


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def checked_row(service: str | None, body: bytes | None, key: str | None, group: str | None = None) -> Row:
    """Return a row to be sent, or one that has failed because it has no service or no key.  It may have no group."""
    missing = None
    if service is None:
        missing = "the service is NULL; every row must name a service"
    elif key is None:
        missing = "the key is NULL; every row sent through Titanic needs a key"
    if missing is None or body is None:
        return Row(service or "", body, key or "", group or "")
    return Row("", body, error=RequestRejected(missing, code=Code.MALFORMED, text=missing))


# ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def map_rows(
    batches: Iterable[pa.RecordBatch],
    service: str,
    added: Sequence[str],
    settings: RowSettings,
    connect: Connect,
    *,
    result: str = "string",
    columns: Columns | None = None,
    keyed: Route | None = None,
    grouped: bool = False,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches, perhaps divided, with three more columns: reply, code and error, named `added`.

    The last column of each batch is what to send and is left out: strings or bytes, and NULL in rows that are not sent.
    With `keyed`, which sends rows with keys, it is followed by the keys, and if the rows are `grouped`, by the names of
    their groups.  `result` is one of `RESULTS`, unless `columns` makes the three columns.
    """
    make = columns or partial(reply_columns, result=result)
    selected = 1 + (keyed is not None) + grouped
    parts: deque[pa.RecordBatch] = deque()

    def rows() -> Iterator[Row]:
        for part in divided(batches, batch_bytes=lambda batch: batch.column(batch.num_columns - selected).nbytes):
            parts.append(part)
            bodies, *others = part.columns[-selected:]
            keys = others.pop(0).to_pylist() if keyed is not None else repeat("")
            groups = others.pop().to_pylist() if grouped else repeat("")
            yield from map(checked_row, repeat(service), frames_of(bodies), keys, groups)

    start, size = 0, 0
    outcomes: list[Outcome] = []
    with closing(answer_rows(rows(), settings, connect, keyed)) as answered:
        for row in answered:
            outcomes.append(row.outcome)
            if isinstance(row.outcome, list):
                size += sum(map(len, row.outcome))
            part = parts[0]
            ended = start + len(outcomes) == part.num_rows
            if ended or size >= MAX_BATCH_BYTES:
                found = [column.slice(start, len(outcomes)) for column in part.columns[:-selected]]
                found += make(outcomes)
                yield pa.RecordBatch.from_arrays(found, [*part.schema.names[:-selected], *added])
                start = 0 if ended else start + len(outcomes)
                outcomes, size = [], 0
                if ended:
                    parts.popleft()


def divided(
    batches: Iterable[pa.RecordBatch], batch_bytes: Callable[[pa.RecordBatch], int]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches that have rows, in parts of up to `MAX_BATCH_ROWS` and, by `batch_bytes`, `MAX_BATCH_BYTES`.

    The first parts are small, for callers that stop early.
    """
    rows = MIN_BATCH_ROWS
    for batch in batches:
        most = max(1, MAX_BATCH_BYTES * batch.num_rows // (batch_bytes(batch) or 1))
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, min(rows, most))
            yield part
            start += part.num_rows
            rows = min(2 * rows, MAX_BATCH_ROWS)


def frames_of(column: pa.Array) -> list[bytes | None]:
    """Return the values of a column of strings or bytes."""
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    found: list[bytes | None] = column.cast(pa.large_binary() if large else pa.binary()).to_pylist()
    return found


def reply_columns(outcomes: Sequence[Outcome], result: str) -> list[pa.Array]:
    """Return reply, code and error of rows, as arrays."""
    # Without this way for the common case, a row of `map_arrow` takes 4 % longer.
    if result != "frames" and all(isinstance(each, list) and len(each) == 1 for each in outcomes):
        try:
            replies = pa.array([each[0] for each in outcomes], pa.binary())  # type: ignore[index]  # they are lists
            if result == "string":
                replies = replies.cast(pa.string())
            count = len(outcomes)
            return [replies, pa.repeat(pa.scalar(OK, pa.int32()), count), pa.nulls(count, pa.string())]
        except pa.ArrowInvalid:
            pass  # a reply is not UTF-8: find out which
    answers = list(zip(*[answer(outcome, result) for outcome in outcomes], strict=True)) or [(), (), ()]
    return [
        pa.array(values, kind) for values, kind in zip(answers, (RESULTS[result], pa.int32(), pa.string()), strict=True)
    ]


def answer(outcome: Outcome, result: str) -> tuple[bytes | str | list[bytes] | None, int | None, str | None]:
    """Return a row's reply and code 200, or another code and an error; all None if it was not sent."""
    if outcome is None:
        return None, None, None
    if isinstance(outcome, RequestError):
        code = Code.NO_WORKER if isinstance(outcome, ServiceNotFound) else Code.FAILED
        code = Code.TIME_PASSED if isinstance(outcome, RequestTimeout) else code
        return None, int(outcome.code or code), outcome.text or str(outcome)
    if result == "frames":
        return outcome, OK, None
    if len(outcome) != 1:
        text = f"the reply has {len(outcome)} frames; result={result!r} needs one: use result='frames'"
        return None, int(Code.FAILED), text
    if result == "binary":
        return outcome[0], OK, None
    try:
        return outcome[0].decode(), OK, None
    except UnicodeDecodeError as error:
        return None, int(Code.FAILED), f"the reply is not valid UTF-8 ({error}); use result='binary'"


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
            columns = _table_columns(coder, row.outcome, batch.num_rows, kind)
            yield pa.RecordBatch.from_arrays([*batch.columns[:-1], *columns], [*batch.schema.names[:-1], *added])


def _slice_rows(row_bytes: float) -> int:
    return max(1, min(MAX_SLICE_ROWS, int(MAX_SLICE_BYTES / max(row_bytes, 1))))


def _table_columns(coder: Coder, outcome: Outcome, count: int, kind: pa.DataType) -> list[pa.Array]:
    """Return reply, code and error of the rows of a request, as arrays."""
    reply, code, error = answer(outcome, "frames")
    if code == OK:
        try:
            return _read_table(coder.decode(reply), count, kind)  # type: ignore[arg-type]  # it is a list of frames
        except (ZmdpError, ValueError, TypeError, pa.ArrowException) as wrong:
            code, error = Code.FAILED, f"the reply cannot be used: {wrong}"
    return [pa.nulls(count, kind), pa.repeat(pa.scalar(code, pa.int32()), count), pa.repeat(pa.scalar(error), count)]


def _read_table(table: pa.Table | None, count: int, kind: pa.DataType) -> list[pa.Array]:
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

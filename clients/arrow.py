"""What `Client.map_arrow` takes and yields.  Needs pyarrow."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from ..mdp.errors import SettingError
from .rows import Connect, RowSettings
from .rows.arrow import RESULTS, added_names, check_result, map_rows
from .rows.tables import ARROW, check_rows_per_request, map_tables


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


def _with_input(reader: pa.RecordBatchReader, selected: str | Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the batches with what to send as a further column."""
    for batch in reader:
        sent = batch.column(selected) if isinstance(selected, str) else batch.select(list(selected)).to_struct_array()
        yield pa.RecordBatch.from_arrays([*batch.columns, sent], [*batch.schema.names, ""])

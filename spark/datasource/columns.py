"""The columns of Titanic's requests in Spark: names, types, and conversion to Arrow."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ...mdp.errors import SettingError
from ...titanic.frames import LENGTH, unpack

_FRAMES: Final = ArrayType(BinaryType())
TYPES: Final[dict[str, DataType]] = {
    "id": LongType(),
    "uuid": StringType(),
    "service": StringType(),
    "owner": StringType(),
    "state": StringType(),
    "priority": IntegerType(),
    "created": TimestampType(),
    "due": TimestampType(),
    "started": TimestampType(),
    "finished": TimestampType(),
    "expires": TimestampType(),
    "attempts": IntegerType(),
    "failures": IntegerType(),
    "retries": IntegerType(),
    "key": StringType(),
    "headers": MapType(StringType(), StringType()),
    "code": IntegerType(),
    "error": StringType(),
    "request": _FRAMES,
    "reply": _FRAMES,
}
"""The columns and their default types."""
BODY_COLUMNS: Final = {"request": "body", "reply": "reply"}
"""The columns that hold frames, and their names in the database."""
TIME_COLUMNS: Final = frozenset(name for name, kind in TYPES.items() if isinstance(kind, TimestampType))
SCHEMA: Final = StructType([StructField(name, kind) for name, kind in TYPES.items()])


def check_schema(schema: StructType) -> None:
    """Raise `SettingError` if the schema has an unknown column, or a column of the wrong type."""
    for field in schema.fields:
        if field.name not in TYPES:
            raise SettingError(f"titanic has no column {field.name!r}; available columns: {', '.join(TYPES)}")
        frames = field.name in BODY_COLUMNS
        wanted = [TYPES[field.name], BinaryType(), StringType()] if frames else [TYPES[field.name]]
        if field.dataType not in wanted:
            allowed = " or ".join(each.simpleString() for each in wanted)
            raise SettingError(
                f"titanic's column {field.name} cannot be read as {field.dataType.simpleString()}; use {allowed}"
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema as this version of PySpark expects it from Arrow."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # PySpark 4.0 and 4.1 assume UTC
        return to_arrow_schema(schema)


def to_arrow(rows: int, columns: Sequence[Sequence[Any]], schema: StructType, arrow: pa.Schema) -> pa.RecordBatch:
    """Convert values from SQL, given as columns, to a record batch; there may be no columns at all."""
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    arrays = [
        _array(_CONVERTERS[_kind(field)](values), kind)
        for values, field, kind in zip(columns, schema.fields, arrow.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_timestamp(kind):
        return pa.array(values, kind)
    microseconds = pc.round(pc.multiply(pa.array(values, pa.float64()), 1e6))
    return microseconds.cast(pa.int64()).cast(kind)


def _kind(field: StructField) -> str:
    if field.name not in BODY_COLUMNS:
        return "headers" if field.name == "headers" else "plain"
    return field.dataType.typeName()


def _frames(values: Iterable[bytes | None]) -> list[list[bytes] | None]:
    return [None if packed is None else _unpacked(packed) for packed in values]


def _unpacked(packed: bytes) -> list[bytes]:
    if LENGTH + int.from_bytes(packed[:LENGTH], "big") == len(packed):  # the usual case: a single frame
        return [packed[LENGTH:]]
    return unpack(packed)


def _first_frames(values: Iterable[bytes | None]) -> list[bytes | None]:
    return [packed[LENGTH : LENGTH + int.from_bytes(packed[:LENGTH], "big")] if packed else None for packed in values]


def _texts(values: Iterable[bytes | None]) -> list[str | None]:
    return [None if frame is None else frame.decode(errors="replace") for frame in _first_frames(values)]


def _headers(values: Iterable[str | None]) -> list[list[tuple[str, str]] | None]:
    return [None if text is None else list(json.loads(text).items()) for text in values]


_CONVERTERS: Final[dict[str, Callable[[Any], Any]]] = {
    "plain": lambda values: values,
    "headers": _headers,
    "array": _frames,
    "binary": _first_frames,
    "string": _texts,
}

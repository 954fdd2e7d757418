"""The columns of Titanic's requests in Spark: names, types, and conversion to Arrow."""

import json
from typing import Final

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
from .bodies import UUID_BYTES, hexadecimal, unpack_bodies

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


def stored(name: str) -> str:
    """Return the name that a column has in the database."""
    return BODY_COLUMNS.get(name, name)


def to_spark(batch: pa.RecordBatch, arrow: pa.Schema) -> pa.RecordBatch:
    """Return what the database has returned with the columns and types that Spark expects."""
    if not arrow.names:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    arrays = [_converted(field.name, batch.column(stored(field.name)), field.type) for field in arrow]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _converted(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    if values.null_count == len(values):
        return pa.nulls(len(values), kind)
    if name in BODY_COLUMNS:
        return unpack_bodies(values, kind)
    if pa.types.is_timestamp(kind):
        return pc.round(pc.multiply(values, 1e6)).cast(pa.int64()).cast(kind)
    if pa.types.is_map(kind):
        return pa.array([None if text is None else list(json.loads(text).items()) for text in values.to_pylist()], kind)
    return hexadecimal(values, UUID_BYTES) if pa.types.is_binary(values.type) else values.cast(kind)

"""The columns of Titanic's requests in Spark: names and types."""

from typing import Final

import pyarrow as pa
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
from ...titanic.arrow.columns import BODY_COLUMNS

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

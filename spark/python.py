"""Arrow schemas as every supported PySpark passes them to Python, and the care of its Python processes."""

import gc
from functools import cache
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

_WITHOUT_ARROW: Final = {
    "variant": "write to_json(…)",
    "interval": "CAST it to string",
    "interval year": "CAST it to string",
    "interval month": "CAST it to string",
    "interval year to month": "CAST it to string",
}
"""Spark's types that do not reach Python correctly, and what to write instead."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return a schema as PySpark passes it to Python and expects it back; its timestamps are in UTC."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # PySpark 4.0 and 4.1 assume UTC
        return to_arrow_schema(schema)


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the type of Arrow for one of Spark's.  Raises `PySparkTypeError` if there is none."""
    return arrow_schema(StructType().add("value", kind)).field(0).type


def readable_type(kind: DataType, where: str, *, inside: bool = False) -> DataType:
    """Return a type in whose parts NULL is allowed: PyArrow does not read values in which only their parts have none.

    Raises `TypeError`, which begins with `where`, for types that Arrow lacks.  `inside` is about items of arrays.
    """
    name = kind.simpleString()
    remedy = "CAST it to the type that is meant" if inside and name == "void" else _WITHOUT_ARROW.get(name)
    if remedy is not None:
        raise TypeError(f"{where} is of type {name}, which results cannot represent: {remedy}")
    if isinstance(kind, StructType):
        parts = ((each, readable_type(each.dataType, f"{where}.{each.name}")) for each in kind.fields)
        return StructType([StructField(each.name, part, True, each.metadata) for each, part in parts])
    if isinstance(kind, ArrayType):
        return ArrayType(readable_type(kind.elementType, f"{where}[]", inside=True))
    if isinstance(kind, MapType):
        key = readable_type(kind.keyType, f"{where}[key]", inside=True)
        return MapType(key, readable_type(kind.valueType, f"{where}[]", inside=True))
    return kind


@cache
def exempt_imports_from_collection() -> None:
    """Let the garbage collector pass over everything that exists now; once in a process, after the imports.

    PySpark collects garbage after every task and after every step of planning.  With our imports, more than a hundred
    thousand objects that live as long as the process, that takes longer than a short task.
    """
    gc.freeze()

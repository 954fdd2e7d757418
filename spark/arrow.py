"""Spark's types in Arrow, the same way with every supported version of PySpark."""

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return a schema as PySpark passes it to Python and expects it back; its timestamps are in UTC."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # PySpark 4.0 and 4.1 assume UTC
        return to_arrow_schema(schema)

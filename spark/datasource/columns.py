"""The columns of Titanic's requests in Spark; titanic/arrow/columns.py declares them."""

from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from ...titanic.arrow.columns import REQUESTS

SCHEMA: Final = from_arrow_schema(REQUESTS)
"""The columns and their default types."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema as this version of PySpark expects it from Arrow."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # PySpark 4.0 and 4.1 assume UTC
        return to_arrow_schema(schema)

"""The columns of Titanic's requests in Spark; titanic/contrib/arrow/columns.py declares them."""

from typing import Final

from pyspark.sql.pandas.types import from_arrow_schema

from ...titanic.contrib.arrow.columns import REQUESTS

SCHEMA: Final = from_arrow_schema(REQUESTS)
"""The columns and their default types."""

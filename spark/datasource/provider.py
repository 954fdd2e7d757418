"""The data source `titanic` of Spark: `spark.read.format("titanic")`, and so on; see docs/datasource.md.

Spark finds it by the module `pyspark_titanic`.  What reads and what writes is imported when it is needed: Spark looks
at every data source that is installed whenever it looks for one.
"""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class TitanicSource(DataSource):
    """Titanic's requests, to read and to add to."""

    @classmethod
    def name(cls) -> str:
        """As in `format("titanic")`."""
        return "titanic"

    def schema(self) -> "StructType":
        """All columns."""
        from .columns import SCHEMA  # noqa: PLC0415

        return SCHEMA

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """Reads what there is."""
        from .source import open_reader  # noqa: PLC0415

        return open_reader(self.options, schema)

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":  # noqa: N802 - Spark's name
        """Reads on and on."""
        from .stream import StreamReader  # noqa: PLC0415

        return StreamReader(self.options, schema)

    def writer(self, schema: "StructType", overwrite: bool) -> "DataSourceWriter":
        """Adds requests."""
        from .sink import JobWriter  # noqa: PLC0415

        return JobWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamWriter":  # noqa: N802 - Spark's
        """Adds requests, micro-batch by micro-batch."""
        from .sink import StreamWriter  # noqa: PLC0415

        return StreamWriter(self.options, schema, overwrite=overwrite)

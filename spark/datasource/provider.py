"""The Spark data source `titanic`, as in `spark.read.format("titanic")`; see docs/spark/datasource.md.

Spark finds it through the module `pyspark_titanic`.  Spark imports every installed data source whenever it looks one
up, so readers and writers are imported only when they are used.
"""

from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType


class TitanicSource(spark.DataSource):
    """Reads and adds requests of Titanic."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format, as in `format("titanic")`."""
        return "titanic"

    def schema(self) -> StructType:
        """Return the default schema: all columns."""
        from .reader import SCHEMA  # noqa: PLC0415

        return SCHEMA

    def reader(self, schema: StructType) -> spark.DataSourceReader:
        """Return the reader for batches."""
        from .reader import Reader  # noqa: PLC0415

        return Reader(self.options, schema)

    def streamReader(self, schema: StructType) -> spark.DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader for streams."""
        from .reader import StreamReader  # noqa: PLC0415

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> spark.DataSourceWriter:
        """Return the writer for batches."""
        from .writer import JobWriter  # noqa: PLC0415

        return JobWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> spark.DataSourceStreamWriter:  # noqa: N802 - Spark's
        """Return the writer for streams."""
        from .writer import StreamWriter  # noqa: PLC0415

        return StreamWriter(self.options, schema, overwrite=overwrite)

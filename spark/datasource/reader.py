"""Read Titanic's requests in partitions, which are ranges of numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType

from ...titanic.contrib.arrow.reading import Requests, select_requests
from ..python import arrow_schema
from ..python_workers import exempt_imports_from_collection
from .table_options import database_option, int_option, known_options

DEFAULT_PARTITIONS: Final = 8
MAX_PARTITIONS: Final = 10_000
READ_OPTIONS: Final = frozenset({"db", "service", "state", "since", "until", "partitions"})


@dataclass(frozen=True)
class Span(spark.InputPartition):
    """The requests whose number (`id` or `ended`) is above `low` and up to `high`, which may be `UNBOUNDED`."""

    low: int
    high: int


class SpanReader:
    """What readers of batches and of streams have in common."""

    def __init__(self, given: Mapping[str, str], schema: StructType, number: str) -> None:
        self._partitions = int_option(given, "partitions", DEFAULT_PARTITIONS, most=MAX_PARTITIONS)
        self._requests = Requests(database_option(given), arrow_schema(schema), number, select_requests(given))

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the requests of a `Span`; runs on an executor."""
        yield from self._requests.read(partition.low, partition.high)
        exempt_imports_from_collection()


class Reader(SpanReader, spark.DataSourceReader):
    """Reads all requests as a batch.

    Spark plans a DataFrame once and reuses the partitions for later queries, even days later, so the last one is
    unbounded.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(known_options(options, READ_OPTIONS, "read"), schema, "id")

    def partitions(self) -> Sequence[spark.InputPartition]:
        """Return ranges of ids."""
        found = [Span(*each) for each in self._requests.ranges(self._partitions)]
        exempt_imports_from_collection()
        return found

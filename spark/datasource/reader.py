"""Read Titanic's requests in partitions, which are ranges of numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType

from ...titanic.arrow.connection import check_database, open_database
from ...titanic.arrow.reading import UNBOUNDED, read_range, select_requests
from ...titanic.store.tables import R
from ..python_workers import exempt_imports_from_collection
from .columns import arrow_schema, check_schema
from .options import database_option, int_option, known_options

DEFAULT_PARTITIONS: Final = 8
MAX_PARTITIONS: Final = 10_000
MIN_PARTITION_ROWS: Final = 20_000
"""Minimum number of requests that justifies another partition."""
READ_OPTIONS: Final = frozenset({"db", "service", "state", "since", "until", "partitions"})


class Span(spark.InputPartition):
    """The requests whose number (`id` or `ended`) is above `low` and up to `high`, which may be `UNBOUNDED`."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__((low, high))
        self.low = low
        self.high = high


def spans(low: int, high: int, most: int) -> list[Span]:
    """Split the numbers above `low` up to `high` into at most `most` spans of equal size."""
    count = max(1, min(most, (high - low) // MIN_PARTITION_ROWS))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    return [Span(*pair) for pair in pairwise(borders)]


@dataclass(frozen=True)
class Table:
    """What to read, and from where; Spark ships it to executors."""

    db: str
    schema: StructType
    number: str = "id"
    condition: str = "TRUE"
    """As SQL."""

    def read(self, span: Span) -> Iterator[pa.RecordBatch]:
        """Yield the requests whose numbers are in `span`, in order."""
        yield from read_range(
            self.db, arrow_schema(self.schema), span.low, span.high, number=self.number, condition=self.condition
        )
        exempt_imports_from_collection()


class Reader(spark.DataSourceReader):
    """Reads all requests as a batch.

    Spark plans a DataFrame once and reuses the partitions for later queries, even days later, so the last one is
    unbounded.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = known_options(options, READ_OPTIONS, "read")
        check_schema(schema)
        self._partitions = int_option(given, "partitions", DEFAULT_PARTITIONS, most=MAX_PARTITIONS)
        self._table = Table(database_option(given), schema, "id", select_requests(given))

    def partitions(self) -> Sequence[spark.InputPartition]:
        """Return ranges of ids."""
        engine = open_database(self._table.db, write=False)
        try:
            check_database(engine)
            ends = (sa.select(end(R.id)).scalar_subquery() for end in (sa.func.min, sa.func.max))
            with engine.begin() as connection:
                first, last = connection.execute(sa.select(*ends)).one()
        finally:
            engine.dispose()
        exempt_imports_from_collection()
        if first is None:
            return [Span(0, UNBOUNDED)]
        *found, end = spans(first - 1, last, self._partitions)
        return [*found, Span(end.low, UNBOUNDED)]

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition; runs on an executor."""
        return self._table.read(partition)  # type: ignore[arg-type]  # made by partitions()

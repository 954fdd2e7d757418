"""Read Titanic's requests as Arrow: each partition is a range of numbers, read in chunks.

Each chunk is a transaction of its own, so none is open for long, however slowly Spark takes the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType

from ...mdp.errors import SettingError
from ...mdp.wire import valid_service
from ...titanic.store.models import STATES
from ...titanic.store.tables import R
from .arrow import connect_arrow
from .columns import arrow_schema, check_schema, stored, to_spark
from .database import check_database, database_option, int_option, known_options, open_database, time_option

CHUNK_ROWS: Final = 50_000
"""Maximum number of rows read in one transaction."""
DEFAULT_PARTITIONS: Final = 8
MAX_PARTITIONS: Final = 10_000
MIN_PARTITION_ROWS: Final = 20_000
"""Minimum number of requests that justifies another partition."""
READ_OPTIONS: Final = frozenset({"db", "service", "state", "since", "until", "partitions"})
UNBOUNDED: Final = (1 << 63) - 1
"""The `high` of a span that extends to the latest request at the time of reading."""


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
        arrow = arrow_schema(self.schema)
        columns = {stored(name) for name in arrow.names} | {"id", self.number}
        number, id_ = span.low, UNBOUNDED
        with connect_arrow(self.db, write=False) as connection:
            rows = CHUNK_ROWS
            while rows == CHUNK_ROWS:
                rows = 0
                chunk = (
                    f"WHERE ({self.number}, id) > ({number}, {id_}) AND {self.number} <= {span.high} "
                    f"AND {self.condition} ORDER BY {self.number}, id LIMIT {CHUNK_ROWS}"
                )
                for batch in connection.query(columns, chunk):
                    rows += batch.num_rows
                    number, id_ = (batch.column(name)[-1].as_py() for name in (self.number, "id"))
                    yield to_spark(batch, arrow)


def option_condition(options: Mapping[str, str]) -> str:
    """Return the condition that the options `service`, `state`, `since` and `until` set, as SQL."""
    found = []
    for name in {"service", "state"} & options.keys():
        values = [each.strip() for each in options[name].split(",")]
        for each in values:
            if name == "state" and each not in STATES:
                raise SettingError(f"unknown state {each!r}; expected {', '.join(STATES)}")
            if not valid_service(each.encode()):
                raise SettingError(f"{each!r} is not the name of a service")
        # Spelled out: otherwise the databases would not use the indexes of some states.
        found.append(f"({' OR '.join(f'{name} = {_quoted(each)}' for each in values)})")
    for name, operator in {"since": ">=", "until": "<"}.items():
        if name in options:
            found.append(f"created {operator} {time_option(name, options[name])!r}")
    return " AND ".join(found) or "TRUE"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


class Reader(spark.DataSourceReader):
    """Reads all requests as a batch.

    Spark plans a DataFrame once and reuses the partitions for later queries, even days later, so the last one is
    unbounded.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = known_options(options, READ_OPTIONS, "read")
        check_schema(schema)
        self._partitions = int_option(given, "partitions", DEFAULT_PARTITIONS, most=MAX_PARTITIONS)
        self._table = Table(database_option(given), schema, "id", option_condition(given))

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
        if first is None:
            return [Span(0, UNBOUNDED)]
        *found, end = spans(first - 1, last, self._partitions)
        return [*found, Span(end.low, UNBOUNDED)]

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition; runs on an executor."""
        return self._table.read(partition)  # type: ignore[arg-type]  # made by partitions()

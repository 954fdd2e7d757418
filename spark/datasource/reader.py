"""Read Titanic's requests in partitions, which are ranges of numbers.

A stream reads them either as they are accepted or as they end: each once, none skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource as spark
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ...mdp.errors import SettingError
from ...titanic.contrib.arrow.columns import REQUESTS
from ...titanic.contrib.arrow.connection import check_database, open_database
from ...titanic.contrib.arrow.reading import Requests, select_requests, split_range
from ...titanic.db.offsets import NUMBERS, SafeOffset
from ..python import arrow_schema, exempt_imports_from_collection
from .table_options import READ_OPTIONS, STREAM_OPTIONS, database_option, int_option, known_options

try:  # PySpark 4.2 and newer: limits on micro-batches, and Trigger.AvailableNow
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:
    ReadLimit = SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]
    ReadAllAvailable = ReadMaxRows = None  # type: ignore[assignment,misc]

SCHEMA: Final = from_arrow_schema(REQUESTS)
"""The columns and their default types."""
DEFAULT_PARTITIONS: Final = 8
MAX_PARTITIONS: Final = 10_000
MAX_ROWS_PER_TRIGGER: Final = 1 << 31
WAIT_SECONDS: Final = 0.2
"""How long to wait for open transactions before the stream continues up to the safe offset."""
LONG_WAIT_SECONDS: Final = 10.0
"""How long to wait for open transactions if the stream ends with the requests that exist now."""


@dataclass(frozen=True)
class Span(spark.InputPartition):
    """The requests whose number (`id` or `ended`) is above `low` and up to `high`, which may be `UNBOUNDED`."""

    low: int
    high: int


class SpanReader:
    """Base of the readers of batches and of streams."""

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


class StreamReader(SpanReader, spark.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream; an offset is the number of the last request read: `{"id": 17}` or `{"ended": 17}`."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = known_options(options, STREAM_OPTIONS, "read as a stream")
        events = given.get("events", "ended")
        if events not in NUMBERS:
            raise SettingError(f"events is {events!r}; expected {' or '.join(NUMBERS)}")
        self._from = given.get("startingoffsets", "earliest")
        if self._from not in {"earliest", "latest"}:
            raise SettingError(f"startingOffsets is {self._from!r}; expected earliest or latest")
        self._limit = None
        if "maxrowspertrigger" in given:
            self._limit = int_option(given, "maxrowspertrigger", 1, most=MAX_ROWS_PER_TRIGGER)
        self._number = NUMBERS[events]
        super().__init__(given, schema, self._number)
        self._engine = open_database(self._requests.db, write=False)
        check_database(self._engine)
        self._safe_offset = SafeOffset(self._engine, self._number)
        self._safe_offset.check()
        self._engine.dispose()  # the engine reconnects when the stream starts
        self._last: int | None = None
        """The number at which this stream ends, or None if it does not."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name, as all of these
        """Return the offset at which a new stream starts."""
        return self._offset(0 if self._from == "earliest" else self._safe_offset.settle())

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:  # noqa: N802
        """Return the end of the next micro-batch.  PySpark before 4.2 passes neither its start nor a limit."""
        last = self._safe_offset.advance(WAIT_SECONDS)
        if start is None:
            last = self._safe_offset.settle()  # not the initial 0, which may lie before the checkpoint's offset
        if self._last is not None:
            last = min(last, self._last)
        if start is None:
            return self._offset(last)
        first = self._at(start)
        if ReadMaxRows is not None and isinstance(limit, ReadMaxRows):
            last = self._requests.end_after(self._engine, limit.max_rows, first, last)
        return self._offset(max(first, last))

    def getDefaultReadLimit(self) -> "ReadLimit":  # noqa: N802
        """Return the limit set by `maxRowsPerTrigger`."""
        return ReadAllAvailable() if self._limit is None else ReadMaxRows(self._limit)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the offset up to which there are requests to read."""
        return self._offset(self._safe_offset.safe)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the stream end with the requests that have been committed by now."""
        self._last = self._safe_offset.advance(LONG_WAIT_SECONDS)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[spark.InputPartition]:
        """Return ranges of numbers."""
        return [Span(*each) for each in split_range(self._at(start), self._at(end), self._partitions)]

    def stop(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def _offset(self, number: int) -> dict[str, int]:
        return {self._number: number}

    def _at(self, offset: Mapping[str, int]) -> int:
        try:
            return offset[self._number]
        except (KeyError, TypeError):
            kind = next((name for name, number in NUMBERS.items() if number in offset), "others")
            raise SettingError(
                f"the checkpoint belongs to a stream with events={kind}; use a separate checkpoint for this stream"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the part that executors need."""
        return {"_requests": self._requests}

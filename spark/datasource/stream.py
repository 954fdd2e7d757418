"""Reading Titanic's requests on and on: those accepted, or those that have ended; each once, none skipped."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType

from ...mdp.errors import SettingError
from ...titanic.store.tables import R
from .columns import check_schema
from .database import check_database, database_option, known_options, open_database, whole_option
from .frontier import NUMBERS, Frontier
from .source import DEFAULT_PARTITIONS, MAX_PARTITIONS, READ_OPTIONS, Span, Table, option_conditions, spans

try:  # PySpark 4.2: how many rows a micro-batch may have, and streams that end with what there is
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:
    ReadLimit = SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]
    ReadAllAvailable = ReadMaxRows = None  # type: ignore[assignment,misc]

STREAM_OPTIONS: Final = READ_OPTIONS | {"events", "startingoffsets", "maxrowspertrigger"}
MOST_ROWS: Final = 1 << 31
PATIENCE: Final = 0.2
"""Seconds to wait for transactions that are under way before the stream goes on with what is safe."""
LONG_PATIENCE: Final = 10.0
"""The same where the stream ends with what there is."""


class StreamReader(spark.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """An offset is the number of the last request read: `{"id": 17}`, or `{"ended": 17}`."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = known_options(options, STREAM_OPTIONS, "read as a stream")
        check_schema(schema)
        events = given.get("events", "ended")
        if events not in NUMBERS:
            raise SettingError(f"events is {events!r}: it takes {' or '.join(NUMBERS)}")
        self._from = given.get("startingoffsets", "earliest")
        if self._from not in {"earliest", "latest"}:
            raise SettingError(f"startingOffsets is {self._from!r}: it takes earliest or latest")
        self._partitions = whole_option(given, "partitions", DEFAULT_PARTITIONS, most=MAX_PARTITIONS)
        self._limit = None
        if "maxrowspertrigger" in given:
            self._limit = whole_option(given, "maxrowspertrigger", 1, most=MOST_ROWS)
        self._number = NUMBERS[events]
        self._table = Table(database_option(given), schema, self._number, option_conditions(given))
        self._engine = open_database(self._table.db, write=False)
        check_database(self._engine)
        self._frontier = Frontier(self._engine, self._number)
        self._frontier.check()
        self._engine.dispose()  # whoever only plans needs no more; else it is opened again
        self._last: int | None = None
        """Where this stream ends; None if it goes on and on."""

    # ── in the driver ────────────────────────────────────────────────────────────────────────────────────────────────

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name, as all of these
        """Where a new stream begins."""
        return self._offset(0 if self._from == "earliest" else self._known())

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:  # noqa: N802
        """How far the next micro-batch goes; PySpark before 4.2 says neither where it starts nor how long it may be."""
        last = self._frontier.advance(PATIENCE)
        if start is None:
            last = self._known()  # what goes on from its checkpoint must not go back, and we are not told where that is
        if self._last is not None:
            last = min(last, self._last)
        if start is None:
            return self._offset(last)
        first = self._at(start)
        if ReadMaxRows is not None and isinstance(limit, ReadMaxRows):
            last = self._after(first, last, limit.max_rows)
        return self._offset(max(first, last))

    def _known(self) -> int:
        """How far it is safe to read, once that is known: those who wrote when it was first asked have ended."""
        while not self._frontier.known:
            self._frontier.advance(LONG_PATIENCE)
        return self._frontier.safe

    def getDefaultReadLimit(self) -> "ReadLimit":  # noqa: N802
        """What `maxRowsPerTrigger` says."""
        return ReadAllAvailable() if self._limit is None else ReadMaxRows(self._limit)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """How far there is something to read."""
        return self._offset(self._frontier.safe)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """This stream ends with what has been committed by now."""
        self._last = self._frontier.advance(LONG_PATIENCE)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[spark.InputPartition]:
        """Ranges of numbers."""
        return spans(self._at(start), self._at(end), self._partitions)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing is kept of what was read."""

    def stop(self) -> None:
        """The stream has ended."""
        self._engine.dispose()

    def _offset(self, number: int) -> dict[str, int]:
        return {self._number: number}

    def _at(self, offset: Mapping[str, int]) -> int:
        try:
            return offset[self._number]
        except (KeyError, TypeError):
            kind = next((name for name, number in NUMBERS.items() if number in offset), "others")
            raise SettingError(
                f"the checkpoint is of a stream with events={kind}: this one needs a checkpoint of its own"
            ) from None

    def _after(self, first: int, last: int, rows: int) -> int:
        """How far the next `rows` requests go, if there are so many up to `last`."""
        number = R[self._number]
        some = sa.select(number).where(number > first, number <= last, *(each.sql() for each in self._table.conditions))
        with self._engine.begin() as connection:
            reached = connection.scalar(some.order_by(number).offset(rows - 1).limit(1))
        return last if reached is None else int(reached)

    # ── on an executor ───────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """The requests in one of those ranges."""
        if not isinstance(partition, Span):
            raise TypeError(f"{partition!r} is no range of numbers")
        return self._table.read(partition)

    def __getstate__(self) -> dict[str, Any]:
        """Only what an executor needs."""
        return {"_table": self._table}

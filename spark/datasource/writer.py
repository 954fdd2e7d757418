"""Write rows as requests exactly once: tasks stage them, and the driver commits the task attempts that Spark accepted.

Spark may retry a task, run it twice, or repeat a streaming micro-batch after a restart; in the end it tells the driver
which attempts count.  `titanic/contrib/arrow/writing.py` does the staging and the commits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource as spark
from pyspark.sql.types import Row, StructType

from ...mdp.errors import SettingError
from ...titanic.contrib.arrow.rows import plan_rows
from ...titanic.contrib.arrow.writing import DEFAULT_WAIT_SECONDS, ArrowWrite
from ...titanic.db.store import staging
from ...titanic.server.quota import DEFAULT_MAX_PER_SERVICE
from ..python import arrow_schema, exempt_imports_from_collection
from .table_options import WRITE_OPTIONS, database_option, int_option, known_options

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamBase

    STREAM_ARROW = True
except ImportError:  # PySpark 4.0 supports only rows
    from pyspark.sql.datasource import DataSourceStreamWriter as StreamBase  # type: ignore[assignment]

    STREAM_ARROW = False

MAX_CHUNK_ROWS: Final = 10_000
"""Maximum number of rows staged in one transaction, if Spark does not provide batches."""
MAX_NAME: Final = 500
"""Maximum number of characters in the name of a job or sink."""
MAX_WAIT_SECONDS: Final = 12 * 3600
"""Longest wait for room: staged rows are swept after a day."""
QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
"""The property with which Spark identifies a stream to its tasks; it lives as long as the checkpoint."""


@dataclass(frozen=True)
class StagedRows(spark.WriterCommitMessage):
    """A task's message to the driver: the rows that it has staged, if any, and the id of the stream."""

    staged: staging.Accepted | None = None
    query: str | None = None


class _Writer:
    """Base of both writers; `naming` is the option, `job` or `sink`, that names the write."""

    def __init__(self, options: Mapping[str, str], schema: StructType, naming: str, *, overwrite: bool) -> None:
        given = known_options(options, WRITE_OPTIONS | {naming}, "write")
        if overwrite:
            raise SettingError('titanic only adds requests; use mode("append") or outputMode("append")')
        self._name = given.get(naming)
        if self._name is not None and not 0 < len(self._name) <= MAX_NAME:
            raise SettingError(f"the name of a job or sink must have 1 to {MAX_NAME} characters")
        self.target = ArrowWrite(
            database_option(given), plan_rows(arrow_schema(schema), given), uuid4().hex,
            int_option(given, "max_waiting", DEFAULT_MAX_PER_SERVICE, most=10**12),
            int_option(given, "wait", DEFAULT_WAIT_SECONDS, most=MAX_WAIT_SECONDS),
        )  # fmt: skip
        self._checkpoint = given.get("checkpointlocation")

    def abort(self, messages: Sequence[Any], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Discard staged rows after a task failed; runs on the driver."""
        self.target.abort(_staged(messages))

    def _stage(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID_PROPERTY) if context else None
        staged = self.target.stage(batches, context.partitionId() if context else 0)
        exempt_imports_from_collection()
        return StagedRows(staged, query)


def _staged(messages: Sequence[Any]) -> list[staging.Accepted]:
    """Return the rows that the tasks have staged; the message of a failed task is None."""
    return [each.staged for each in messages if isinstance(each, StagedRows) and each.staged is not None]


class JobWriter(_Writer, spark.DataSourceArrowWriter):
    """Writes the rows of a batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, "job", overwrite=overwrite)
        self._write = None if self._name is None else staging.Write("job", self._name)
        self._skipped = self.target.check(self._write)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> StagedRows:
        """Stage a task's rows; runs on an executor."""
        return StagedRows() if self._skipped else self._stage(iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        """Commit the write after all tasks succeeded; runs on the driver."""
        if not self._skipped:
            self.target.commit(self._write, _staged(messages))


class StreamWriter(_Writer, StreamBase):
    """Writes the rows of a stream, one micro-batch at a time."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, "sink", overwrite=overwrite)
        self._schema = schema
        self.target.check()

    def write(self, iterator: Any) -> StagedRows:
        """Stage a task's rows; runs on an executor."""
        return self._stage(iterator if STREAM_ARROW else _to_arrow(iterator, self._schema))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commit the micro-batch after all tasks succeeded; runs on the driver."""
        if not messages:
            return  # no tasks, so no rows
        query = next((each.query for each in messages if isinstance(each, StagedRows) and each.query), None)
        name = self._name or query or self._checkpoint
        if name is None:
            if not _staged(messages):
                return  # without rows there is nothing to commit
            raise SettingError('Spark does not identify this stream; name it with .option("sink", …)')
        self.target.commit(staging.Write("sink", name, batchId, query), _staged(messages))


def _to_arrow(rows: "Iterator[Row]", schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield rows as Arrow, in chunks."""
    from pyspark.sql.conversion import LocalDataToArrowConversion  # noqa: PLC0415 - only needed for PySpark 4.0

    while chunk := list(islice(rows, MAX_CHUNK_ROWS)):
        yield from LocalDataToArrowConversion.convert(chunk, schema, False).to_batches()

"""Write rows as requests exactly once: tasks stage them, and the driver commits the task attempts that Spark accepted.

Spark may retry a task, run it twice, or repeat a streaming micro-batch after a restart; in the end it tells the driver
which attempts count.  `titanic/store/staging.py` has the SQL.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import sqlalchemy as sa
from pyspark import TaskContext
from pyspark.sql import datasource as spark
from pyspark.sql.types import Row, StructType
from sqlalchemy.engine import Engine

from ...mdp.errors import SettingError, TitanicError
from ...titanic import schema as schemas
from ...titanic.arrow.connection import check_database, connect_arrow, open_database
from ...titanic.arrow.rows import ROW_OPTIONS, RowConverter, bounded, plan_rows
from ...titanic.store import staging
from ..python_workers import exempt_imports_from_collection
from .columns import arrow_schema
from .options import database_option, known_options

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
WRITE_OPTIONS: Final = ROW_OPTIONS | {"db", "job", "sink"}
QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
"""The property with which Spark identifies a stream to its tasks; it lives as long as the checkpoint."""


class StagedRows(spark.WriterCommitMessage):
    """A task's message to the driver: its staging number if it staged anything, and the id of the stream."""

    def __init__(self, staging: int | None, rows: int, query: str | None) -> None:
        self.staging = staging
        self.rows = rows
        self.query = query


@dataclass(frozen=True)
class WriteTarget:
    """Where and how to write rows; Spark ships it to executors."""

    db: str
    rows: RowConverter
    write: str
    """Identifies this write."""

    def stage(self, batches: Iterable[pa.RecordBatch]) -> StagedRows:
        """Stage all rows of a task."""
        context = TaskContext.get()
        task = context.partitionId() if context else 0
        query = context.getLocalProperty(QUERY_ID_PROPERTY) if context else None
        number: int | None = None
        done = 0
        engine = open_database(self.db, write=True)
        try:
            with connect_arrow(self.db, write=True) as connection:
                for batch in bounded(batches):
                    if number is None:
                        with engine.begin() as transaction:
                            number = staging.begin(transaction, self.write, time.time())
                    rows = self.rows.convert(batch, number, done, task)
                    if not connection.stage(staging.touch(number, time.time()), rows):
                        raise staging.StagingLost("the write has ended without this attempt, which was too late")
                    done += rows.num_rows
        except BaseException:
            if number is not None:
                with suppress(sa.exc.SQLAlchemyError), engine.begin() as transaction:  # otherwise swept later, by age
                    staging.discard(transaction, [number])
            raise
        finally:
            engine.dispose()
        exempt_imports_from_collection()
        return StagedRows(number, done, query)


def _write_target(
    options: Mapping[str, str], schema: StructType, other: str, overwrite: bool
) -> tuple[WriteTarget, str | None]:
    """Return where to write, and the option `job` or `sink`; `other` is the one that this writer does not accept."""
    given = known_options(options, WRITE_OPTIONS - {other}, "write")
    if overwrite:
        raise SettingError('titanic only adds requests; use mode("append") or outputMode("append")')
    (name,) = (given.get(each) for each in ("job", "sink") if each != other)
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise SettingError(f"the name of a job or sink must have 1 to {MAX_NAME} characters")
    return WriteTarget(database_option(given), plan_rows(arrow_schema(schema), given), uuid4().hex), name


def _sweep(engine: Engine, ours: int) -> None:
    """Delete `ours` staged rows and some of dead drivers.  If that fails, the next write tries again."""
    if engine.dialect.name == "postgresql":
        with suppress(sa.exc.DBAPIError), engine.begin() as connection:  # others are writing, or may not truncate
            staging.clear(connection)
    left = ours + staging.OF_OTHERS
    with suppress(sa.exc.SQLAlchemyError):
        while left > 0:
            with engine.begin() as connection:
                swept = staging.sweep(connection, time.time())
            if swept is None:
                return
            left -= swept


class _DriverSide:
    """The driver's part of both writers."""

    target: WriteTarget

    def _commit(self, write: staging.Write | None, messages: Sequence[Any]) -> None:
        engine = open_database(self.target.db, write=True)
        try:
            self._end(
                engine, messages, lambda connection, staged: staging.commit(connection, write, staged, time.time())
            )
        except sa.exc.DBAPIError as error:
            detail = " ".join(str(error.orig).split())
            raise TitanicError(
                f"{schemas.shown(engine.url)} could not commit the write: {detail}. Nothing was written, unless the "
                "connection was lost during the commit",
                code=500,
            ) from None
        finally:
            engine.dispose()

    def _abort(self, messages: Sequence[Any]) -> None:
        engine = open_database(self.target.db, write=True)
        try:
            self._end(engine, messages, lambda connection, staged: False)
        finally:
            engine.dispose()

    def _end(self, engine: Engine, messages: Sequence[Any], commit: Callable[..., bool]) -> None:
        told = [each for each in messages if isinstance(each, StagedRows)]
        staged = [staging.Accepted(each.staging, each.rows) for each in told if each.staging is not None]
        with engine.begin() as connection:
            if not commit(connection, staged):
                staging.discard(connection, [each.staging for each in staged])
            staging.discard_write(connection, self.target.write)
        _sweep(engine, sum(each.rows for each in staged))
        exempt_imports_from_collection()


class JobWriter(_DriverSide, spark.DataSourceArrowWriter):
    """Writes the rows of a batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self.target, name = _write_target(options, schema, "sink", overwrite)
        self._write = None if name is None else staging.Write("job", name)
        engine = open_database(self.target.db, write=True)
        try:
            check_database(engine)
            with engine.begin() as connection:
                self._skipped = self._write is not None and staging.was_committed(connection, self._write)
        finally:
            engine.dispose()

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> StagedRows:
        """Stage a task's rows; runs on an executor."""
        return StagedRows(None, 0, None) if self._skipped else self.target.stage(iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        """Commit the write after all tasks succeeded; runs on the driver."""
        if not self._skipped:
            self._commit(self._write, messages)

    def abort(self, messages: Sequence[Any]) -> None:
        """Discard staged rows after a task failed; runs on the driver."""
        self._abort(messages)


class StreamWriter(_DriverSide, StreamBase):
    """Writes the rows of a stream, one micro-batch at a time."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._schema = schema
        self.target, self._name = _write_target(options, schema, "job", overwrite)
        self._checkpoint = {name.lower(): value for name, value in options.items()}.get("checkpointlocation")
        engine = open_database(self.target.db, write=True)
        try:
            check_database(engine)
        finally:
            engine.dispose()

    def write(self, iterator: Any) -> StagedRows:
        """Stage a task's rows; runs on an executor."""
        return self.target.stage(iterator if STREAM_ARROW else _to_arrow(iterator, self._schema))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commit the micro-batch after all tasks succeeded; runs on the driver."""
        if not messages:
            return  # no tasks, so no rows
        query = next((each.query for each in messages if isinstance(each, StagedRows) and each.query), None)
        name = self._name or query or self._checkpoint
        if name is None:
            if not any(each.rows for each in messages if isinstance(each, StagedRows)):
                return  # without rows there is nothing to commit
            raise SettingError('Spark does not identify this stream; name it with .option("sink", …)')
        self._commit(staging.Write("sink", name, batchId, query), messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Discard staged rows after a task failed; runs on the driver."""
        del batchId
        self._abort(messages)


def _to_arrow(rows: "Iterator[Row]", schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield rows as Arrow, in chunks."""
    from pyspark.sql.conversion import LocalDataToArrowConversion  # noqa: PLC0415 - only needed for PySpark 4.0

    while chunk := list(islice(rows, MAX_CHUNK_ROWS)):
        yield from LocalDataToArrowConversion.convert(chunk, schema, False).to_batches()

"""Writing rows as requests, exactly once: tasks stage them, the driver has the accepted attempts accepted by Titanic.

What is in Spark's hands: it tries tasks again, runs some twice, and plans a batch of a stream again after a restart;
and tells the driver in the end which attempts count.  See `titanic/store/staging.py` for what is done with them.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from ...titanic.store import staging
from .database import check_database, database_option, known_options, open_database
from .rows import CONSTANTS, Rows, plan

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamBase

    STREAM_ARROW = True
except ImportError:  # PySpark 4.0 has rows only
    from pyspark.sql.datasource import DataSourceStreamWriter as StreamBase  # type: ignore[assignment]

    STREAM_ARROW = False

CHUNK_ROWS: Final = 10_000
"""Rows staged in one transaction …"""
CHUNK_BYTES: Final = 8 << 20
"""… and bytes of their bodies; but one row, however large."""
MAX_NAME: Final = 500
"""Characters of a job's or a sink's name."""
WRITE_OPTIONS: Final = CONSTANTS | {"db", "job", "sink"}
QUERY: Final = "sql.streaming.queryId"
"""The property by which Spark tells a task which stream it is of: it stays as long as the checkpoint."""


class Message(spark.WriterCommitMessage):
    """What a task tells the driver: what it has staged, if anything, and which stream it is of."""

    def __init__(self, staging: int | None, rows: int, query: str | None) -> None:
        self.staging = staging
        self.rows = rows
        self.query = query


@dataclass(frozen=True)
class Target:
    """Where rows are written, and how; it travels to the executors."""

    db: str
    rows: Rows
    write: str
    """Which write this is."""

    def stage(self, batches: Iterable[Sequence[Sequence[Any]]]) -> Message:
        """Stage all rows of a task, given as columns."""
        context = TaskContext.get()
        task = context.partitionId() if context else 0
        query = context.getLocalProperty(QUERY) if context else None
        engine = open_database(self.db, write=True)
        number: int | None = None
        done = 0
        try:
            for chunk in _chunks(self._entries(batches, task)):
                with engine.begin() as connection:
                    if number is None:
                        number = staging.begin(connection, self.write, time.time())
                    staging.add(connection, number, done, chunk, time.time())
                done += len(chunk)
        except BaseException:
            if number is not None:
                with suppress(sa.exc.SQLAlchemyError), engine.begin() as connection:  # else it is swept by its age
                    staging.discard(connection, [number])
            raise
        finally:
            engine.dispose()
        return Message(number, done, query)

    def _entries(self, batches: Iterable[Sequence[Sequence[Any]]], task: int) -> Iterator[staging.Entry]:
        first = 0
        for columns in batches:
            yield from self.rows.entries(columns, first, task)
            first += len(columns[0])


def _chunks(entries: Iterable[staging.Entry]) -> Iterator[list[staging.Entry]]:
    chunk: list[staging.Entry] = []
    size = 0
    for each in entries:
        chunk.append(each)
        size += len(each[-1])
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _columns(batches: Iterable[pa.RecordBatch]) -> Iterator[list[list[Any]]]:
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            yield [column.to_pylist() for column in batch.slice(start, CHUNK_ROWS).columns]


def _target(options: Mapping[str, str], schema: StructType, other: str, overwrite: bool) -> tuple[Target, str | None]:
    """Where to write, and the name that the option of this kind of write gives it; `other` is the other kind's."""
    given = known_options(options, WRITE_OPTIONS - {other}, "write")
    if overwrite:
        raise SettingError('titanic only adds requests: mode("append"), outputMode("append")')
    (name,) = (given.get(each) for each in ("job", "sink") if each != other)
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise SettingError(f"the name of a job or a sink has 1 to {MAX_NAME} characters")
    return Target(database_option(given), plan(schema, given), uuid4().hex), name


def _sweep(engine: Engine, ours: int) -> None:
    """Throw away `ours` staged rows, and some of dead drivers'.  What fails is left to the next write."""
    left = ours + staging.OF_OTHERS
    with suppress(sa.exc.SQLAlchemyError):
        while left > 0:
            with engine.begin() as connection:
                swept = staging.sweep(connection, time.time())
            if swept is None:
                return
            left -= swept


class _Driver:
    """What both kinds of writers do in the driver."""

    target: Target

    def _commit(self, write: staging.Write | None, messages: Sequence[Any]) -> None:
        told = [each for each in messages if isinstance(each, Message) and each.staging is not None]
        accepted = [staging.Accepted(int(each.staging or 0), each.rows) for each in told]
        engine = open_database(self.target.db, write=True)
        try:
            with engine.begin() as connection:
                if not staging.commit(connection, write, accepted, time.time()):
                    staging.discard(connection, [each.staging for each in accepted])
                staging.discard_write(connection, self.target.write)
            _sweep(engine, sum(each.rows for each in accepted))
        except sa.exc.DBAPIError as error:
            raise self._failed(engine, error) from None
        finally:
            engine.dispose()

    def _abort(self, messages: Sequence[Any]) -> None:
        numbers = [each.staging for each in messages if isinstance(each, Message) and each.staging is not None]
        engine = open_database(self.target.db, write=True)
        try:
            with engine.begin() as connection:
                staging.discard(connection, numbers)
                staging.discard_write(connection, self.target.write)
            _sweep(engine, sum(each.rows for each in messages if isinstance(each, Message)))
        finally:
            engine.dispose()

    def _failed(self, engine: Engine, error: sa.exc.DBAPIError) -> TitanicError:
        told = " ".join(str(error.orig).split())
        return TitanicError(
            f"{schemas.shown(engine.url)} could not accept what was staged: {told}; unless its connection was lost in "
            "the middle of the commit, nothing was written",
            code=500,
        )


class JobWriter(_Driver, spark.DataSourceArrowWriter):
    """A batch's rows."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self.target, name = _target(options, schema, "sink", overwrite)
        self._write = None if name is None else staging.Write("job", name)
        engine = open_database(self.target.db, write=True)
        try:
            check_database(engine)
            with engine.begin() as connection:
                self._skipped = self._write is not None and staging.was_committed(connection, self._write)
        finally:
            engine.dispose()

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Message:
        """On an executor: stage a task's rows."""
        return Message(None, 0, None) if self._skipped else self.target.stage(_columns(iterator))

    def commit(self, messages: Sequence[Any]) -> None:
        """In the driver, when all tasks have ended well."""
        if not self._skipped:
            self._commit(self._write, messages)

    def abort(self, messages: Sequence[Any]) -> None:
        """In the driver, when some have not."""
        self._abort(messages)


class StreamWriter(_Driver, StreamBase):
    """A stream's rows, micro-batch by micro-batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self.target, self._name = _target(options, schema, "job", overwrite)
        self._checkpoint = {name.lower(): value for name, value in options.items()}.get("checkpointlocation")
        engine = open_database(self.target.db, write=True)
        try:
            check_database(engine)
        finally:
            engine.dispose()

    def write(self, iterator: Any) -> Message:
        """On an executor: stage a task's rows."""
        return self.target.stage(_columns(iterator) if STREAM_ARROW else _row_columns(iterator))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """In the driver, when all tasks of the batch have ended well."""
        if not messages:
            return  # no task, no row
        query = next((each.query for each in messages if isinstance(each, Message) and each.query), None)
        name = self._name or query or self._checkpoint
        if name is None:
            if not any(each.rows for each in messages if isinstance(each, Message)):
                return  # a batch without tasks, from whom one would know
            raise SettingError('Spark does not say which stream this is: give it a name with .option("sink", …)')
        self._commit(staging.Write("sink", name, batchId, query), messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """In the driver, when some have not."""
        del batchId
        self._abort(messages)


def _row_columns(rows: "Iterator[Row]") -> Iterator[list[list[Any]]]:
    """The same from rows."""
    chunk: list[Any] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK_ROWS:
            yield [list(column) for column in zip(*chunk, strict=True)]
            chunk = []
    if chunk:
        yield [list(column) for column in zip(*chunk, strict=True)]

"""Collect a DataFrame that may be large, computing it once, with little memory in the driver."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...session import is_connect
from . import tasks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_TOO_MUCH: Final = "spark.driver.maxResultSize"
"""The setting that limits the results of all tasks together; Spark's error names it."""
FEW_ROWS: Final = 1000
FEW_BYTES: Final = 256 << 10


@dataclass(frozen=True)
class Collected:
    """A result; `table` is None if it is too large."""

    rows: int
    bytes: int
    table: "pa.Table | None" = None


def collect(table: "DataFrame", inline: int, path: str | None) -> Collected:
    """Run the query of `table`.  Write a result of more than `inline` bytes to the folder `path`, which is new.

    If `path` is None, such a result is lost, and counted only in part.  Raises what Spark raises.
    """
    if _returns_little(table):
        found = table.toArrow()
        return Collected(found.num_rows, found.nbytes, found)
    if path is None:
        return _passed(table, inline)
    from pyspark import StorageLevel  # noqa: PLC0415

    table = table.persist(StorageLevel.DISK_ONLY)  # computed once, whether it is sent or written
    try:
        collected = _passed(table, inline)
        if collected.table is None:
            _write(table, path)
            collected = replace(collected, rows=table.count())
        return collected
    finally:
        table.unpersist()


def write(table: "pa.Table", path: str, like: "DataFrame") -> None:
    """Write a collected table, with the schema of the DataFrame `like`, to the folder `path`."""
    _write(like.sparkSession.createDataFrame(table, schema=like.schema), path)


def _write(table: "DataFrame", path: str) -> None:
    # Without a scheme, a path would be one in Spark's default file system, such as HDFS.
    table.write.parquet(path if is_url(path) else Path(path).as_uri())


def is_url(path: str) -> bool:
    """Whether results go to a URL, which only Spark can read and write, not to a folder of the driver's machine."""
    return ":" in path


def _returns_little(table: "DataFrame") -> bool:
    """Whether Spark knows that the result is small.  Starting Python on executors takes longer than many a query."""
    if is_connect(table.sparkSession):
        return False  # the plan is on the server
    plan = table._jdf.queryExecution().optimizedPlan()
    most = plan.maxRows()
    if most.isDefined() and int(most.get()) <= FEW_ROWS:
        return True
    generate = table.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.GENERATE()  # type: ignore[union-attr]
    return int(str(plan.stats().sizeInBytes())) <= FEW_BYTES and not plan.containsPattern(generate)


def _passed(table: "DataFrame", inline: int) -> Collected:
    """Run the query in one Spark job, and join the pieces that its tasks pass to the driver."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415

    from ...python import arrow_schema  # noqa: PLC0415

    schema = arrow_schema(table.schema)
    try:
        pieces = _run(table, schema, inline)
    except Exception as error:
        if _TOO_MUCH not in str(error):
            raise
        return Collected(0, inline + 1)  # Spark has aborted the job: a limit is lower, or there are many partitions
    rows, size = (sum(piece[each] for piece in pieces) for each in ("rows", "bytes"))
    if size > inline:
        return Collected(rows, size)
    parts = [pa.ipc.open_stream(piece["data"]).read_all() for piece in pieces]
    return Collected(rows, size, pa.concat_tables([schema.empty_table(), *parts]))


def _run(table: "DataFrame", schema: "pa.Schema", most: int) -> list[dict[str, Any]]:
    """Return the tasks' pieces in the order of the partitions; see `PIECES`."""
    from pyspark import cloudpickle  # noqa: PLC0415

    cloudpickle.register_pickle_by_value(tasks)  # type: ignore[no-untyped-call]  # executors may not have zmdp
    run = tasks.returning(schema.serialize().to_pybytes(), most)
    # Names may be repeated in a result, but not here.
    numbered = table.toDF(*(f"c{number}" for number in range(len(table.columns))))
    pieces = numbered.mapInArrow(run, tasks.PIECES).toArrow().to_pylist()
    return sorted(pieces, key=lambda piece: piece["part"])

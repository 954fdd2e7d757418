"""Collect a DataFrame that may be large, computing it once, with little memory in the driver."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..session import is_connect
from . import tasks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

MOST_PASSED_BYTES: Final = 4 << 20
"""How many bytes one partition may pass to the driver."""
_TOO_MUCH: Final = "spark.driver.maxResultSize"
"""The setting that limits what all tasks pass to the driver; Spark's error names it."""
FEW_ROWS: Final = 1000
FEW_BYTES: Final = 256 << 10
_STAGING: Final = "_temporary"
"""Subfolder for files of tasks that Spark has not accepted yet; Spark ignores names that begin with '_'."""
_ROW_METADATA: Final = b"org.apache.spark.sql.parquet.row.metadata"
"""Key under which Spark keeps a Parquet file's schema, for types that Parquet does not have."""


@dataclass(frozen=True)
class Collected:
    """A result; `table` is None if it is too large."""

    rows: int
    bytes: int
    table: "pa.Table | None" = None


def collect(table: "DataFrame", inline: int, path: str | None) -> Collected:
    """Run the query of `table`.  Write a result of more than about `inline` bytes to the folder `path`, which is new.

    If `path` is None, such a result is lost, and counted only in part.  Raises what Spark raises.
    """
    try:
        if _returns_little(table):
            found = table.toArrow()
            return Collected(found.num_rows, found.nbytes, found)
        if path is None:  # any partition may have all that can be sent; `_TOO_MUCH` limits them together
            return _collect(table, inline, None, inline, alike=True)
        return _collect(table, inline, path, min(inline, MOST_PASSED_BYTES))
    except Exception as error:
        if _TOO_MUCH not in str(error):
            raise
    # Spark has aborted the job: a limit is lower, or there are many partitions.
    return Collected(0, inline + 1) if path is None else _collect(table, inline, path, 0)


def write(table: "pa.Table", path: str, like: "DataFrame") -> None:
    """Write a collected table, with the schema of the DataFrame `like`, to the folder `path`."""
    if is_url(path):
        like.sparkSession.createDataFrame(table, schema=like.schema).write.parquet(path)
        return
    import pyarrow.parquet as pq  # noqa: PLC0415

    os.makedirs(path)
    pq.write_table(table.cast(_arrow_schema(like)), f"{path}/part-00000.parquet")


def is_url(path: str) -> bool:
    """Whether results go to a URL, which only Spark can write, rather than to a folder of the driver's machine."""
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


def _collect(table: "DataFrame", inline: int, path: str | None, most: int, *, alike: bool = False) -> Collected:
    """Run the query in one Spark job and put together what its tasks return."""
    if path is not None and is_url(path):
        return _collect_to_url(table, inline, path, most)
    staging = None if path is None else Path(path, _STAGING)
    unwanted = path
    try:
        pieces = _run(table, most, staging, alike=alike)
        rows, size = (sum(piece[each] for piece in pieces) for each in ("rows", "bytes"))
        if size <= inline and all(piece["data"] or piece["file"] for piece in pieces):
            return Collected(rows, size, _read(pieces, staging, _arrow_schema(table)))
        if staging is not None:
            _accept(pieces, staging)
            unwanted = str(staging)
        return Collected(rows, size)
    finally:
        if unwanted is not None:
            shutil.rmtree(unwanted, ignore_errors=True)


def _collect_to_url(table: "DataFrame", inline: int, path: str, most: int) -> Collected:
    """Collect, or let Spark write to a URL: only Spark has the settings and libraries for that."""
    from pyspark import StorageLevel  # noqa: PLC0415

    table = table.persist(StorageLevel.DISK_ONLY)
    try:
        found = _collect(table, inline, None, most)
        if found.table is not None:
            return found
        table.write.parquet(path)
        return Collected(table.count(), found.bytes)
    finally:
        table.unpersist()


def _run(table: "DataFrame", most: int, staging: Path | None, *, alike: bool) -> list[dict[str, Any]]:
    """Return what the tasks return, in the order of the partitions; see `PIECES`."""
    from pyspark import cloudpickle  # noqa: PLC0415

    cloudpickle.register_pickle_by_value(tasks)  # type: ignore[no-untyped-call]  # executors may not have zmdp
    schema = _arrow_schema(table).serialize().to_pybytes()
    run = tasks.returning(schema, most, None if staging is None else str(staging), alike=alike)
    # Names may be repeated in a result, but not here.
    numbered = table.toDF(*(f"c{number}" for number in range(len(table.columns))))
    pieces = numbered.mapInArrow(run, tasks.PIECES).toArrow().to_pylist()
    return sorted(pieces, key=lambda piece: piece["part"])


def _read(pieces: list[dict[str, Any]], staging: Path | None, schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    found = [schema.empty_table()]
    for piece in pieces:
        if piece["file"] is None:
            found.append(pa.ipc.open_stream(piece["data"]).read_all())
        elif staging is not None:
            found.append(pq.ParquetFile(staging / piece["file"]).read().cast(schema))
    return pa.concat_tables(found).replace_schema_metadata(None)


def _accept(pieces: list[dict[str, Any]], staging: Path) -> None:
    """Keep the files of the tasks that Spark has accepted, and only those, in the order of the partitions."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    staging.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        path = staging.parent / f"part-{piece['part']:05}.parquet"
        if piece["file"] is None:
            pq.write_table(pa.ipc.open_stream(piece["data"]).read_all(), path)
        else:
            (staging / piece["file"]).rename(path)


def _arrow_schema(table: "DataFrame") -> "pa.Schema":
    """Return the schema that `DataFrame.toArrow` returns, with Spark's own for files."""
    from ..arrow import arrow_schema  # noqa: PLC0415

    return arrow_schema(table.schema).with_metadata({_ROW_METADATA: table.schema.json()})

"""Collect a DataFrame that may be large, computing it once, with little memory in the driver."""

import inspect
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
"""The setting that Spark's error names when more than that is passed to the driver."""
FEW_ROWS: Final = 1000
FEW_BYTES: Final = 256 << 10
_STAGING: Final = "_temporary"
"""Subfolder for files of tasks that Spark has not accepted yet; Spark ignores names that begin with '_'."""
_ROW_METADATA: Final = b"org.apache.spark.sql.parquet.row.metadata"
"""Key under which Spark keeps a Parquet file's schema, for types that Parquet does not have."""


@dataclass(frozen=True)
class Collected:
    """A result: its rows, or the folder to which they were written, or neither, if there was no folder."""

    rows: int
    bytes: int
    table: "pa.Table | None" = None
    path: str | None = None


def collect(table: "DataFrame", inline: int, path: str | None) -> Collected:
    """Run the query.  More than about `inline` bytes of Arrow data are written to the folder `path`, which is new.

    Raises what Spark raises.
    """
    try:
        if _returns_little(table):
            found = table.toArrow()
            return Collected(found.num_rows, found.nbytes, found)
        return _collect(table, inline, path, min(inline, MOST_PASSED_BYTES))
    except Exception as error:
        if _TOO_MUCH not in str(error):
            raise
    return _collect(table, inline, path, 0)  # Spark has aborted the job: a limit is lower, or there are many partitions


def _collect(table: "DataFrame", inline: int, path: str | None, most: int) -> Collected:
    if path is None:
        return _Collector(table, inline, None, most).collect()
    local = local_path(path)
    if local is None:
        return _collect_to_url(table, inline, path, most)
    try:
        return _Collector(table, inline, Path(local), most).collect()
    except BaseException:
        shutil.rmtree(local, ignore_errors=True)
        raise


def local_path(path: str) -> str | None:
    """Return the path if it is in a file system of this machine, otherwise None."""
    if ":" not in path:
        return path
    return "/" + path[5:].lstrip("/") if path.startswith("file:") else None


def write(table: "pa.Table", path: str, like: "DataFrame") -> None:
    """Write a collected table, with the schema of the DataFrame `like`, to the folder `path`."""
    local = local_path(path)
    if local is None:
        like.sparkSession.createDataFrame(table, schema=like.schema).write.parquet(path)
        return
    os.makedirs(local)
    with tasks.parquet_writer(os.path.join(local, "part-00000.parquet"), table.schema, _metadata(like)) as writer:
        writer.write_table(table)


def _returns_little(table: "DataFrame") -> bool:
    """Whether Spark knows that the result is small.  Starting Python on executors takes longer than many a query."""
    if is_connect(table.sparkSession):
        return False  # the plan is on the server
    plan = table._jdf.queryExecution().optimizedPlan()
    most = plan.maxRows()
    if most.isDefined() and int(most.get()) <= FEW_ROWS:
        return True
    return int(str(plan.stats().sizeInBytes())) <= FEW_BYTES and "Generate" not in str(plan)


def _metadata(table: "DataFrame") -> dict[bytes, bytes]:
    return {_ROW_METADATA: table.schema.json().encode()}


def _collect_to_url(table: "DataFrame", inline: int, path: str, most: int) -> Collected:
    """Collect, or let Spark write to a URL: only Spark has the settings and libraries for that."""
    from pyspark import StorageLevel  # noqa: PLC0415

    table = table.persist(StorageLevel.DISK_ONLY)
    try:
        found = _Collector(table, inline, None, most, complete=True).collect()
        if found.table is not None:
            return found
        table.write.parquet(path)
        return Collected(found.rows, found.bytes, path=path)
    finally:
        table.unpersist()


class _Collector:
    """Runs the query in one Spark job and puts together what its tasks return."""

    def __init__(
        self, table: "DataFrame", inline: int, folder: Path | None, most: int, *, complete: bool = False
    ) -> None:
        self._table = table
        self._inline = inline
        self._folder = folder
        self._most = most
        self._complete = complete
        self._schema = _arrow_schema(table)

    def collect(self) -> Collected:
        """Run the query."""
        from pyspark import cloudpickle  # noqa: PLC0415

        staging = None if self._folder is None else str(self._folder / _STAGING)
        cloudpickle.register_pickle_by_value(tasks)  # type: ignore[no-untyped-call]  # executors may not have zmdp
        run = tasks.returning(
            self._schema.serialize().to_pybytes(), self._most, staging, _metadata(self._table), complete=self._complete
        )
        # Names may be repeated in a result, but not here.
        numbered = self._table.toDF(*(f"c{number}" for number in range(len(self._table.columns))))
        pieces = numbered.mapInArrow(run, tasks.PIECES).toArrow().to_pylist()
        pieces.sort(key=lambda piece: piece["part"])
        rows, size = (sum(piece[each] for piece in pieces) for each in ("rows", "bytes"))
        if size <= self._inline and (self._folder is not None or all(piece["data"] is not None for piece in pieces)):
            found = self._read(pieces)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            return Collected(rows, size, found)
        if self._folder is None:
            return Collected(rows, size)
        self._accept(pieces, self._folder)
        return Collected(rows, size, path=str(self._folder))

    def _read(self, pieces: list[dict[str, Any]]) -> "pa.Table":
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.ipc  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        found = [self._schema.empty_table()]
        for piece in pieces:
            if piece["data"] is not None:
                found.append(pa.ipc.open_stream(piece["data"]).read_all())
            elif self._folder is not None:
                read = pq.ParquetFile(self._folder / _STAGING / piece["file"]).read()
                found.append(read.cast(self._schema))
        return pa.concat_tables(found)

    def _accept(self, pieces: list[dict[str, Any]], folder: Path) -> None:
        """Keep the files of the tasks that Spark has accepted, and only those, in the order of the partitions."""
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.ipc  # noqa: PLC0415

        folder.mkdir(parents=True, exist_ok=True)
        for piece in pieces:
            path = folder / f"part-{piece['part']:05}.parquet"
            if piece["file"] is not None:
                (folder / _STAGING / piece["file"]).rename(path)
                continue
            with tasks.parquet_writer(str(path), self._schema, _metadata(self._table)) as writer:
                writer.write_table(pa.ipc.open_stream(piece["data"]).read_all())
        shutil.rmtree(folder / _STAGING, ignore_errors=True)


def _arrow_schema(table: "DataFrame") -> "pa.Schema":
    """Return the schema that `DataFrame.toArrow` returns."""
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    schema: pa.Schema = to_arrow_schema(table.schema, **zone)
    return schema

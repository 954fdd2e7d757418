"""What runs on executors to return a query's result: small partitions go to the driver, large ones into files.

Executors need PyArrow, but not zmdp: PySpark sends them this module's code, so it must not import zmdp.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

PIECES: Final = "part int, rows bigint, bytes bigint, file string, data binary"
"""Schema of what the tasks return, one row per partition that is not empty.

Either `data` has the partition as an Arrow IPC stream, or `file` names a file with it; neither, if it was too large and
there is no folder.
"""
ROW_GROUP_BYTES: Final = 8 << 20
SPREAD: Final = 8
"""Number of partitions that may pass equally much to the driver: the next so many a quarter, then a ninth, …"""
MIN_PASSED_BYTES: Final = 16 << 10


def passed_bytes(part: int, most: int) -> int:
    """Return how many bytes the partition may pass to the driver.

    A task does not know how many there are.  The shares fall with the square of the partition's number, so they sum up
    to less than 14 times `most`, plus the minimum per partition.
    """
    return max(int(most / (1 + part // SPREAD) ** 2), min(MIN_PASSED_BYTES, most))


def returning(
    schema: bytes, most: int, folder: str | None, *, alike: bool = False
) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    """Return the function for `mapInArrow`, whose result has the columns of `PIECES`.

    Args:
        schema: the Arrow schema of the result and of files, serialized.
        most: maximum number of bytes that a partition may pass to the driver.
        folder: where larger partitions are written as Parquet; None to leave them out.
        alike: whether each partition may pass `most` bytes, rather than later ones less.
    """

    def run(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.ipc  # noqa: PLC0415
        from pyspark import TaskContext  # noqa: PLC0415

        target = pa.ipc.read_schema(pa.py_buffer(schema))
        context: Any = TaskContext.get()
        part, attempt = context.partitionId(), context.taskAttemptId()
        limit = most if alike else passed_bytes(part, most)
        kept: list[pa.Table] = []
        size = rows = 0
        file = writer = None
        for batch in batches:
            table = pa.Table.from_arrays(batch.columns, names=target.names).cast(target)
            size, rows = size + table.nbytes, rows + table.num_rows
            kept.append(table)
            if size <= limit:
                continue
            if folder is None:
                break
            if writer is None:
                import pyarrow.parquet as pq  # noqa: PLC0415

                os.makedirs(folder, exist_ok=True)
                file = f"part-{part:05}-{attempt}.parquet"
                writer = pq.ParquetWriter(os.path.join(folder, file), target)
            if sum(each.nbytes for each in kept) >= ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(kept))
                kept.clear()
        if writer is not None:
            if kept:
                writer.write_table(pa.concat_tables(kept))
            writer.close()
        if rows:
            passed = stream(kept, target) if size <= limit else None
            row = {"part": part, "rows": rows, "bytes": size, "file": file, "data": passed}
            types = [pa.int32(), pa.int64(), pa.int64(), pa.string(), pa.binary()]
            yield pa.RecordBatch.from_pylist([row], pa.schema(list(zip(row, types, strict=True))))

    return run


def stream(tables: Sequence["pa.Table"], schema: "pa.Schema") -> bytes:
    """Return tables in the Arrow IPC stream format."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for table in tables:
            writer.write_table(table)
    return bytes(sink.getvalue())

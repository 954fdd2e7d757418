"""Return a query's result from the executors: partitions go to the driver, unless they are too large.

Executors need PyArrow, but not zmdp: PySpark sends them this module's code, so it must not import zmdp.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

PIECES: Final = "part int, rows bigint, bytes bigint, data binary"
"""Schema of the tasks' results, one row per partition that is not empty.

`data` has the partition as an Arrow IPC stream; if it is too large, there is none, and its rows are counted in part.
"""


def returning(schema: bytes, most: int) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    """Return the function for `mapInArrow`, whose result has the columns of `PIECES`.

    Args:
        schema: the Arrow schema of the result, serialized.
        most: maximum number of bytes that a partition may pass to the driver.
    """

    def run(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.ipc  # noqa: PLC0415
        from pyspark import TaskContext  # noqa: PLC0415

        target = pa.ipc.read_schema(pa.py_buffer(schema))
        context: Any = TaskContext.get()
        kept: list[pa.Table] = []
        size = rows = 0
        for batch in batches:
            table = pa.Table.from_arrays(batch.columns, names=target.names).cast(target)
            size, rows = size + table.nbytes, rows + table.num_rows
            if size > most:
                break
            kept.append(table)
        if rows:
            passed = stream(kept, target) if size <= most else None
            row = {"part": context.partitionId(), "rows": rows, "bytes": size, "data": passed}
            types = [pa.int32(), pa.int64(), pa.int64(), pa.binary()]
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

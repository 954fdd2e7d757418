"""The service `spark.fetch.NAME` of a batch, which sends large results to their owners.

    job [{"format": "arrow" | "json" | "csv", "position": …}]

The PARTIALs have the next rows; the FINAL is `{"job", "format", "rows", "next"}`, with the position for the next
request, or null at the end.  Since streams have no flow control, a request gets about `CHUNK_BYTES` only: callers ask
for more when they have read that.  Each PARTIAL has one frame: a message of the Arrow IPC stream format, or lines of
text.  All PARTIALs of a result, one after the other, are an Arrow IPC stream, JSON lines, or CSV with a header.  A
value that a job returned is sent as it is (`"format": "value"`).
"""

import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from ...mdp.codes import Code
from ...mdp.errors import ServiceError
from ...workers import Request
from ..reasons import reason
from .failures import check_owner, unprocessable
from .job_history import History
from .parsing import parsed
from .results.media import csv_rows
from .results.sending import json_text

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_BYTES: Final = 16 << 20
MESSAGE_BYTES: Final = 4 << 20
"""Maximum size of a PARTIAL's rows in Arrow, except for a single row."""
BATCH_ROWS: Final = 8192
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end of an Arrow IPC stream."""
_POSITION: Final = re.compile(r"(\d{1,15}):(\d{1,15})", re.ASCII)
"""FILE:ROW, a file of the result and a row in it; of a value, 0:BYTE."""


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["arrow", "json", "csv"] = "arrow"
    position: str | None = None


def handle(request: Request, history: History) -> Generator[bytes, None, bytes]:
    """Handle a request to the service."""
    if not 1 <= len(request) <= 2:
        raise unprocessable("expected a job's id and, optionally, settings as JSON")
    job = request[0].decode(errors="replace")
    settings = parsed(request[1:], _Settings, "the settings")
    format_ = str(settings.format)
    start = _POSITION.fullmatch(settings.position or "0:0")
    if start is None:
        raise unprocessable(f"position is {settings.position!r:.50}: use `next` of the previous answer")
    file, row = map(int, start.groups())
    record = find_result(history, job, request)
    found = f"the result of job {job} at {record['path']}"
    try:
        if record["format"] == "value":
            format_ = "value"
            rows, after = yield from _value(record["path"], row)
        else:
            rows, after = yield from _rows(record["path"], file, row, format_)
    except FileNotFoundError:
        raise ServiceError(Code.NO_WORKER, f"{found} has been deleted") from None
    except (OSError, ValueError, TypeError) as error:
        raise ServiceError(Code.FAILED, f"{found} cannot be sent as {format_}: {reason(error)}"[:1000]) from None
    return json.dumps({"job": job, "format": format_, "rows": rows, "next": after}).encode()


def find_result(history: History, job: str, caller: Request) -> dict[str, Any]:
    """Return the record of a job with a result in files.  Raises `ServiceError` 403, 404 or 422."""
    record = next(iter(history.rows(caller, job)), None)
    if record is None:
        raise ServiceError(Code.NO_WORKER, f"no job {job[:100]} in the history")
    check_owner(caller, job, record["user"], "fetch its result")
    if record["state"] != "done":
        raise unprocessable(f"job {job} has no result: it is {record['state']}")
    if record["path"] is None:
        raise unprocessable(f"the result of job {job} was small and sent with the reply; it is not kept here")
    return record


def _value(path: str, start: int) -> Generator[bytes, None, tuple[int, str | None]]:
    """Yield a part of a file, from byte `start` on.  Return 1, as of one row, and the position of the next part."""
    with Path(path).open("rb") as file:
        file.seek(start)
        yield file.read(MESSAGE_BYTES)
        return 1, f"0:{file.tell()}" if file.peek(1) else None


def _rows(path: str, file: int, row: int, format_: str) -> Generator[bytes, None, tuple[int, str | None]]:
    """Yield rows, from row `row` of the file numbered `file` on.  Return how many, and where to continue."""
    filesystem, files = _files(path)
    beginning = file == row == 0
    rows = size = 0
    for number in range(file, len(files)):
        for batch in _batches(filesystem, files[number], row):
            if beginning and rows == 0:
                yield from _header(batch.schema, format_)
            if size >= CHUNK_BYTES:
                return rows, f"{number}:{row}"
            for message in _split(batch):
                yield _rendered(message, format_)
            rows, row, size = rows + batch.num_rows, row + batch.num_rows, size + batch.nbytes
        row = 0
    if format_ == "arrow":
        yield END_OF_STREAM
    return rows, None


def _files(path: str) -> tuple[Any, list[str]]:
    """Return the file system and the names of a result's files, in the order of the rows."""
    import pyarrow.fs  # noqa: PLC0415

    # Hadoop's name of S3's file system is not PyArrow's.
    filesystem, folder = pyarrow.fs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(folder))
    names = [each.path for each in found if each.base_name.startswith("part-")]
    return filesystem, sorted(names, key=lambda name: (len(name), name))  # part-99999 before part-100000


def _batches(filesystem: Any, name: str, start: int) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of a file from row `start` on; the rows before are skipped without reading whole row groups."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    with filesystem.open_input_file(name) as source, pq.ParquetFile(source) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if rows <= start:
                start -= rows
                continue
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                rest = batch.slice(min(start, batch.num_rows))
                start = max(0, start - batch.num_rows)
                if rest.num_rows:
                    yield rest.replace_schema_metadata(None)


def _split(batch: "pa.RecordBatch") -> Iterator["pa.RecordBatch"]:
    if batch.nbytes <= MESSAGE_BYTES or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _split(batch.slice(0, half))
    yield from _split(batch.slice(half))


def _header(schema: "pa.Schema", format_: str) -> Iterator[bytes]:
    if format_ == "arrow":
        yield schema.serialize().to_pybytes()
    elif format_ == "csv":
        yield csv_rows(schema.empty_table())


def _rendered(batch: "pa.RecordBatch", format_: str) -> bytes:
    if format_ == "arrow":
        return bytes(batch.serialize())
    if format_ == "csv":
        return csv_rows(batch, header=False)
    return b"".join(json_text(row) + b"\n" for row in batch.to_pylist(maps_as_pydicts="lossy"))

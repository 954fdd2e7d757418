"""The service `spark.fetch.NAME` of a batch, which sends large results to those who own them.

    job [{"format": "arrow" | "json" | "csv", "position": …}]

The PARTIALs have the next rows; the FINAL is `{"job", "format", "rows", "next"}`, with the position for the next
request, or null at the end.  Since streams have no flow control, a request gets about `CHUNK_BYTES` only: callers ask
for more when they have read that.  Each PARTIAL has one frame: a message of the Arrow IPC stream format, or lines of
text.  All PARTIALs of a result, one after the other, are an Arrow IPC stream, JSON lines, or CSV with a header.  A
value that a job returned is sent as it is (`"format": "value"`).
"""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mdp.codes import Code
from ...mdp.errors import ServiceError
from ...workers import Request
from ..session import reason
from .collecting import local_path
from .history import History
from .jobs import parse_settings, unprocessable
from .results import json_text

if TYPE_CHECKING:
    import pyarrow as pa

FETCH_FORMATS: Final = ("arrow", "json", "csv")
CHUNK_BYTES: Final = 16 << 20
MESSAGE_BYTES: Final = 4 << 20
"""Maximum size of a PARTIAL's rows in Arrow, except for a single row."""
BATCH_ROWS: Final = 8192
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What ends an Arrow IPC stream."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where to continue: a file of the result, and a row in it; of a value, a byte."""

    file: int = 0
    row: int = 0

    @classmethod
    def parse(cls, text: object) -> "Position":
        """Parse what `str` returned, or None.  Raises `ServiceError` 422."""
        if text is None:
            return cls()
        file, colon, row = str(text).partition(":")
        if not (colon and all(each.isdecimal() and len(each) < 16 for each in (file, row))):
            raise unprocessable(f"position is {text!r:.50}: use `next` of the previous answer")
        return cls(int(file), int(row))

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


def handle(request: Request, history: History) -> Generator[bytes, None, bytes]:
    """Handle a request to the service."""
    if not 1 <= len(request) <= 2:
        raise unprocessable("expected a job's id and, optionally, settings as JSON")
    job = request[0].decode(errors="replace")
    settings = parse_settings(request[1:], {"format", "position"})
    format_ = settings.get("format", "arrow")
    if format_ not in FETCH_FORMATS:
        raise unprocessable(f"format must be one of {', '.join(FETCH_FORMATS)}")
    position = Position.parse(settings.get("position"))
    record = find_result(history, job, request)
    found = f"the result of job {job} at {record['path']}"
    try:
        if record["format"] == "value":
            format_ = "value"
            rows, position_after = yield from _value(record["path"], position)
        else:
            rows, position_after = yield from _rows(record["path"], position, format_)
    except FileNotFoundError:
        raise ServiceError(Code.NO_WORKER, f"{found} has been deleted") from None
    except (OSError, ValueError, TypeError) as error:
        raise ServiceError(Code.FAILED, f"{found} cannot be sent as {format_}: {reason(error)}"[:1000]) from None
    after = None if position_after is None else str(position_after)
    return json.dumps({"job": job, "format": format_, "rows": rows, "next": after}).encode()


def find_result(history: History, job: str, caller: Request) -> dict[str, Any]:
    """Return the record of a job with a result in files.  Raises `ServiceError` 403, 404 or 422."""
    record = history.find(job, caller)
    if record is None:
        raise ServiceError(Code.NO_WORKER, f"no job {job[:100]} in the history")
    if not caller.may_manage(record["user"]):
        raise ServiceError(
            Code.NOT_ALLOWED,
            f"job {job} belongs to {record['user']}; only {record['user']} or an admin can fetch its result",
        )
    if record["state"] != "done":
        raise unprocessable(f"job {job} has no result: it is {record['state']}")
    if record["path"] is None:
        raise unprocessable(f"the result of job {job} was small and sent with the reply; it is not kept here")
    return record


def _value(path: str, position: Position) -> Generator[bytes, None, tuple[int, Position | None]]:
    """Yield a part of a file."""
    with Path(path).open("rb") as file:
        file.seek(position.row)
        yield file.read(MESSAGE_BYTES)
        more = bool(file.peek(1))
        return 1, Position(0, file.tell()) if more else None


def _rows(path: str, start: Position, format_: str) -> Generator[bytes, None, tuple[int, Position | None]]:
    """Yield rows from `start` on.  Return how many, and where to continue."""
    filesystem, files = _files(path)
    rows = size = 0
    for number in range(start.file, len(files)):
        row = start.row if number == start.file else 0
        for batch in _batches(filesystem, files[number], row):
            if number == row == rows == 0:
                yield from _header(batch.schema, format_)
            if size >= CHUNK_BYTES:
                return rows, Position(number, row)
            for message in _split(batch):
                yield _rendered(message, format_)
            rows, row, size = rows + batch.num_rows, row + batch.num_rows, size + batch.nbytes
    if format_ == "arrow":
        yield END_OF_STREAM
    return rows, None


def _files(path: str) -> tuple[Any, list[str]]:
    """Return the file system and the names of a result's files, in the order of the rows."""
    import pyarrow.fs  # noqa: PLC0415

    local = local_path(path)
    if local is not None:
        filesystem, folder = pyarrow.fs.LocalFileSystem(), local
    else:  # Hadoop's name of S3's file system is not PyArrow's
        filesystem, folder = pyarrow.fs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(folder))
    return filesystem, sorted(each.path for each in found if each.base_name.startswith("part-"))


def _batches(filesystem: Any, name: str, start: int) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of a file from row `start` on; the rows before are skipped without reading whole row groups."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    with filesystem.open_input_file(name) as source, pq.ParquetFile(source) as file:
        skipped = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skipped + rows <= start:
                skipped += rows
                continue
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                rest = batch.slice(max(0, min(start - skipped, batch.num_rows)))
                skipped += batch.num_rows
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
        yield _csv(schema.empty_table(), header=True)


def _rendered(batch: "pa.RecordBatch", format_: str) -> bytes:
    import pyarrow as pa  # noqa: PLC0415

    if format_ == "arrow":
        return bytes(batch.serialize())
    if format_ == "csv":
        return _csv(pa.Table.from_batches([batch]), header=False)
    return b"".join(json_text(row) + b"\n" for row in batch.to_pylist(maps_as_pydicts="lossy"))


def _csv(table: "pa.Table", *, header: bool) -> bytes:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.csv  # noqa: PLC0415

    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(include_header=header))
    return bytes(sink.getvalue())

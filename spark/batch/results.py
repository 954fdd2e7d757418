"""What a job's result becomes: frames of a reply while it is small, else files in the folder for results.

A FINAL has two frames: a description, a JSON object, and the data, empty if `path` says where it is.

    {"job": id, "format": "json" | "arrow" | "parquet" | "value", "rows": n, "columns": [{"name", "type"}], "path": …}

`json` is a JSON array of objects, one a row; `arrow` Arrow's IPC stream; `parquet` a folder of files; `value` the JSON
of what a Python job returned that is no DataFrame.
"""

import base64
import json
import math
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from datetime import time as time_of_day
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mdp.codes import Code
from ...mdp.errors import ServiceError
from .jobs import not_taken

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TOO_MUCH: Final = "spark.driver.maxResultSize"
"""The setting that Spark names when the result of a job is larger than it allows."""
DEFAULT_INLINE: Final = 4 << 20
LARGEST_INLINE: Final = 32 << 20
"""Bytes; a message takes more, but whoever asks for so much is better off with files."""


@dataclass(frozen=True, slots=True)
class Results:
    """Where results go: up to `inline` bytes into the reply, larger ones into `folder`; with None they are refused."""

    folder: str | None
    inline: int = DEFAULT_INLINE

    def frames(self, result: object, job: str, format: str) -> list[bytes]:  # noqa: A002 - as callers name it
        """The frames of the FINAL: runs the job, if `result` is a DataFrame.

        Raises what Spark raises, `ServiceError` 413 for what is too large and has no folder to go to.
        """
        if hasattr(result, "toArrow"):
            return self._table(result, job, format)  # type: ignore[arg-type]  # Classic's or Connect's
        try:
            data = json.dumps(plain(result), ensure_ascii=False).encode(errors="replace")
        except (TypeError, ValueError, RecursionError) as error:
            raise ServiceError(
                Code.FAILED, f"the job returned a {type(result).__name__}: it takes a DataFrame, or a value for JSON "
                f"({error})"
            ) from None  # fmt: skip
        described: dict[str, Any] = {"job": job, "format": "value", "path": None}
        if len(data) <= self.inline:
            return [_json(described), data]
        folder = self._folder(len(data))
        if ":" in folder:
            raise ServiceError(
                Code.TOO_LARGE,
                f"the value has {len(data)} bytes, and up to {self.inline} are sent: return a DataFrame, which is "
                f"written to {folder}",
            )
        path = Path(folder) / f"{job}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return [_json({**described, "path": str(path)}), b""]

    def _table(self, table: "DataFrame", job: str, format: str) -> list[bytes]:  # noqa: A002
        columns = [{"name": each.name, "type": each.dataType.simpleString()} for each in table.schema.fields]
        if format == "json" and len({each["name"] for each in columns}) < len(columns):
            raise not_taken("two columns have one name, which JSON's objects cannot have: name them with AS")
        described: dict[str, Any] = {"job": job, "format": format, "rows": 0, "columns": columns, "path": None}
        # Run once, with no look at the size before: Spark itself ends it when there is too much for the driver.
        try:
            found = table.toArrow()
        except Exception as error:
            if _TOO_MUCH not in str(error):
                raise
            path = f"{self._folder()}/{job}"
            table.write.parquet(path)
            rows = table.sparkSession.read.parquet(path).count()
            return [_json({**described, "format": "parquet", "rows": rows, "path": path}), b""]
        described["rows"] = found.num_rows
        if found.nbytes <= 4 * self.inline:
            data = arrow_stream(found) if format == "arrow" else json_rows(found)
            if len(data) <= self.inline:
                return [_json(described), data]
        path = f"{self._folder(found.nbytes)}/{job}"
        table.sparkSession.createDataFrame(found, schema=table.schema).write.parquet(path)
        return [_json({**described, "format": "parquet", "path": path}), b""]

    def _folder(self, size: int | None = None) -> str:
        if self.folder is None:
            has = "too much for the driver" if size is None else f"{size} bytes"
            raise ServiceError(
                Code.TOO_LARGE,
                f"the result has {has}, and up to {self.inline} bytes are sent: ask for less, or start the batch "
                "with --results FOLDER, where larger ones go",
            )
        return self.folder.rstrip("/")

    def sweep(self, older_than: float) -> int:
        """Delete results older than so many seconds, in a folder on this machine; returns how many."""
        folder = Path(self.folder) if self.folder is not None and ":" not in self.folder else None
        if folder is None or not folder.is_dir():
            return 0
        swept = 0
        for each in folder.iterdir():
            if _is_result(each):
                with suppress(OSError):  # another driver sweeps it, or somebody else has
                    if time.time() - each.stat().st_mtime > older_than:
                        shutil.rmtree(each) if each.is_dir() else each.unlink()
                        swept += 1
        return swept


def _is_result(path: Path) -> bool:
    """Whether it has the name of a job: nothing else in that folder is ours to delete."""
    return len(path.stem) == JOB_LENGTH and all(each in "0123456789abcdef" for each in path.stem)


JOB_LENGTH: Final = 16
"""Hex digits of a job's id."""


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def arrow_stream(table: Any) -> bytes:
    """An Arrow table in Arrow's IPC stream format."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def json_rows(table: Any) -> bytes:
    """An Arrow table as a JSON array of objects.

    Dates and times are ISO 8601, decimals, NaN and infinities texts, binaries base64, maps objects.
    """
    rows = [plain(row) for row in table.to_pylist(maps_as_pydicts="lossy")]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def plain(value: Any) -> Any:
    """`value` as JSON has it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | time_of_day) else str(value)

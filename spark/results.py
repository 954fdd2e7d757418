"""What a job's result becomes: frames of a reply while it is small, else files in the folder for results.

A FINAL has two frames: a description, a JSON object, and the data, empty if `path` says where it is.

    {"job": id, "format": "json" | "arrow" | "parquet" | "value", "rows": n, "columns": [{"name", "type"}], "path": …}

`json` is a JSON array of objects, one a row; `arrow` Arrow's IPC stream; `parquet` a folder of files; `value` the JSON
of what a Python job returned that is no DataFrame.
"""

import json
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..mdp.codes import Code
from ..mdp.errors import ServiceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
        if hasattr(result, "toArrow") and hasattr(result, "persist"):
            return self._table(result, job, format)  # type: ignore[arg-type]  # Classic's or Connect's
        try:
            data = json.dumps(result, ensure_ascii=False, default=str).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ServiceError(
                Code.FAILED, f"the job returned a {type(result).__name__}: it takes a DataFrame, or a value for JSON "
                f"({error})"
            ) from None  # fmt: skip
        described: dict[str, Any] = {"job": job, "format": "value", "path": None}
        if len(data) <= self.inline:
            return [_json(described), data]
        path = Path(self._folder(len(data))) / f"{job}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return [_json({**described, "path": str(path)}), b""]

    def _table(self, table: "DataFrame", job: str, format: str) -> list[bytes]:  # noqa: A002
        from pyspark.sql import functions as f  # noqa: PLC0415

        columns = [{"name": each.name, "type": each.dataType.simpleString()} for each in table.schema.fields]
        # Kept while it is looked at: a plan that is run twice may give two results, and takes twice as long.
        kept = table.persist()
        try:
            as_json = f.to_json(f.struct("*"), {"ignoreNullFields": "false"}) if columns else f.lit("{}")
            rows, size = kept.agg(f.count(f.lit(1)), f.sum(f.octet_length(as_json) + 1)).collect()[0]
            described: dict[str, Any] = {"job": job, "format": format, "rows": rows, "columns": columns, "path": None}
            if (size or 0) <= self.inline:
                if format == "arrow":
                    data = _arrow(kept)
                else:
                    data = b"[" + ",".join(row[0] for row in kept.select(as_json).collect()).encode() + b"]"
                if len(data) <= LARGEST_INLINE:
                    return [_json(described), data]
            path = f"{self._folder(size)}/{job}"
            kept.write.parquet(path)
            return [_json({**described, "format": "parquet", "path": path}), b""]
        finally:
            with suppress(Exception):  # the session may be gone
                kept.unpersist()

    def _folder(self, size: int) -> str:
        if self.folder is None:
            raise ServiceError(
                Code.TOO_LARGE,
                f"the result has {size} bytes, and up to {self.inline} are sent: ask for less, or have the batch "
                "started with --results FOLDER, where larger ones go",
            )
        return self.folder.rstrip("/")

    def sweep(self, older_than: float) -> int:
        """Delete results older than so many seconds, in a folder on this machine; returns how many."""
        folder = Path(self.folder) if self.folder is not None and ":" not in self.folder else None
        if folder is None or not folder.is_dir():
            return 0
        old = [
            each for each in folder.iterdir() if _is_result(each) and time.time() - each.stat().st_mtime > older_than
        ]
        for each in old:
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
        return len(old)


def _is_result(path: Path) -> bool:
    """Whether it has the name of a job: nothing else in that folder is ours to delete."""
    return len(path.stem) == JOB_LENGTH and all(each in "0123456789abcdef" for each in path.stem)


JOB_LENGTH: Final = 16
"""Hex digits of a job's id."""


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _arrow(table: "DataFrame") -> bytes:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415

    found = table.toArrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, found.schema) as writer:
        writer.write_table(found)
    return bytes(sink.getvalue())

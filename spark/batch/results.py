"""Turn a job's result into the frames of a reply, or into files if it is too large.

A FINAL has two frames: a description, which is a JSON object, and the data, which is empty if `path` is set.

    {"job": id, "format": …, "rows": n, "columns": [{"name", "type"}], "path": …}

The format `json` is an array of objects, one per row; `arrow` an Arrow IPC stream; `csv` lines, the first of which has
the names; `parquet` a folder of files; `value` the JSON value that a Python job returned instead of a DataFrame.
"""

import base64
import json
import math
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from datetime import time as time_of_day
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mdp.codes import Code
from ...mdp.errors import ServiceError, flaw
from .collecting import collect, is_url, write
from .jobs import unprocessable
from .media import csv_rows
from .tasks import stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DEFAULT_INLINE_BYTES: Final = 4 << 20
MAX_INLINE_BYTES: Final = 32 << 20
"""A message can be larger, but results of this size are better read from files."""
JOB_LENGTH: Final = 16
"""Number of hex digits in a job's id."""
_JOB: Final = re.compile(f"[0-9a-f]{{{JOB_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class Results:
    """Results up to `inline` bytes go into the reply, larger ones into `folder`; if that is None, they are refused."""

    folder: str | None
    inline: int = DEFAULT_INLINE_BYTES

    def frames(self, result: object, job: str, format: str) -> list[bytes]:  # noqa: A002 - the name of the setting
        """Return the frames of the FINAL; if `result` is a DataFrame, this runs the job.

        Raises what Spark raises, and `ServiceError` 413 if the result is too large and there is no folder.
        """
        if hasattr(result, "toArrow"):
            return self._table(result, job, format)  # type: ignore[arg-type]  # Classic's or Connect's
        try:
            data = json.dumps(plain(result), ensure_ascii=False).encode(errors="replace")
        except (TypeError, ValueError, RecursionError) as error:
            raise ServiceError(
                Code.FAILED, f"the job returned a {type(result).__name__}; return a DataFrame or a value for "
                f"JSON ({flaw(error)})"
            ) from None  # fmt: skip
        description: dict[str, Any] = {"job": job, "format": "value", "path": None}
        if len(data) <= self.inline:
            return [_json(description), data]
        if self.folder is None:
            raise self._too_large(len(data))
        if is_url(self.folder):
            raise ServiceError(
                Code.TOO_LARGE,
                f"the value has {len(data)} bytes, more than the {self.inline} that can be sent; return a DataFrame "
                f"instead, which is written to {self.folder}",
            )
        path = Path(self.folder, f"{job}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return [_json({**description, "path": str(path)}), b""]

    def _table(self, table: "DataFrame", job: str, format: str) -> list[bytes]:  # noqa: A002
        columns = [{"name": each.name, "type": each.dataType.simpleString()} for each in table.schema.fields]
        if format == "json" and len({each["name"] for each in columns}) < len(columns):
            raise unprocessable(
                "two columns have the same name, which a JSON object cannot represent; rename one with AS"
            )
        repeated = len({each["name"].lower() for each in columns}) < len(columns)
        path = None if self.folder is None or repeated else os.path.join(self.folder, job)
        collected = collect(table, self.inline, path)
        found, size = collected.table, collected.bytes
        description = {"job": job, "format": format, "rows": collected.rows, "columns": columns, "path": None}
        if found is not None and found.nbytes <= 4 * self.inline:
            data = _rendered(found, format)
            if len(data) <= self.inline:
                return [_json(description), data]
            size = max(size, len(data))
        if self.folder is None:
            raise self._too_large(size)
        if path is None:
            raise unprocessable("two columns have the same name, which Parquet cannot represent; rename one with AS")
        if found is not None:
            write(found, path, table)
        return [_json({**description, "format": "parquet", "path": path}), b""]

    def _too_large(self, size: int) -> ServiceError:
        return ServiceError(
            Code.TOO_LARGE,
            f"the result has {size} bytes or more; at most {self.inline} bytes can be sent. Select less, or start "
            "the batch with --results FOLDER to have larger results written there",
        )

    def delete_old(self, older_than: float) -> None:
        """Delete results older than `older_than` seconds, if the folder is local."""
        if self.folder is None or is_url(self.folder) or not Path(self.folder).is_dir():
            return
        for each in Path(self.folder).iterdir():
            if _JOB.fullmatch(each.stem):  # other files in the folder are not ours to delete
                with suppress(OSError):  # another driver may have deleted it
                    if time.time() - each.stat().st_mtime > older_than:
                        shutil.rmtree(each) if each.is_dir() else each.unlink()


def _rendered(table: Any, format: str) -> bytes:  # noqa: A002
    if format == "arrow":
        return stream([table], table.schema)
    if format == "json":
        return json_rows(table)
    try:
        return csv_rows(table)
    except (ValueError, TypeError, NotImplementedError) as error:  # PyArrow's are of these types too
        raise unprocessable(f"the rows cannot be written as CSV: {error}; ask for JSON or Arrow") from None


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def json_rows(table: Any) -> bytes:
    """Return an Arrow table as a JSON array of objects.

    Dates and times become ISO 8601, decimals, NaN and infinities strings, binary values base64, maps objects.
    """
    return json_text(table.to_pylist(maps_as_pydicts="lossy"))


def json_text(value: Any) -> bytes:
    """Return Python values of an Arrow table, or a row, as JSON."""
    try:
        text = _ENCODER.encode(value)
    except (ValueError, TypeError):  # NaN, or a map whose keys are not strings
        text = _ENCODER.encode(plain(value))
    return text.encode(errors="replace")


def plain(value: Any) -> Any:
    """Convert `value` to what JSON can represent."""
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


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain)
"""Converts in C what JSON can represent, and the rest with `plain`."""

"""Turn a job's result into the frames of a reply, or into files if it is too large.

A FINAL has two frames: a description, which is a JSON object, and the data, which is empty if `path` is set.

    {"job": id, "format": …, "rows": n, "columns": [{"name", "type"}], "path": …}

The format `json` is an array of objects, one per row; `arrow` an Arrow IPC stream; `csv` lines, the first of which has
the names; `parquet` a folder of files; `value` the JSON value that a Python job returned instead of a DataFrame.
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ....mdp.codes import Code
from ....mdp.errors import ServiceError
from ...client.sql_values import plain
from ..failures import unprocessable
from .collecting import collect, is_url, write
from .media import csv_rows
from .tasks import stream

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_INLINE_BYTES: Final = 4 << 20
MAX_INLINE_BYTES: Final = 32 << 20
"""A message can be larger, but results of this size are better read from files."""
JOB_LENGTH: Final = 16
"""Number of hex digits in a job's id."""
_SELECT_LESS: Final = "Select less, or start the batch with --results FOLDER to have larger results written there"
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
        data = _json(plain(result, where="the job's result"))
        description: dict[str, Any] = {"job": job, "format": "value", "path": None}
        if len(data) <= self.inline:
            return [_json(description), data]
        if self.folder is None:
            raise self._too_large(len(data))
        if is_url(self.folder):
            raise self._too_large(len(data), f"Return a DataFrame instead, which is written to {self.folder}")
        path = Path(self.folder, f"{job}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return [_json({**description, "path": str(path)}), b""]

    def yielded(self, value: object, format: str) -> tuple[dict[str, Any], list[bytes]]:  # noqa: A002
        """Return the fields of the event about a value that a job yielded, and further frames of its PARTIAL.

        Of a table, an Arrow IPC stream, or its rows as a value.  Raises as `frames`, and `ServiceError` 413 for a table
        that is too large.
        """
        table = sendable(value).toArrow() if hasattr(value, "toArrow") else as_arrow(value)  # type: ignore[arg-type]
        if table is None:
            return {"value": plain(value, where="a yielded value")}, []
        if table.nbytes > self.inline:
            raise ServiceError(
                Code.TOO_LARGE,
                f"a yielded table has {table.nbytes} bytes; at most {self.inline} can be sent at a time: yield it in "
                "parts, or return it",
            )
        if format != "arrow":
            return {"value": json.loads(json_rows(table))}, []
        columns = [{"name": each.name, "type": str(each.type)} for each in table.schema]
        described = {"format": "arrow", "rows": table.num_rows, "columns": columns}
        return described, [stream([table], table.schema)]

    def _table(self, table: "DataFrame", job: str, format: str) -> list[bytes]:  # noqa: A002
        table = sendable(table)
        columns = [{"name": each.name, "type": each.dataType.simpleString()} for each in table.schema.fields]
        path = None if self.folder is None else os.path.join(self.folder, job)
        collected = collect(table, self.inline, path)
        found, size = collected.table, collected.bytes
        description = {"job": job, "format": format, "rows": collected.rows, "columns": columns, "path": None}
        if found is not None and found.nbytes <= 4 * self.inline:
            data = _rendered(found, format)
            if len(data) <= self.inline:
                return [_json(description), data]
            size = max(size, len(data))
        if path is None:
            raise self._too_large(size)
        if found is not None:
            write(found, path, table)
        return [_json({**description, "format": "parquet", "path": path}), b""]

    def _too_large(self, size: int, remedy: str = _SELECT_LESS) -> ServiceError:
        text = f"the result has {size} bytes or more; at most {self.inline} bytes can be sent. {remedy}"
        return ServiceError(Code.TOO_LARGE, text)

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


def as_arrow(value: object) -> "pa.Table | None":
    """Return a table of pandas or Arrow as Arrow's; None if the value is something else.  Raises `ServiceError` 422."""
    pyarrow, pandas = sys.modules.get("pyarrow"), sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        import pyarrow as pa  # noqa: PLC0415

        check_columns(value.columns)
        return pa.Table.from_pandas(value, preserve_index=False).replace_schema_metadata(None)
    if pyarrow is not None and isinstance(value, pyarrow.RecordBatch):
        value = pyarrow.Table.from_batches([value])
    if pyarrow is None or not isinstance(value, pyarrow.Table):
        return None
    check_columns(value.column_names)
    return value


def as_dataframe(spark: "SparkSession", value: object) -> object:
    """Return a table of pandas or Arrow as a DataFrame of Spark's, and anything else as it is."""
    table = as_arrow(value)
    return value if table is None else spark.createDataFrame(table)


def sendable(table: "DataFrame") -> "DataFrame":
    """Return a DataFrame that can be collected with Arrow.  Raises `ServiceError` 422, whatever its size and format."""
    from pyspark.sql.types import StructType  # noqa: PLC0415

    from ...python import readable_type  # noqa: PLC0415

    check_columns(table.columns)
    try:
        kinds = [readable_type(each.dataType, f"column {each.name}") for each in table.schema.fields]
    except TypeError as error:
        raise unprocessable(str(error)) from None
    if kinds == [each.dataType for each in table.schema.fields]:
        return table
    schema = StructType()
    for each, kind in zip(table.schema.fields, kinds, strict=True):
        schema.add(each.name, kind)
    return table.to(schema)


def check_columns(names: Iterable[object]) -> None:
    """Raise `ServiceError` 422 for a result that JSON or Parquet could not represent, whatever its size and format."""
    seen: set[str] = set()
    for name in map(str, names):
        if name.lower() in seen:
            raise unprocessable(f"two columns have the name {name!r:.100} (case does not count); rename one with AS")
        seen.add(name.lower())
    if not seen:
        raise unprocessable("the result has no columns; select at least one")


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def json_rows(table: Any) -> bytes:
    """Return an Arrow table as a JSON array of objects.

    Dates, times and intervals become ISO 8601, decimals, NaN and infinities strings, binary values base64, and maps
    objects.
    """
    return json_text(table.to_pylist(maps_as_pydicts="lossy"))


def json_text(value: Any) -> bytes:
    """Return Python values of an Arrow table, or a row, as JSON."""
    try:
        text = _ENCODER.encode(value)
    except (ValueError, TypeError):  # NaN, or a map whose keys are not strings
        text = _ENCODER.encode(plain(value))
    return text.encode(errors="replace")


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain)
"""Encodes JSON's own types in C, and converts all others with `plain`."""

"""The columns of requests as the database has them, and as readers want them."""

import json
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from ....mdp.errors import SettingError
from .packing import UUID_BYTES, hexadecimal, unpack_bodies

_TIME: Final = pa.timestamp("us", "UTC")
_FRAMES: Final = pa.list_(pa.binary())
REQUESTS: Final = pa.schema({
    "id": pa.int64(), "uuid": pa.string(), "service": pa.string(), "owner": pa.string(), "state": pa.string(),
    "priority": pa.int32(), "created": _TIME, "due": _TIME, "started": _TIME, "finished": _TIME, "expires": _TIME,
    "attempts": pa.int32(), "failures": pa.int32(), "retries": pa.int32(), "key": pa.string(),
    "headers": pa.map_(pa.string(), pa.string()), "code": pa.int32(), "error": pa.string(),
    "request": _FRAMES, "reply": _FRAMES,
})  # fmt: skip
"""The columns that can be read, and their types; `request` and `reply` may be binary or string instead."""
BODY_COLUMNS: Final = {"request": "body", "reply": "reply"}
"""The columns that hold frames, and their names in the database."""


def stored(name: str) -> str:
    """Return the name that a column has in the database."""
    return BODY_COLUMNS.get(name, name)


def check_columns(schema: pa.Schema) -> None:
    """Raise `SettingError` if the schema has an unknown column, or a column of the wrong type."""
    for field in schema:
        if field.name not in REQUESTS.names:
            raise SettingError(f"titanic has no column {field.name!r}; available columns: {', '.join(REQUESTS.names)}")
        wanted = [REQUESTS.field(field.name).type]
        if field.name in BODY_COLUMNS:
            wanted += [pa.binary(), pa.string()]
        if field.type not in wanted:
            allowed = " or ".join(str(kind) for kind in wanted)
            raise SettingError(f"titanic's column {field.name} cannot be read as {field.type}; use {allowed}")


def convert_batch(batch: pa.RecordBatch, arrow: pa.Schema) -> pa.RecordBatch:
    """Convert a batch from the database to the columns and types of `arrow`."""
    if not arrow.names:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    arrays = [_converted(field.name, batch.column(stored(field.name)), field.type) for field in arrow]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _converted(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    if values.null_count == len(values):
        return pa.nulls(len(values), kind)
    if name in BODY_COLUMNS:
        return unpack_bodies(values, kind)
    if pa.types.is_timestamp(kind):
        return pc.round(pc.multiply(values, 1e6)).cast(pa.int64()).cast(kind)
    if pa.types.is_map(kind):
        return pa.array([None if text is None else list(json.loads(text).items()) for text in values.to_pylist()], kind)
    return hexadecimal(values, UUID_BYTES) if pa.types.is_binary(values.type) else values.cast(kind)

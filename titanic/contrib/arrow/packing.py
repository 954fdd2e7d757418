"""Convert whole columns of bodies between Arrow and the form of the database (titanic/api/submission.py)."""

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...api.submission import LENGTH_BYTES, unpack

UUID_BYTES: Final = 16
_LENGTHS: Final = ">u4"
"""The type of the lengths before frames: four bytes, big-endian."""


def pack_bodies(bodies: pa.Array) -> pa.Array:
    """Return `bodies` as database values.  Each is a frame, as text or bytes, or a list of frames; none is NULL."""
    lists = pa.types.is_list(bodies.type)
    frames = (bodies.flatten() if lists else bodies).cast(pa.binary())
    lengths = pc.binary_length(frames).to_numpy(zero_copy_only=False).astype(_LENGTHS)
    framed = pc.binary_join_element_wise(binary(lengths.tobytes(), LENGTH_BYTES), frames, b"")
    if not lists:
        return framed
    ends = np.cumsum(pc.list_value_length(bodies).to_numpy(zero_copy_only=False))
    return pc.binary_join(pa.ListArray.from_arrays(_offsets(ends), framed), b"")


def unpack_bodies(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return database values as lists of frames, or as only the first frame of each, as bytes or text."""
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), kind)
    single = _single_frames(values)
    if pa.types.is_list(kind):
        if single is None:
            return pa.array([None if value is None else unpack(value) for value in values.to_pylist()], kind)
        filled = pc.is_valid(single)
        ends = np.cumsum(filled.to_numpy(zero_copy_only=False))
        return pa.ListArray.from_arrays(_offsets(ends), single.drop_null(), mask=values.is_null()).cast(kind)
    if single is None:
        single = pa.array([unpack(value)[0] if value else None for value in values.to_pylist()], pa.binary())
    if not pa.types.is_string(kind):
        return single
    try:
        return single.cast(kind)
    except pa.ArrowInvalid:  # not UTF-8
        texts = (None if frame is None else frame.decode(errors="replace") for frame in single.to_pylist())
        return pa.array(texts, kind)


def binary(data: bytes, width: int) -> pa.Array:
    """Return bytes as values of `width` bytes each."""
    count = len(data) // width
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def hexadecimal(values: pa.Array, width: int) -> pa.Array:
    """Return values of `width` bytes each, without NULLs, as hex digits."""
    data = values.buffers()[2].slice(values.offset * width, len(values) * width)
    return binary(data.to_pybytes().hex().encode(), 2 * width).cast(pa.string())


def _single_frames(values: pa.Array) -> pa.Array | None:
    """Return the only frame of each body, NULL if it has none; or None if a body has more."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    sizes = np.diff(offsets)
    filled = sizes > 0
    starts = offsets[:-1][filled]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    prefixes = starts[:, None] + np.arange(LENGTH_BYTES)
    if (data[prefixes].view(_LENGTHS)[:, 0] + LENGTH_BYTES != sizes[filled]).any():
        return None
    kept = np.ones(len(data), bool)
    kept[prefixes] = False
    frames = data[offsets[0] : offsets[-1]][kept[offsets[0] : offsets[-1]]]
    ends = np.cumsum(sizes - LENGTH_BYTES * filled)
    found = pa.Array.from_buffers(pa.binary(), len(values), [None, _offsets(ends).buffers()[1], pa.py_buffer(frames)])
    return found if filled.all() else pc.if_else(pa.array(filled), found, pa.scalar(None, pa.binary()))


def _offsets(ends: Any) -> pa.Array:
    return pa.array(np.concatenate([[0], ends]), pa.int32())

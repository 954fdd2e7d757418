"""Codecs: values instead of frames, if client and worker use the same codec.

On the wire a body is always a list of frames.  A codec converts values to frames and back: `json` (built in), `msgpack`
and `arrow` (if installed), or any object with the two methods of `Codec`.  Pickle is not supported, because it would
let callers run code in a worker.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from .builtin_values import as_builtin
from .errors import CodecError, SettingError
from .program.extras import install_command


class Codec(Protocol):
    """Converts values to frames and back."""

    def encode(self, value: Any) -> list[bytes]:
        """Return the frames of `value`.  Raises any exception if it cannot be encoded."""

    def decode(self, frames: Sequence[bytes]) -> Any:
        """Return the value in `frames`.  Raises any exception if they cannot be decoded."""


class _Json:
    """One frame of JSON in UTF-8.

    Dataclasses become objects, sets become arrays, bytes become Base64, and numbers that JSON lacks become null.
    """

    def encode(self, value: Any) -> list[bytes]:
        return [msgspec.json.encode(value, enc_hook=as_builtin)]

    def decode(self, frames: Sequence[bytes]) -> Any:
        return msgspec.json.decode(_only(frames))


class _Msgpack:
    """One frame of MessagePack."""

    def __init__(self) -> None:
        import msgpack  # noqa: PLC0415 - an optional dependency

        self._pack, self._unpack = msgpack.packb, msgpack.unpackb

    def encode(self, value: Any) -> list[bytes]:
        return [self._pack(value, default=as_builtin)]

    def decode(self, frames: Sequence[bytes]) -> Any:
        return self._unpack(_only(frames))


class _Arrow:
    """One frame of Arrow's IPC stream format; values are tables, and anything that `pyarrow.table` accepts.

    None, with which a stream may end, is an empty frame.
    """

    def __init__(self) -> None:
        import pyarrow as pa  # noqa: PLC0415 - an optional dependency
        import pyarrow.ipc  # noqa: PLC0415

        self._pa = pa

    def encode(self, value: Any) -> list[bytes]:
        pa = self._pa
        if value is None:
            return [b""]
        if isinstance(value, pa.RecordBatch):
            value = pa.Table.from_batches([value])
        table = value if isinstance(value, pa.Table) else pa.table(value)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return [sink.getvalue().to_pybytes()]

    def decode(self, frames: Sequence[bytes]) -> Any:
        if not _only(frames):
            return None
        with self._pa.ipc.open_stream(_only(frames)) as reader:
            return reader.read_all()


def _only(frames: Sequence[bytes]) -> bytes:
    if len(frames) != 1:
        raise ValueError(f"expected one value, got {len(frames)} frames")
    return frames[0]


_FRAME: Final = (bytes, bytearray, memoryview)
_KINDS: Final[dict[str, type[Codec]]] = {"json": _Json, "msgpack": _Msgpack, "arrow": _Arrow}
_made: dict[str, Codec] = {}


class Coder:
    """A codec whose failures are `CodecError`s that say what is wrong."""

    def __init__(self, codec: "str | Codec") -> None:
        self.name = codec if isinstance(codec, str) else type(codec).__name__
        self._codec = _named(codec) if isinstance(codec, str) else codec
        if not (hasattr(self._codec, "encode") and hasattr(self._codec, "decode")):
            raise SettingError(_invalid(codec))

    def encode(self, value: Any) -> list[bytes]:
        """Return the frames of `value`.  Raises `CodecError`."""
        try:
            frames = self._codec.encode(value)
        except Exception as error:
            raise CodecError(f"{value!r:.100} cannot be sent as {self.name}: {_text(error)}") from error
        if not isinstance(frames, list | tuple) or not all(isinstance(frame, _FRAME) for frame in frames):
            raise CodecError(f"{self.name}.encode() returned {frames!r:.100}: expected a list of bytes")
        return [bytes(frame) for frame in frames] or [b""]  # the protocol requires at least one frame

    def decode(self, frames: Sequence[bytes]) -> Any:
        """Return the value in `frames`.  Raises `CodecError`."""
        try:
            return self._codec.decode(frames)
        except Exception as error:
            raise CodecError(f"the body cannot be read as {self.name}: {_text(error)}") from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _invalid(codec: object) -> str:
    return f"codec is {codec!r}: it must be one of {', '.join(_KINDS)}, or an object with encode() and decode()"


def _named(name: str) -> Codec:
    kind = _KINDS.get(name)
    if kind is None:
        raise SettingError(_invalid(name))
    if name not in _made:
        try:
            _made[name] = kind()
        except ImportError as error:
            raise SettingError(f"codec {name!r} needs a package: {install_command(name)} ({error})") from None
    return _made[name]

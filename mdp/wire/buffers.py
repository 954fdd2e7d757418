"""Read and write big-endian integers, and write bytes, at a position of a buffer.

    get16(data, at)  get32  get64            return the integer of 16, 32 or 64 bits at `at`
    put16(data, at, value)  put32  put64     write an integer
    get_bytes(data, begin, end)              return the bytes between two positions
    put_bytes(data, at, value)               write bytes

`buffers.pxd` has the same functions in C, for `batch` if it is compiled.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_U64: Final = Struct(">Q")


def get16(data: bytes, at: int) -> Any:  # noqa: D103 - see above
    return _U16.unpack_from(data, at)[0]


def get32(data: bytes, at: int) -> Any:  # noqa: D103
    return _U32.unpack_from(data, at)[0]


def get64(data: bytes, at: int) -> Any:  # noqa: D103
    return _U64.unpack_from(data, at)[0]


def get_bytes(data: bytearray, begin: int, end: int) -> bytes:  # noqa: D103
    return bytes(data[begin:end])


put16: Final[Callable[[bytearray, int, int], None]] = _U16.pack_into
put32: Final[Callable[[bytearray, int, int], None]] = _U32.pack_into
put64: Final[Callable[[bytearray, int, int], None]] = _U64.pack_into


def put_bytes(data: bytearray, at: int, value: bytes) -> None:  # noqa: D103
    data[at : at + len(value)] = value

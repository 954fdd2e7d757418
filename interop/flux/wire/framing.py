"""The framing of Flux messages on a UNIX socket (RFC 3, "Message Framing and Security").

    message := magic length part…            length: u32 big-endian, of the parts with their sizes
    part    := u8 size, bytes                of up to 254 bytes
             | FF u32 size, bytes            larger

RFC 3 has the magic in network byte order, `FF EE 00 12`.  flux-core writes it in the order of its host, so on x86 it is
`12 00 EE FF`.  Both are taken, and each peer is to be answered in the order that it uses itself.
"""

import sys
from collections.abc import Iterable
from struct import Struct
from typing import Final, Literal

from .messages import MAX_PARTS, Invalid, Parts

ByteOrder = Literal["big", "little"]
BIG: Final = "big"
LITTLE: Final = "little"
HOST_ORDER: Final[ByteOrder] = sys.byteorder

MAX_MESSAGE: Final = 64 << 20
"""The default limit for the length of a message in bytes."""
PREFIX_SIZE: Final = 8

_MAGIC: Final = {BIG: b"\xff\xee\x00\x12", LITTLE: b"\x12\x00\xee\xff"}
_MAGIC_BIG: Final = 0xFFEE0012
_MAGIC_LITTLE: Final = 0x1200EEFF
_PREFIX: Final = Struct(">II")
_U32: Final = Struct(">I")
_LONG: Final = 0xFF
"""In place of the size of a part: the size follows."""
_SIZES: Final = tuple(bytes([size]) for size in range(_LONG))


def encode(parts: Iterable[bytes], order: ByteOrder = HOST_ORDER) -> bytes:
    """Return the message of `parts` as it goes over the socket.

    Raises `struct.error` if it has 4 GiB or more.
    """
    pieces = [_MAGIC[order], b""]
    for part in parts:
        size = len(part)
        pieces.append(_SIZES[size] if size < _LONG else b"\xff" + _U32.pack(size))
        pieces.append(part)
    pieces[1] = _U32.pack(sum(map(len, pieces)) - 4)
    return b"".join(pieces)


class Decoder:
    """Divide the bytes that a peer sends into messages.

    Call `feed` with the bytes that arrive, then `next` until it returns None.  Only bytes that have arrived are
    buffered, whatever lengths the peer announces.
    """

    def __init__(self, max_message: int = MAX_MESSAGE, max_parts: int = MAX_PARTS) -> None:
        self.order: ByteOrder = HOST_ORDER
        """The byte order of the peer's latest magic."""
        self._max_message = max_message
        self._max_parts = max_parts
        self._buffer: bytes | bytearray = b""  # the fed bytes themselves if nothing was buffered
        self._at = 0
        """Where the next message begins in the buffer."""
        self._needed = PREFIX_SIZE
        """Size of the next message, or of its prefix while the size is unknown."""
        self._invalid: Invalid | None = None

    @property
    def buffered(self) -> int:
        """The bytes of messages that were not returned yet."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._invalid is not None:
            return
        if not self.buffered:
            self._buffer = data
            self._at = 0
            return
        self._forget_returned()
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer)
        self._buffer += data

    def discard(self) -> None:
        """Free the buffer.  The stream has ended."""
        self._end("the stream has ended")

    def next(self) -> Parts | Invalid | None:
        """Return the parts of the next message, or None if it has not arrived completely.

        Return `Invalid` if the bytes are not a message.  The start of the next one is then unknown, so everything
        that follows is ignored, and further calls return the same.
        """
        if self._invalid is not None:
            return self._invalid
        if self._needed == PREFIX_SIZE and (reason := self._read_prefix()):
            return self._end(reason)
        if self.buffered < self._needed or self._needed == PREFIX_SIZE:
            self._forget_returned()
            return None
        begin, end = self._at, self._at + self._needed
        if isinstance(self._buffer, bytes):
            parts = self._split(self._buffer, begin + PREFIX_SIZE, end)
        else:
            with memoryview(self._buffer) as view:
                message = bytes(view[begin:end])
            parts = self._split(message, PREFIX_SIZE, self._needed)
        if isinstance(parts, str):
            return self._end(parts)
        self._at = end
        self._needed = PREFIX_SIZE
        return parts

    def _read_prefix(self) -> str:
        """Read the prefix of the next message if it has arrived, and return what is wrong with it, or ""."""
        if self.buffered < PREFIX_SIZE:
            magic = bytes(self._buffer[self._at : self._at + 4])
            return "" if any(each.startswith(magic) for each in _MAGIC.values()) else "wrong magic"
        number, length = _PREFIX.unpack_from(self._buffer, self._at)
        if number == _MAGIC_LITTLE:
            self.order = LITTLE
        elif number == _MAGIC_BIG:
            self.order = BIG
        else:
            return "wrong magic"
        if not length:
            return "message without parts"
        if length > self._max_message:
            return "message too long"
        self._needed = PREFIX_SIZE + length
        return ""

    def _split(self, data: bytes, at: int, end: int) -> Parts | str:
        """Return the parts between `at` and `end`, or what is wrong with them."""
        parts: Parts = []
        while at < end:
            size = data[at]
            at += 1
            if size == _LONG:
                if end - at < 4:
                    return "message ends within the size of a part"
                size = _U32.unpack_from(data, at)[0]
                at += 4
            if size > end - at:
                return "part longer than its message"
            if len(parts) == self._max_parts:
                return "too many parts"
            parts.append(data[at : at + size])
            at += size
        return parts

    def _forget_returned(self) -> None:
        """Free the bytes of returned messages."""
        if not self._at:
            return
        if isinstance(self._buffer, bytes):
            self._buffer = self._buffer[self._at :]
        elif self._at == len(self._buffer):
            self._buffer = b""
        else:
            del self._buffer[: self._at]  # moves nothing: CPython advances the start
        self._at = 0

    def _end(self, reason: str) -> Invalid:
        """Ignore the stream from here on."""
        self._invalid = Invalid(reason)
        self._buffer = b""
        self._at = 0
        return self._invalid

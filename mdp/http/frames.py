"""Counts what a WebSocket's client has sent of its messages, from the headers of its frames (RFC 6455, 5.2)."""

from collections import deque
from typing import Final

FRAGMENT_BYTES: Final = 100
"""What a frame of a message costs in addition to its content."""
MAX_FRAGMENTS: Final = 1000
"""Frames of one message: uvicorn takes some 20 µs for each."""
MAX_CONTROL: Final = 100
"""Control frames that arrive together."""
_FINAL: Final = 0x80
_CONTROL: Final = 0x08
_LENGTH: Final = 0x7F
_SIZES: Final = {126: 4, 127: 10}
"""Length of a header with an extended length, without the mask."""
_MASK_BYTES: Final = 4


class FrameCounter:
    """Follows the frames that arrive.  What is not valid, uvicorn refuses."""

    def __init__(self) -> None:
        self.unfinished = 0
        """Bytes of a message that has not arrived completely."""
        self._messages: deque[int] = deque()
        """Sizes of those that have, and that the application has not got."""
        self._waiting = 0
        """Their sum."""
        self._fragments = 0
        """Number of frames of the unfinished message."""
        self._control = 0
        """Number of control frames that have arrived together."""
        self._header = bytearray()
        """The header that is arriving."""
        self._left = 0
        """Bytes to come of the current frame."""

    @property
    def held(self) -> int:
        """Bytes that are in memory."""
        return self.unfinished + self._waiting

    def feed(self, data: bytes) -> bool:
        """Take in what has arrived.  Return whether its frames are not too many."""
        at = self._control = 0
        while at < len(data):
            if self._fragments > MAX_FRAGMENTS or self._control > MAX_CONTROL:
                return False
            if len(self._header) < self._header_size():
                self._header.append(data[at])
                at += 1
                if len(self._header) == self._header_size():
                    self._begin_frame()
            else:
                step = min(self._left, len(data) - at)
                at += step
                self._left -= step
                if self._is_data():
                    self.unfinished += step
            if not self._left and len(self._header) == self._header_size():
                self._end_frame()
        return True

    def take(self) -> None:
        """The application has got a message."""
        if self._messages:
            self._waiting -= self._messages.popleft()

    def _header_size(self) -> int:
        header = self._header
        return (_SIZES.get(header[1] & _LENGTH, 2) if len(header) > 1 else 2) + _MASK_BYTES

    def _is_data(self) -> bool:
        return not self._header[0] & _CONTROL

    def _begin_frame(self) -> None:
        header = self._header
        extended = header[2:-_MASK_BYTES]
        self._left = int.from_bytes(extended, "big") if extended else header[1] & _LENGTH
        if self._is_data():
            self.unfinished += FRAGMENT_BYTES
            self._fragments += 1
        else:
            self._control += 1

    def _end_frame(self) -> None:
        if self._is_data() and self._header[0] & _FINAL:
            self._messages.append(self.unfinished)
            self._waiting += self.unfinished
            self.unfinished = self._fragments = 0
        self._header.clear()

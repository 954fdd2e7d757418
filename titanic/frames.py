"""The frames of a body as one value of a database: for each frame its length, four bytes big-endian, then the frame."""

from collections.abc import Sequence
from typing import Final

LENGTH: Final = 4


def pack(frames: Sequence[bytes]) -> bytes:
    """`frames` as one value."""
    if len(frames) == 1:
        return len(frames[0]).to_bytes(LENGTH, "big") + frames[0]
    return b"".join(part for frame in frames for part in (len(frame).to_bytes(LENGTH, "big"), frame))


def unpack(packed: bytes) -> list[bytes]:
    """The frames in `packed`.  Raises `ValueError` if that is not what `pack` made."""
    frames = []
    at = 0
    while at < len(packed):
        start = at + LENGTH
        at = start + int.from_bytes(packed[at:start], "big")
        frames.append(packed[start:at])
    if at != len(packed):
        raise ValueError("the stored frames are cut off")
    return frames

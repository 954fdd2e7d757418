"""Bodies as database values: for each frame its length, four bytes big-endian, then the frame."""

from collections.abc import Sequence
from typing import Final

LENGTH: Final = 4


def pack(frames: Sequence[bytes]) -> bytes:
    """Return `frames` as one value."""
    if len(frames) == 1:
        return len(frames[0]).to_bytes(LENGTH, "big") + frames[0]
    return b"".join(part for frame in frames for part in (len(frame).to_bytes(LENGTH, "big"), frame))


def unpack(packed: bytes) -> list[bytes]:
    """Return the frames in `packed`.  Raises `ValueError` if it is truncated."""
    frames = []
    at = 0
    while at < len(packed):
        start = at + LENGTH
        at = start + int.from_bytes(packed[at:start], "big")
        frames.append(packed[start:at])
    if at != len(packed):
        raise ValueError("the stored frames are truncated")
    return frames

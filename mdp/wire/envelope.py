"""Find the header of a message and the route before it; check the frames that all dialects share (C8, C22)."""

from collections.abc import Sequence
from typing import Any, Final

from .commands import (
    C01,
    C02,
    CL1,
    CX1,
    DISCONNECT,
    EMPTY,
    HEARTBEAT,
    W01,
    W02,
    WL1,
    WX1,
    Disconnect,
    Heartbeat,
    Invalid,
    Kind,
    Message,
    Reason,
    RequestId,
    Route,
)
from .names import MAX_NAME

HEADER: Final = 6
"""Bytes of a header."""
MAX_ENVELOPE: Final = 16
"""Frames an envelope may have, its empty one included (C22)."""


def id_of(frame: bytes) -> int | bytes:
    """Return the id in `frame`: an integer if it is decimal without leading zeros and fits 64 bits, else the frame."""
    if not 1 <= len(frame) <= 20 or not frame.isdigit() or (frame[0] == 48 and len(frame) > 1):
        return frame
    number = int(frame)
    return number if number < 1 << 64 else frame


def frame_of(id: RequestId) -> bytes:  # noqa: A002 - the wire's word
    """Return the frame that holds `id`; an empty one for None."""
    if isinstance(id, bytes):
        return id
    return EMPTY if id is None else b"%d" % id


def size_of(frames: Sequence[bytes]) -> int:
    """Return the size of all frames together, in bytes."""
    size = 0
    every: Any = frames  # compiled code would reject memoryviews in a sequence of bytes
    if isinstance(every, list):
        for frame in every:
            size += len(frame)
    else:
        for frame in every:
            size += len(frame)
    return size


NO_HEADER: Final = (Reason.ENVELOPE_TOO_DEEP, Reason.TOO_FEW_FRAMES, Reason.NO_HEADER)
"""The reasons for the negative results of `header_at`, which index this tuple from its end."""


def _is_header(frame: Any) -> bool:
    return len(frame) == HEADER and frame in (C02, CX1, WX1, W02, C01, W01, CL1, WL1)


def header_at(message: Message, start: int) -> int:
    """Return the index of the header, which may follow an envelope that begins at `start`.

    The result is negative if there is no header; it then is an index of `NO_HEADER`.  Frames may be memoryviews.
    """
    frames: list[Any] = message
    count = len(frames)
    if count <= start:
        return -2
    if _is_header(frames[start]):
        return start
    # C22: an envelope is every frame up to and including one empty frame.  Its frames are addresses.
    for at in range(start, min(count, start + MAX_ENVELOPE)):
        size = len(frames[at])
        if size > MAX_NAME:
            return -1
        if size == 0:
            if at + 1 == count:
                return -2
            return at + 1 if _is_header(frames[at + 1]) else -1
    return -3 if count > start + MAX_ENVELOPE else -1


def route_before(message: Message, at: int) -> Route:
    """Return the route: the frames before the header, which is at index `at`."""
    return (message[0],) if at == 1 else tuple(message[:at])


def check_addressed(message: Message, at: int) -> Invalid | None:
    """Return what is wrong with `header command address "" body+`, or None (C8, C23)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if not 1 <= len(message[at + 2]) <= MAX_NAME:
        return Invalid(Reason.BAD_ADDRESS)
    if message[at + 3]:
        return Invalid(Reason.NO_DELIMITER)
    return Invalid(Reason.NO_BODY) if len(message) == at + 4 else None


def bare(message: Message, at: int, kind: Kind | None) -> Heartbeat | Disconnect | Invalid:
    """Decode HEARTBEAT or DISCONNECT, which are a header and a command only."""
    if kind is not HEARTBEAT and kind is not DISCONNECT:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if len(message) > at + 2:
        return Invalid(Reason.TOO_MANY_FRAMES)
    command = Heartbeat if kind is HEARTBEAT else Disconnect
    return command(route_before(message, at), message[at])

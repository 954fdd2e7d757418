"""Find the header of a message and the route before it; check the frames that all dialects share (C8, C22)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    from mypy_extensions import i64  # to mypyc, a C integer

HEADER: Final = 6
"""Bytes of a header."""
MAX_ENVELOPE: Final = 16
"""Frames an envelope may have, its empty one included (C22)."""
SHORT_ID: Final = 0 if __file__.endswith(".py") else 18
"""How many digits of an id are read one by one, if this is compiled: as many always fit a C integer of 64 bits."""


def id_of(frame: bytes) -> int | bytes:
    """Return the id in `frame`: an integer if it is decimal without leading zeros and fits 64 bits, else the frame."""
    size = len(frame)
    if not 1 <= size <= 20 or (frame[0] == 48 and size > 1):
        return frame
    if size > SHORT_ID:
        if not frame.isdigit():
            return frame
        large = int(frame)
        return large if large < 1 << 64 else frame
    number: i64 = 0
    at: i64 = 0
    end: i64 = size
    while at < end:
        digit: i64 = frame[at]
        if not 48 <= digit <= 57:
            return frame
        number = 10 * number + digit - 48
        at += 1
    return number


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


def header_of(frame: Any) -> bytes:
    """Return the constant that equals `frame`; an empty one if it is no header."""
    if not isinstance(frame, bytes) or len(frame) != HEADER:
        return EMPTY
    # Compiled, comparisons take less time than a look-up.
    if frame == C02:
        return C02
    if frame == W02:
        return W02
    if frame == CX1:
        return CX1
    if frame == WX1:
        return WX1
    if frame == C01:
        return C01
    if frame == W01:
        return W01
    if frame == CL1:
        return CL1
    return WL1 if frame == WL1 else EMPTY


def header_at(message: Message, start: int) -> int:
    """Return the index of the header, which may follow an envelope that begins at `start`.

    The result is negative if there is no header; it then is an index of `NO_HEADER`.  Frames may be memoryviews.
    """
    frames: list[Any] = message
    count = len(frames)
    if count <= start:
        return -2
    if header_of(frames[start]):
        return start
    # C22: an envelope is every frame up to and including one empty frame.  Its frames are addresses.
    for at in range(start, min(count, start + MAX_ENVELOPE)):
        size = len(frames[at])
        if size > MAX_NAME:
            return -1
        if size == 0:
            if at + 1 == count:
                return -2
            return at + 1 if header_of(frames[at + 1]) else -1
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

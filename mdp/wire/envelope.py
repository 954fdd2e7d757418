"""Where the header of a message is, what stands before it, and the frames that all dialects share (C8, C22)."""

from collections.abc import Sequence
from typing import Any, Final

from .commands import (
    C01,
    C02,
    CX1,
    DISCONNECT,
    EMPTY,
    HEARTBEAT,
    W01,
    W02,
    WX1,
    Disconnect,
    Heartbeat,
    Invalid,
    Kind,
    Message,
    Number,
    Reason,
    Route,
)
from .names import MAX_NAME

HEADER: Final = 6
"""Bytes of a header."""
MAX_ENVELOPE: Final = 16
"""Frames an envelope may have, its empty one included (C22)."""


def number_of(frame: bytes) -> int | bytes:
    """A number or an address from its frame: an integer if it is one in decimal, without leading zeros, of 64 bits."""
    if not 1 <= len(frame) <= 20 or not frame.isdigit() or (frame[0] == 48 and len(frame) > 1):
        return frame
    number = int(frame)
    return number if number < 1 << 64 else frame


def frame_of(number: int | bytes) -> bytes:
    """The frame of a number or an address."""
    return number if isinstance(number, bytes) else b"%d" % number


def envelope_of(number: Number) -> Route:
    """The envelope of an X1 client's request: its number and the empty frame."""
    return (EMPTY,) if number is None else (frame_of(number), EMPTY)


def size_of(frames: Sequence[bytes]) -> int:
    """Bytes of all frames together."""
    size = 0
    every: Any = frames  # a memoryview is no bytes
    if isinstance(every, list):
        for frame in every:
            size += len(frame)
    else:
        for frame in every:
            size += len(frame)
    return size


NO_HEADER: Final = (Reason.ENVELOPE_TOO_DEEP, Reason.TOO_FEW_FRAMES, Reason.NO_HEADER)
"""Why there is none, counted from the end."""


def is_header(frame: bytes) -> bool:
    """Whether `frame` is the header of a dialect."""
    if len(frame) != HEADER:
        return False
    return frame in (C02, W02, CX1, WX1, C01, W01)


def header_at(message: Message, start: int) -> int:
    """Where the header is, past an envelope if there is one; negative if there is none, see `NO_HEADER`."""
    count = len(message)
    if count <= start:
        return -2
    if is_header(message[start]):
        return start
    # C22: an envelope is what stands before the header, up to and including one empty frame.  Its frames are addresses.
    for at in range(start, min(count, start + MAX_ENVELOPE)):
        if len(message[at]) > MAX_NAME:
            return -1
        if not message[at]:
            if at + 1 == count:
                return -2
            return at + 1 if is_header(message[at + 1]) else -1
    return -3 if count > start + MAX_ENVELOPE else -1


def route_before(message: Message, at: int) -> Route:
    """What stands before the header."""
    return (message[0],) if at == 1 else tuple(message[:at])


def check_addressed(message: Message, at: int) -> Invalid | None:
    """`header command address "" body+` (C8)."""
    wrong = check_address(message, at)
    if wrong is None and len(message) == at + 4:
        return Invalid(Reason.NO_BODY)
    return wrong


def check_address(message: Message, at: int) -> Invalid | None:
    """`header command address ""`: exactly one address frame, then one empty frame (C8, C23)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if not 1 <= len(message[at + 2]) <= MAX_NAME:
        return Invalid(Reason.BAD_ADDRESS)
    if message[at + 3]:
        return Invalid(Reason.NO_DELIMITER)
    return None


def check_address_only(message: Message, at: int) -> Invalid | None:
    """`header command address ""`, and nothing more."""
    wrong = check_address(message, at)
    if wrong is None and len(message) > at + 4:
        return Invalid(Reason.TOO_MANY_FRAMES)
    return wrong


def bare(message: Message, at: int, kind: Kind | None) -> Heartbeat | Disconnect | Invalid:
    """HEARTBEAT or DISCONNECT: a header and a command, nothing more."""
    if kind is not HEARTBEAT and kind is not DISCONNECT:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if len(message) > at + 2:
        return Invalid(Reason.TOO_MANY_FRAMES)
    command = Heartbeat if kind is HEARTBEAT else Disconnect
    return command(route_before(message, at), message[at])

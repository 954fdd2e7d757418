"""Decode what the peers of a pirate port send: Lazy Pirate clients and Paranoid Pirate workers (RFC 6, PPP).

Their messages have no header and name no service: both are those of the port.  After the frame with the routing id:

    client → broker    "" body+                         broker → client    "" body+
    worker → broker    01 (READY)                       broker → worker    address "" body+
                       02 (HEARTBEAT)                                      02 (HEARTBEAT)
                       address "" body+

An empty first frame means a client (a REQ socket adds it), anything else a worker (a DEALER).  The commands have
headers that are never on the wire, `CPP` and `WPP`.  There is no ERROR, no PARTIAL and no DISCONNECT: a worker that is
not registered gets no HEARTBEATs, so it connects again and sends READY.
"""

from typing import Any

from .commands import (
    CPP,
    EMPTY,
    FINAL,
    HEARTBEAT,
    KINDS,
    WPP,
    FromPeer,
    Heartbeat,
    Invalid,
    Message,
    Oversized,
    Ready,
    Reason,
    Reply,
    Request,
)
from .envelope import id_of, size_of
from .messages import without_shared
from .names import MAX_NAME, MMI


def decode_pirate(message: Message, service: bytes, max_message: int, max_frames: int) -> FromPeer | Invalid:
    """Decode what a client or a worker sent to a pirate port.  `message[0]` is the ROUTER's identity frame.

    Frames may be memoryviews; those of a body are passed on as they are.
    """
    frames: list[Any] = message  # compiled code would reject memoryviews in a list of bytes
    if len(frames) < 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    is_client = len(frames[1]) == 0
    if len(frames) > max_frames:
        return _over_limit(message, is_client, Reason.TOO_MANY_FRAMES)
    if size_of(message) > max_message:
        return _over_limit(message, is_client, Reason.TOO_LARGE)
    if is_client:
        if len(frames) == 2:
            return Invalid(Reason.NO_BODY)
        # The broker itself answers `mmi.*`, and reads the body.
        body = without_shared(message) if service.startswith(MMI) else message
        return Request((message[0], EMPTY), CPP, service, body[2:])
    if len(frames) == 2:
        kind = KINDS[WPP].get(bytes(frames[1]))
        if kind is None:
            return Invalid(Reason.UNKNOWN_COMMAND)
        route = (message[0],)
        return Heartbeat(route, WPP) if kind is HEARTBEAT else Ready(route, WPP, service)
    if len(frames[1]) > MAX_NAME:
        return Invalid(Reason.BAD_ADDRESS)
    if len(frames[2]) != 0:
        return Invalid(Reason.NO_DELIMITER)
    if len(frames) == 3:
        return Invalid(Reason.NO_BODY)
    return Reply((message[0],), WPP, True, id_of(message[1]), message[3:])


def _over_limit(message: Message, is_client: bool, reason: Reason) -> Invalid | Oversized:
    """Return what is known about a message over a limit: a worker's reply ends the request that it is for."""
    frames: list[Any] = message
    if is_client or len(frames) < 3 or len(frames[1]) > MAX_NAME:
        return Invalid(reason, over_limit=True)
    return Oversized((message[0],), WPP, reason, FINAL, id_of(message[1]))

"""Decode what the peers of a pirate port send: Lazy Pirate clients, and workers (RFC 6, PPP, or Simple Pirates).

Their messages have no header and name no service: both are those of the port.  After the frame with the routing id:

    client → broker    "" body+                         broker → client    "" body+
    worker → broker    01 (READY)                       broker → worker    address "" body+
                       02 (HEARTBEAT)                                      02 (HEARTBEAT)
                       address "" body+

An empty first frame means a client (a REQ socket adds it), anything else a worker (a DEALER).  The commands have
headers that are never on the wire, `CPP` and `WPP`.  There is no ERROR, no PARTIAL and no DISCONNECT: a worker that is
not registered gets no HEARTBEATs, so it connects again and sends READY.

A Simple Pirate is a worker with a REQ socket, which looks like a client.  So it has a port for workers only, where an
empty first frame means such a worker (`WSP`), and no peer is a client:

    worker → broker    "" 01 (READY, in some languages the text)
                       "" address "" body+
    broker → worker    "" address "" body+

It can neither send nor receive a HEARTBEAT.
"""

from typing import Any, Final

from .commands import (
    CPP,
    EMPTY,
    FINAL,
    HEARTBEAT,
    KINDS,
    READY,
    WPP,
    WSP,
    FromPeer,
    Heartbeat,
    Invalid,
    Message,
    Oversized,
    Ready,
    Reason,
    Reply,
    Request,
    Route,
)
from .messages import id_of, size_of, without_shared
from .names import MAX_NAME, MMI

SIMPLE_READY: Final = (b"\x01", b"READY")
"""What a Simple Pirate says first."""


def decode_pirate(
    message: Message, service: bytes, max_message: int, max_frames: int, *, workers: bool = False
) -> FromPeer | Invalid:
    """Decode what a client or a worker sent to a pirate port, or to one for `workers` only.

    `message[0]` is the ROUTER's identity frame.  Frames may be memoryviews; those of a body are passed on as they are.
    """
    frames: list[Any] = message  # compiled code would reject memoryviews in a list of bytes
    if len(frames) < 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    is_client = len(frames[1]) == 0
    if is_client and workers:
        return _from_worker(message, 2, WSP, service, max_message, max_frames)
    if not is_client:
        return _from_worker(message, 1, WPP, service, max_message, max_frames)
    if len(frames) > max_frames:
        return Invalid(Reason.TOO_MANY_FRAMES, over_limit=True)
    if size_of(message) > max_message:
        return Invalid(Reason.TOO_LARGE, over_limit=True)
    if len(frames) == 2:
        return Invalid(Reason.NO_BODY)
    # The broker itself answers `mmi.*`, and reads the body.
    body = without_shared(message) if service.startswith(MMI) else message
    return Request((message[0], EMPTY), CPP, service, body[2:])


def _from_worker(
    message: Message, at: int, header: bytes, service: bytes, max_message: int, max_frames: int
) -> FromPeer | Invalid:
    """Decode what a worker of `service` sent; its route ends before the frame `at`."""
    frames: list[Any] = message
    # A late reply of a Simple Pirate registers it again, for the service of the port.
    offers = service if header == WSP else EMPTY
    if len(frames) > max_frames:
        return _over_limit(message, at, header, offers, Reason.TOO_MANY_FRAMES)
    if size_of(message) > max_message:
        return _over_limit(message, at, header, offers, Reason.TOO_LARGE)
    if len(frames) == at:
        return Invalid(Reason.TOO_FEW_FRAMES)
    route = tuple(message[:at])
    if len(frames) == at + 1:
        return _bare(bytes(frames[at]), route, header, service)
    if not 1 <= len(frames[at]) <= MAX_NAME:
        return Invalid(Reason.BAD_ADDRESS)
    if len(frames[at + 1]) != 0:
        return Invalid(Reason.NO_DELIMITER)
    if len(frames) == at + 2:
        return Invalid(Reason.NO_BODY)
    return Reply(route, header, True, id_of(message[at]), message[at + 2 :], offers)


def _bare(frame: bytes, route: Route, header: bytes, service: bytes) -> FromPeer | Invalid:
    """Decode a worker's message of one frame."""
    kind = KINDS[WPP].get(frame)
    if header == WSP:
        kind = READY if frame in SIMPLE_READY else None
    if kind is None:
        return Invalid(Reason.UNKNOWN_COMMAND)
    return Heartbeat(route, header) if kind is HEARTBEAT else Ready(route, header, service)


def _over_limit(message: Message, at: int, header: bytes, offers: bytes, reason: Reason) -> Invalid | Oversized:
    """Return what is known about a worker's message over a limit: a reply ends the request that it is for."""
    frames: list[Any] = message
    if len(frames) < at + 2 or not 1 <= len(frames[at]) <= MAX_NAME:
        return Invalid(reason, over_limit=True)
    return Oversized(tuple(message[:at]), header, reason, FINAL, id_of(message[at]), offers)

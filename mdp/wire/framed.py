"""Decode messages in the framed form, in every dialect; recognise messages in the batched form.

Decoding never raises, whatever the bytes (C15, C43).
"""

from typing import Any, Final, cast

from .commands import (
    BATCH,
    C01,
    C02,
    CL1,
    CX1,
    DISCONNECT,
    EMPTY,
    ERROR,
    FINAL,
    KINDS,
    PARTIAL,
    W01,
    W02,
    WL1,
    WORKER_HEADERS,
    WX1,
    Batched,
    Disconnect,
    Error,
    FromBroker,
    FromPeer,
    Invalid,
    Message,
    Oversized,
    Reason,
    Reply,
    Request,
)
from .envelope import NO_HEADER, header_at, id_of, route_before, size_of
from .mdp import from_client, from_worker, to_client_01, to_client_02, to_worker
from .names import MAX_NAME, MMI, valid_service
from .options import MAX_OPTIONS
from .x1 import from_client_x1, numbered_route, to_client_x1

SHARED: Final = 8192
"""Frame size in bytes from which `multipart` may deliver a frame as a memoryview of libzmq's buffer."""
MAX_LINK_TEXT: Final = 1000
"""Maximum size in bytes of the text with which a link is ended."""
LONG_TEXT: Final = b"(its text is too long)"
"""Stands for a longer text."""
NO_LIMIT: Final = 1 << 60
OVERLONG: Final = bytes(MAX_OPTIONS + 1)
"""Stands for a large frame.  It is longer than any frame may be that is not part of a body."""


def decode_peer(message: Message, max_message: int, max_frames: int) -> FromPeer | Batched | Invalid:
    """Decode what a client or a worker sent to the broker.  `message[0]` is the ROUTER's identity frame.

    Frames of `SHARED` bytes or more may be memoryviews; those of a body are passed on as they are.
    """
    at = header_at(message, 1)
    if at > 0:
        batched = _batched(message, at)
        if batched is not None:
            return batched
    size = size_of(message)
    heads = message if size < SHARED else without_shared(message)
    if len(message) > max_frames:
        return _over_limit(heads, at, Reason.TOO_MANY_FRAMES)
    if size > max_message:
        return _over_limit(heads, at, Reason.TOO_LARGE)
    if at < 0:
        return Invalid(NO_HEADER[at])
    command = _decode_peer(heads, at)
    if heads is not message:
        if isinstance(command, Invalid):  # options may be a large frame: decode again with their bytes
            command = _decode_peer(without_shared(message, MAX_OPTIONS), at)
        if isinstance(command, Request | Reply | Error):
            return _with_large(command, message)
    return command


def _decode_peer(message: Message, at: int) -> FromPeer | Invalid:
    header = message[at]
    if header in (W02, WX1, W01):
        return from_worker(message, at)
    if header == CX1:
        return from_client_x1(message, at)
    if header in (CL1, WL1):
        return _from_link(message, at)
    return from_client(message, at, C02 if header == C02 else C01)  # a constant: waiting requests must not keep frames


def _from_link(message: Message, at: int) -> Disconnect | Invalid:
    """Decode `MDPWL1 06 [text]`, the only command of a link that is not in the batched form."""
    if message[at] != WL1 or KINDS[WL1].get(message[at + 1]) is not DISCONNECT:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if len(message) > at + 3:
        return Invalid(Reason.TOO_MANY_FRAMES)
    text = message[at + 2] if len(message) == at + 3 else EMPTY
    return Disconnect(route_before(message, at), WL1, text if len(text) <= MAX_LINK_TEXT else LONG_TEXT)


def without_shared(message: Message, most: int = 0) -> Message:
    """Return `message` with memoryviews of up to `most` bytes copied to bytes, and larger ones as `OVERLONG`."""
    frames = cast("list[Any]", message)
    return [frame if isinstance(frame, bytes) else bytes(frame) if len(frame) <= most else OVERLONG for frame in frames]


def _with_large(command: Request | Reply | Error, whole: Message) -> Request | Reply | Error:
    """Return `command` with the frames of its body, or its text and detail, as they arrived."""
    if isinstance(command, Error):
        at = len(whole) - len(command.detail)
        return command._replace(text=bytes(cast("list[Any]", whole)[at - 1]), detail=whole[at:])
    if isinstance(command, Reply) or not command.service.startswith(MMI):
        command.body = whole[len(whole) - len(command.body) :]
    # else the broker itself reads the body, and OVERLONG names no service
    return command


def _batched(message: Message, at: int) -> Batched | None:
    """Return the message if it is in the batched form.  Limits then apply to each record, not to the message."""
    frames: list[Any] = message  # compiled code would reject memoryviews in a list of bytes
    header = frames[at]
    if header == CX1:
        header = CX1
    elif header == WX1:
        header = WX1
    elif header == CL1:
        header = CL1
    elif header == WL1:
        header = WL1
    else:
        return None
    bare = len(frames) == at + 1
    if bare or frames[at + 1] == BATCH:
        # The route of a batched client is that of its requests, without their numbers.
        return Batched(route_before(message, at), header, at, bare)
    return None


def decode_broker(message: Message) -> FromBroker | Batched | Invalid:
    """Decode what a broker sent to a client's or a worker's DEALER."""
    at = header_at(message, 0)
    if at < 0:
        return Invalid(NO_HEADER[at])
    batched = _batched(message, at)
    if batched is not None:
        return batched
    header = message[at]
    if header in (W02, WX1, W01):
        return to_worker(message, at)
    if header == CX1:
        return to_client_x1(message, at)
    if header == C02:
        return to_client_02(message, at)
    return to_client_01(message, at)


def _over_limit(message: Message, at: int, reason: Reason) -> Invalid | Oversized:
    """Return what is known about a message over a limit without decoding it.

    An X1 client that sent it with an envelope can be answered, and a worker's reply ends the request that it is for.
    """
    if at < 0 or at + 1 >= len(message):
        return Invalid(reason, over_limit=True)
    header = message[at]
    if header == CX1 and at > 1:
        route, number = numbered_route(message, at)
        service = message[at + 2] if len(message) > at + 2 and valid_service(message[at + 2]) else EMPTY
        return Invalid(reason, route, number, service, over_limit=True)
    if header in WORKER_HEADERS:
        kind = KINDS[header].get(message[at + 1])
        addressed = len(message) > at + 2 and 1 <= len(message[at + 2]) <= MAX_NAME
        if addressed and (kind is PARTIAL or kind is FINAL or kind is ERROR):
            return Oversized(route_before(message, at), header, reason, kind, id_of(message[at + 2]))
    return Invalid(reason, over_limit=True)

"""Decode messages in the framed form, of every dialect; recognise those in the batched form.

Decoding never raises, whatever the bytes (C15, C43)."""

from typing import Any, Final, cast

from .commands import (
    BATCH,
    C01,
    C02,
    CX1,
    EMPTY,
    ERROR,
    FINAL,
    KINDS,
    PARTIAL,
    W01,
    W02,
    WORKER_HEADERS,
    WX1,
    Batched,
    Failure,
    FromBroker,
    FromPeer,
    Invalid,
    Message,
    Oversized,
    Reason,
    Reply,
    Request,
)
from .envelope import MAX_ENVELOPE, NO_HEADER, header_at, is_header, number_of, route_before, size_of
from .mdp import from_client, from_worker, to_client_01, to_client_02, to_worker
from .names import MAX_NAME, MMI, valid_service
from .options import MAX_OPTIONS
from .x1 import from_client_x1, numbered_route, to_client_x1

SHARED: Final = 8192
"""Bytes from which a frame that a peer sent may come as a memoryview of libzmq's buffer (`multipart`)."""
NO_LIMIT: Final = 1 << 60
OVERLONG: Final = bytes(MAX_OPTIONS + 1)
"""Longer than any frame may be that is not a body's."""


def decode_peer(message: Message, max_message: int, max_frames: int) -> FromPeer | Batched | Invalid:
    """What a client or a worker sent to the broker.  `message[0]` is the ROUTER's identity frame.

    Frames of `SHARED` bytes or more may be memoryviews: those of a body are passed on as they are.
    """
    found = _batched(message, 1)
    if found is not None:
        return found
    size = size_of(message)
    heads = message if size < SHARED else without_shared(message)
    if len(message) > max_frames:
        return _over_limit(heads, Reason.TOO_MANY_FRAMES)
    if size > max_message:
        return _over_limit(heads, Reason.TOO_LARGE)
    command = _decode_peer(heads)
    if heads is not message:
        if isinstance(command, Invalid):  # perhaps it is not: options may be long
            command = _decode_peer(without_shared(message, MAX_OPTIONS))
        if isinstance(command, Request | Reply | Failure):
            return _with_large(command, message)
    return command


def _decode_peer(message: Message) -> FromPeer | Invalid:
    at = header_at(message, 1)
    if at < 0:
        return Invalid(NO_HEADER[at])
    header = message[at]
    if header in (W02, WX1, W01):
        return from_worker(message, at)
    if header == CX1:
        return from_client_x1(message, at)
    return from_client(message, at, C02 if header == C02 else C01)  # not the frame, of which many may wait


def without_shared(message: Message, most: int = 0) -> Message:
    """`message` with `OVERLONG` in place of each memoryview of more than `most` bytes, and bytes in place of others."""
    frames = cast("list[Any]", message)
    return [frame if isinstance(frame, bytes) else bytes(frame) if len(frame) <= most else OVERLONG for frame in frames]


def _with_large(command: Request | Reply | Failure, whole: Message) -> Request | Reply | Failure:
    """`command` with the frames at its end as they arrived."""
    if isinstance(command, Failure):
        at = len(whole) - len(command.detail)
        return command._replace(text=cast("list[Any]", whole)[at - 1], detail=whole[at:])
    if isinstance(command, Reply) or not command.service.startswith(MMI):
        command.body = whole[len(whole) - len(command.body) :]
    # else the broker reads it itself, and there is no such name
    return command


def _batched(message: Message, start: int) -> Batched | None:
    """The message if it is in the batched form, whose limits are those of each record."""
    frames: list[Any] = message  # they may be memoryviews
    count = len(frames)
    for at in range(start, min(count, start + MAX_ENVELOPE + 1)):
        frame = frames[at]
        ended = at == start or frames[at - 1] == EMPTY
        if ended and (frame == CX1 or frame == WX1):  # noqa: PLR1714, SIM109 - twice as fast as `in`
            bare = count == at + 1
            if not bare and frames[at + 1] != BATCH:
                return None
            # To the broker, the route of a batched client is that of its requests without their numbers.
            return Batched(route_before(message, at), CX1 if frame == CX1 else WX1, at, bare)
        if len(frame) > MAX_NAME or (is_header(frame) if at == start else ended):
            return None  # no envelope, or one that has ended: what follows is not looked at
    return None


def decode_broker(message: Message) -> FromBroker | Batched | Invalid:
    """What a broker sent to a client's or a worker's DEALER."""
    found = _batched(message, 0)
    if found is not None:
        return found
    at = header_at(message, 0)
    if at < 0:
        return Invalid(NO_HEADER[at])
    header = message[at]
    if header in (W02, WX1, W01):
        return to_worker(message, at)
    if header == CX1:
        return to_client_x1(message, at)
    if header == C02:
        return to_client_02(message, at)
    return to_client_01(message, at)


def _over_limit(message: Message, reason: Reason) -> Invalid | Oversized:
    """What is over a limit is not decoded; but an X1 client that sent it with an envelope can be told, and a worker's
    reply concerns the request that it is for."""
    at = header_at(message, 1)
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
            return Oversized(route_before(message, at), header, reason, kind, number_of(message[at + 2]))
    return Invalid(reason, over_limit=True)

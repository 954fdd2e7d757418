"""Decode messages of MDP/0.2 and MDP/0.1, and recognise those of X1.

Decoding never raises, whatever the bytes (C15, C43).
"""

from typing import Any, Final, cast

from .commands import (
    BATCH,
    C01,
    C02,
    EMPTY,
    FINAL,
    KINDS,
    PARTIAL,
    W01,
    W02,
    Batched,
    FromBroker,
    FromPeer,
    Invalid,
    Message,
    Oversized,
    Reason,
    Reply,
    Request,
)
from .mdp import (
    NO_HEADER,
    from_client,
    from_worker,
    header_at,
    header_of,
    id_of,
    route_before,
    size_of,
    to_client_01,
    to_client_02,
    to_worker,
)
from .names import MAX_NAME, MMI
from .options import MAX_OPTIONS

SHARED: Final = 8192
"""Frame size in bytes from which `multipart` may deliver a frame as a memoryview of libzmq's buffer."""
NO_LIMIT: Final = 1 << 60
OVERLONG: Final = bytes(MAX_OPTIONS + 1)
"""Stands for a large frame.  It is longer than any frame may be that is not part of a body."""


def decode_peer(message: Message, max_message: int, max_frames: int) -> FromPeer | Batched | Invalid:
    """Decode what a client or a worker sent to the broker.  `message[0]` is the ROUTER's identity frame.

    Frames of `SHARED` bytes or more may be memoryviews; those of a body are passed on as they are.
    """
    frames: list[Any] = message  # compiled code would reject memoryviews in a list of bytes
    at = header_at(message, 1)
    header = header_of(frames[at]) if at > 0 else EMPTY
    if at > 0 and header not in (C02, W02, C01, W01):
        return _batched(message, at, header)
    size = size_of(message)
    heads = message if size < SHARED else without_shared(message)
    if len(message) > max_frames:
        return _over_limit(heads, at, Reason.TOO_MANY_FRAMES)
    if size > max_message:
        return _over_limit(heads, at, Reason.TOO_LARGE)
    if at < 0:
        return Invalid(NO_HEADER[at])
    command = from_client(heads, at, header) if header in (C02, C01) else from_worker(heads, at, header)
    if heads is not message and isinstance(command, Request | Reply):
        _restore_body(command, message)
    return command


def without_shared(message: Message) -> Message:
    """Return `message` with memoryviews, which are large frames, replaced by `OVERLONG`."""
    frames = cast("list[Any]", message)
    return [frame if isinstance(frame, bytes) else OVERLONG for frame in frames]


def _restore_body(command: Request | Reply, whole: Message) -> None:
    """Give `command` the frames of its body as they arrived."""
    if isinstance(command, Reply) or not command.service.startswith(MMI):
        command.body = whole[len(whole) - len(command.body) :]
    # else the broker itself reads the body, and OVERLONG names no service


def _batched(message: Message, at: int, header: bytes) -> Batched | Invalid:
    """Return a message in X1, whose header is at index `at`.  Limits then apply to each record, not to the message."""
    frames: list[Any] = message
    bare = len(frames) == at + 1
    if bare or frames[at + 1] == BATCH:
        return Batched(route_before(message, at), header, at, bare)
    return Invalid(Reason.UNKNOWN_COMMAND)


def decode_broker(message: Message) -> FromBroker | Batched | Invalid:
    """Decode what a broker sent to a client's or a worker's DEALER."""
    at = header_at(message, 0)
    if at < 0:
        return Invalid(NO_HEADER[at])
    header = header_of(message[at])
    if header in (W02, W01):
        return to_worker(message, at)
    if header == C02:
        return to_client_02(message, at)
    if header == C01:
        return to_client_01(message, at)
    return _batched(message, at, header)


def _over_limit(message: Message, at: int, reason: Reason) -> Invalid | Oversized:
    """Return what is known about a message over a limit without decoding it: a worker's reply ends its request."""
    if at > 0 and at + 1 < len(message) and message[at] in (W02, W01):
        kind = KINDS[message[at]].get(message[at + 1])
        addressed = len(message) > at + 2 and 1 <= len(message[at + 2]) <= MAX_NAME
        if addressed and (kind is PARTIAL or kind is FINAL):
            return Oversized(route_before(message, at), message[at], reason, kind, id_of(message[at + 2]))
    return Invalid(reason, over_limit=True)

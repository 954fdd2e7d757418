"""Decode and encode messages: those of MDP/0.2 and MDP/0.1 (C2 to C10, C24), and what X1 has in common with them.

X1's messages are recognised here, and decoded by `batch`; their HEARTBEAT and DISCONNECT are encoded here.  Decoding
never raises, whatever the bytes (C15, C43).
"""

from collections.abc import Sequence
from typing import Any, Final, cast

from .commands import (
    BATCH,
    C01,
    C02,
    CL1,
    CODES,
    CPP,
    CX1,
    DISCONNECT,
    EMPTY,
    FINAL,
    HEARTBEAT,
    KINDS,
    PARTIAL,
    READY,
    REQUEST,
    W01,
    W02,
    WL1,
    WPP,
    WSP,
    WX1,
    Batched,
    Disconnect,
    FromBroker,
    FromPeer,
    Heartbeat,
    Invalid,
    Kind,
    Message,
    Oversized,
    Ready,
    Reason,
    Reply,
    Request,
    RequestId,
    Route,
)
from .names import MAX_NAME, MMI, valid_service
from .options import MAX_OPTIONS, NO_OPTIONS
from .x1 import disconnect_record, limits_record

SHARED: Final = 8192
"""Frame size in bytes from which `multipart` may deliver a frame as a memoryview of libzmq's buffer."""
NO_LIMIT: Final = 1 << 60
OVERLONG: Final = bytes(MAX_OPTIONS + 1)
"""Stands for a large frame.  It is longer than any frame may be that is not part of a body."""
HEADERS: Final = {header: header for header in (C02, W02, CX1, WX1, C01, W01, CL1, WL1)}
"""The headers of all messages."""
MAX_ENVELOPE: Final = 16
"""Frames an envelope may have, its empty one included (C22)."""


def id_of(frame: bytes) -> int | bytes:
    """Return the id in `frame`: an integer if it is decimal without leading zeros and fits 64 bits, else the frame."""
    size = len(frame)
    if size > 20 or not frame.isdigit() or (frame[0] == ord("0") and size > 1):
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
    for frame in every:
        size += len(frame)
    return size


NO_HEADER: Final = (Reason.ENVELOPE_TOO_DEEP, Reason.TOO_FEW_FRAMES, Reason.NO_HEADER)
"""The reasons for the negative results of `header_at`, which index this tuple from its end."""


def header_of(frame: Any) -> bytes:
    """Return the constant that equals `frame`; an empty one if it is no header."""
    return HEADERS.get(frame, EMPTY) if isinstance(frame, bytes) else EMPTY


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
    return tuple(message[:at])


def check_addressed(message: Message, at: int) -> Invalid | None:
    """Return the flaw of a message `header command address "" body+`, or None (C8, C23)."""
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


X1: Final = frozenset({CX1, WX1, CL1, WL1})


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Return the reason, and of a worker's reply also its request, which it ends although it is not decoded."""
    if at > 0 and at + 1 < len(message) and message[at] in (W02, W01):
        kind = KINDS[message[at]].get(message[at + 1])
        addressed = len(message) > at + 2 and 1 <= len(message[at + 2]) <= MAX_NAME
        if addressed and (kind is PARTIAL or kind is FINAL):
            return Oversized(route_before(message, at), message[at], reason, kind, id_of(message[at + 2]))
    return Invalid(reason, over_limit=True)


def from_client(message: Message, at: int, header: bytes) -> FromPeer | Invalid:
    """Decode `MDPC02 01 service body+` (C2, C19) or `MDPC01 service body+` (C24)."""
    service_at = at + 1
    if header == C02:
        if len(message) < at + 2:
            return Invalid(Reason.TOO_FEW_FRAMES)
        if message[at + 1] != b"\x01":
            return Invalid(Reason.UNKNOWN_COMMAND)
        service_at = at + 2
    if len(message) <= service_at:
        return Invalid(Reason.TOO_FEW_FRAMES)
    service = message[service_at]
    if not valid_service(service):
        return Invalid(Reason.BAD_SERVICE)
    body = message[service_at + 1 :]
    if not body:
        return Invalid(Reason.NO_BODY)
    return Request(route_before(message, at), header, service, body)


def from_worker(message: Message, at: int, header: bytes) -> FromPeer | Invalid:
    """Decode `MDPW02 01 service`, `MDPW02 03|04 address "" body+` or `MDPW02 05|06` (C7), or the like of 0.1 (C24)."""
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = KINDS[header].get(message[at + 1])
    if kind is FINAL or kind is PARTIAL:
        return _worker_reply(message, at, header, final=kind is FINAL)
    if kind is READY:
        return _worker_ready(message, at)
    return bare(message, at, kind)


def _worker_reply(message: Message, at: int, header: bytes, *, final: bool) -> Reply | Invalid:
    body_at = at + 4
    if header == W01 and len(message) > at + 3 and message[at + 3]:
        body_at = at + 3  # C33: the Guide's PHP worker leaves out the empty frame
        wrong = None if 1 <= len(message[at + 2]) <= MAX_NAME else Invalid(Reason.BAD_ADDRESS)
    else:
        wrong = check_addressed(message, at)
    if wrong is not None:
        return wrong
    return Reply(route_before(message, at), header, final, id_of(message[at + 2]), message[body_at:])


def _worker_ready(message: Message, at: int) -> Ready | Invalid:
    if len(message) != at + 3:
        return Invalid(Reason.TOO_FEW_FRAMES if len(message) < at + 3 else Reason.TOO_MANY_FRAMES)
    if not valid_service(message[at + 2]):
        return Invalid(Reason.BAD_SERVICE)
    return Ready(route_before(message, at), message[at], message[at + 2])


def to_worker(message: Message, at: int) -> FromBroker | Invalid:
    """Decode `MDPW0x 02 address "" body+`, `MDPW02 05|06` or `MDPW01 04|05` (C7, C24)."""
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = KINDS[message[at]].get(message[at + 1])
    if kind is not REQUEST:
        return bare(message, at, kind)
    wrong = check_addressed(message, at)
    if wrong is not None:
        return wrong
    return Request(
        route_before(message, at), message[at], EMPTY, message[at + 4 :], NO_OPTIONS, id_of(message[at + 2])
    )  # fmt: skip


def to_client_02(message: Message, at: int) -> FromBroker | Invalid:
    """Decode `MDPC02 02|03 service body+` (C3)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = KINDS[C02].get(message[at + 1])
    if kind is not PARTIAL and kind is not FINAL:
        return Invalid(Reason.UNKNOWN_COMMAND)
    return Reply(route_before(message, at), C02, kind is FINAL, None, message[at + 3 :], message[at + 2])


def to_client_01(message: Message, at: int) -> FromBroker | Invalid:
    """Decode `MDPC01 service body+` (C24)."""
    if len(message) < at + 3:
        return Invalid(Reason.TOO_FEW_FRAMES)
    return Reply(route_before(message, at), C01, True, None, message[at + 2 :], message[at + 1])


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def request_to_broker(route: Route, header: bytes, service: bytes, body: Sequence[bytes]) -> Message:
    """Encode a client's REQUEST (C2, C24)."""
    if header == C01:
        return [*route, header, service, *body]
    return [*route, header, b"\x01", service, *body]


def reply_to_client(route: Route, header: bytes, final: bool, service: bytes, body: Sequence[Any]) -> Message:
    """Encode the broker's PARTIAL or FINAL to a client (C3); for a 0.1 or PPP client, its one reply (C24).

    The body may contain memoryviews.
    """
    if header == C01:
        return [*route, header, service, *body]
    if header == CPP:
        return [*route, *body]
    return [*route, header, b"\x03" if final else b"\x02", service, *body]


def ready(route: Route, header: bytes, service: bytes) -> Message:
    """Encode a worker's READY (C7)."""
    return [*route, header, b"\x01", service]


def request_to_worker(route: Route, header: bytes, address: RequestId, body: Sequence[Any]) -> Message:
    """Encode the broker's REQUEST to a worker (C7).  The body may contain memoryviews."""
    client = frame_of(address)
    if header in {WPP, WSP}:
        return [*route, client, EMPTY, *body]
    return [*route, header, b"\x02", client, EMPTY, *body]


def reply_to_broker(route: Route, header: bytes, kind: Kind, address: RequestId, body: Sequence[bytes]) -> Message:
    """Encode a worker's PARTIAL or FINAL (C7); a 0.1 worker has only the FINAL."""
    return [*route, header, CODES[header][kind], frame_of(address), EMPTY, *body]


def heartbeat(route: Route, header: bytes) -> Message:
    """Encode a HEARTBEAT, to or from a worker (C7, C13), an X1 client, or over a link: in X1, a bare header.

    Simple Pirates know none: the result is then empty, and nothing is sent.
    """
    if header in X1:
        return [*route, header]
    if header == WSP:
        return []
    code = CODES[header][Kind.HEARTBEAT]
    return [*route, code] if header == WPP else [*route, header, code]


def disconnect(route: Route, header: bytes, text: bytes = EMPTY) -> Message:
    """Encode a DISCONNECT, to or from a worker (C7, C9), to an X1 client, or over a link; only X1 has a text.

    Pirates have no DISCONNECT: the result is then empty, and nothing is sent.
    """
    if header in X1:
        return [*route, header, BATCH, disconnect_record(header, text)]
    return [] if header in {WPP, WSP} else [*route, header, CODES[header][Kind.DISCONNECT]]


def limits(route: Route, max_bytes: int, max_frames: int) -> Message:
    """Encode LIMITS, to an X1 client."""
    return [*route, CX1, BATCH, limits_record(max_bytes, max_frames)]


ERROR_MARK: Final = b"zmdp.error"
"""First body frame of a FINAL that reports a failure: `zmdp.error`, three digits, text.

MDP/0.2 has no ERROR, and requires exactly one FINAL for each request (C8).  zmdp's workers end a failed request with
this body, and its clients raise `ServiceError`; third-party clients see three readable frames.
"""


def error_body(code: int, text: str) -> list[bytes]:
    """Return the body of a FINAL that reports a failure."""
    return [ERROR_MARK, b"%03d" % code, text.encode(errors="replace")]


def parse_error(body: Sequence[bytes]) -> tuple[int, str] | None:
    """Return the code and text from a body made by `error_body`, or None for any other body."""
    if len(body) != 3 or body[0] != ERROR_MARK or len(body[1]) != 3 or not body[1].isdigit():
        return None
    return int(body[1]), body[2].decode(errors="replace")

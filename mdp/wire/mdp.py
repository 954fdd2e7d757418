"""Decode and encode the commands of MDP/0.2 and MDP/0.1 (C2 to C10, C24); HEARTBEAT and DISCONNECT also of X1."""

from collections.abc import Sequence
from typing import Any, Final

from .commands import (
    BATCH,
    C01,
    C02,
    CL1,
    CODES,
    CPP,
    CX1,
    EMPTY,
    FINAL,
    FINAL_02,
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
    FromBroker,
    FromPeer,
    Invalid,
    Kind,
    Message,
    Ready,
    Reason,
    Reply,
    Request,
    RequestId,
    Route,
)
from .envelope import HEADER, bare, check_addressed, frame_of, id_of, route_before
from .names import MAX_NAME, valid_service
from .options import NO_OPTIONS
from .x1 import disconnect_record, limits_record

X1: Final = frozenset({CX1, WX1, CL1, WL1})


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
    command = message[at + 1]
    if header == W02 and command == FINAL_02:  # the most frequent one
        return _worker_reply(message, at, header, final=True)
    kind = KINDS[header].get(command)
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
    command = b"\x03" if final else b"\x02"
    if len(body) == 1:  # fast paths for the common cases
        if len(route) == 1:
            return [route[0], header, command, service, body[0]]
        if len(route) == 3:
            return [route[0], route[1], route[2], header, command, service, body[0]]
    if header == CPP:
        return [*route, *body]
    return [*route, header, command, service, *body]


def ready(route: Route, header: bytes, service: bytes) -> Message:
    """Encode a worker's READY (C7)."""
    return [*route, header, b"\x01", service]


def request_to_worker(route: Route, header: bytes, address: RequestId, body: Sequence[Any]) -> Message:
    """Encode the broker's REQUEST to a worker (C7).  The body may contain memoryviews."""
    client = frame_of(address)
    if len(header) != HEADER:  # WPP or WSP
        return [*route, client, EMPTY, *body]
    if len(body) == 1 and len(route) == 1:  # a fast path for the common case
        return [route[0], header, b"\x02", client, EMPTY, body[0]]
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

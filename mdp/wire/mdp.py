"""Decode and encode the commands of MDP/0.2 and MDP/0.1 (C2 to C10, C24)."""

from collections.abc import Sequence
from typing import Any, Final

from .commands import (
    C01,
    C02,
    CANCEL,
    CODES,
    CPP,
    CREDIT,
    CX1,
    DISCONNECT,
    EMPTY,
    ERROR,
    FINAL,
    KINDS,
    PARTIAL,
    READY,
    RELEASE,
    REQUEST,
    W01,
    WPP,
    WX1,
    Cancel,
    Credit,
    Disconnect,
    FromBroker,
    FromPeer,
    Invalid,
    Kind,
    Message,
    Ready,
    Reason,
    Release,
    Reply,
    Request,
    RequestId,
    Route,
)
from .envelope import bare, check_address_only, check_addressed, frame_of, id_of, route_before
from .names import MAX_NAME, valid_service
from .options import NO_OPTIONS, parse_options
from .x1 import ready_with, worker_error


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


def from_worker(message: Message, at: int) -> FromPeer | Invalid:
    """Decode `MDPW02 01 service`, `MDPW02 03|04 address "" body+` or `MDPW02 05|06` (C7); the 0.1 codes differ (C24).

    X1 adds options to READY, and has ERROR (`MDPWX1 07 address "" code text [detail]`), CREDIT and RELEASE.
    """
    header = message[at]
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = KINDS[header].get(message[at + 1])
    if kind is FINAL or kind is PARTIAL:
        return _worker_reply(message, at, final=kind is FINAL)
    if kind is ERROR:
        return worker_error(message, at)
    if kind is READY:
        return _worker_ready(message, at)
    if kind is CREDIT:
        if len(message) != at + 3:
            return Invalid(Reason.TOO_FEW_FRAMES if len(message) < at + 3 else Reason.TOO_MANY_FRAMES)
        if not 1 <= len(message[at + 2]) <= 20 or not message[at + 2].isdigit():
            return Invalid(Reason.BAD_CREDIT)
        return Credit(route_before(message, at), WX1, int(message[at + 2]))
    if kind is RELEASE:
        wrong = check_address_only(message, at)
        return Release(route_before(message, at), WX1, id_of(message[at + 2])) if wrong is None else wrong
    return bare(message, at, kind)


def _worker_reply(message: Message, at: int, *, final: bool) -> Reply | Invalid:
    body_at = at + 4
    if message[at] == W01 and len(message) > at + 3 and message[at + 3]:
        body_at = at + 3  # C33: the Guide's PHP worker leaves out the empty frame
        wrong = None if 1 <= len(message[at + 2]) <= MAX_NAME else Invalid(Reason.BAD_ADDRESS)
    else:
        wrong = check_addressed(message, at)
    if wrong is not None:
        return wrong
    return Reply(route_before(message, at), message[at], final, id_of(message[at + 2]), message[body_at:])


def _worker_ready(message: Message, at: int) -> Ready | Invalid:
    header = message[at]
    if len(message) < at + 3:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if len(message) > at + (4 if header == WX1 else 3):
        return Invalid(Reason.TOO_MANY_FRAMES)
    if header == WX1:
        return ready_with(
            route_before(message, at), message[at + 2], message[at + 3] if len(message) > at + 3 else EMPTY
        )
    if not valid_service(message[at + 2]):
        return Invalid(Reason.BAD_SERVICE)
    return Ready(route_before(message, at), header, message[at + 2])


def to_worker(message: Message, at: int) -> FromBroker | Invalid:
    """Decode `MDPW0x 02 address "" body+`, `MDPW02 05|06` or `MDPW01 04|05` (C7, C24); X1 adds options, CANCEL and
    the text of DISCONNECT.
    """
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = KINDS[message[at]].get(message[at + 1])
    if kind is REQUEST:
        wrong = check_addressed(message, at)
        if wrong is not None:
            return wrong
        address = id_of(message[at + 2])
        if message[at] != WX1:
            return Request(route_before(message, at), message[at], EMPTY, message[at + 4 :], NO_OPTIONS, address)
        options = parse_options(message[at + 4])
        if options is None:
            return Invalid(Reason.BAD_OPTIONS)
        if len(message) == at + 5:
            return Invalid(Reason.NO_BODY)
        return Request(route_before(message, at), WX1, EMPTY, message[at + 5 :], options, address)
    if kind is CANCEL:
        wrong = check_address_only(message, at)
        return Cancel(route_before(message, at), WX1, id_of(message[at + 2])) if wrong is None else wrong
    if kind is DISCONNECT and message[at] == WX1 and len(message) == at + 3:
        return Disconnect(route_before(message, at), WX1, message[at + 2])
    return bare(message, at, kind)


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


def request_to_broker(
    route: Route, header: bytes, service: bytes, body: Sequence[bytes], options: bytes = EMPTY
) -> Message:
    """Encode a client's REQUEST (C2, C24); only X1 has options."""
    if header == CX1:
        return [*route, header, b"\x01", service, options, *body]
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


def ready(route: Route, header: bytes, service: bytes, options: bytes = EMPTY) -> Message:
    """Encode a worker's READY (C7); only X1 has options."""
    return [*route, header, b"\x01", service, options] if options else [*route, header, b"\x01", service]


def request_to_worker(
    route: Route, header: bytes, address: RequestId, body: Sequence[Any], options: bytes = EMPTY
) -> Message:
    """Encode the broker's REQUEST to a worker (C7); only X1 has options.  The body may contain memoryviews."""
    client = frame_of(address)
    if header == WX1:
        return [*route, header, b"\x02", client, EMPTY, options, *body]
    if header == WPP:
        return [*route, client, EMPTY, *body]
    if len(body) == 1 and len(route) == 1:  # a fast path for the common case
        return [route[0], header, b"\x02", client, EMPTY, body[0]]
    return [*route, header, b"\x02", client, EMPTY, *body]


def reply_to_broker(route: Route, header: bytes, kind: Kind, address: RequestId, body: Sequence[bytes]) -> Message:
    """Encode a worker's PARTIAL or FINAL (C7); a 0.1 worker has only the FINAL."""
    return [*route, header, CODES[header][kind], frame_of(address), EMPTY, *body]


def heartbeat(route: Route, header: bytes) -> Message:
    """Encode a HEARTBEAT, to or from a worker (C7, C13), or to or from an X1 client."""
    code = CODES[header][Kind.HEARTBEAT]
    return [*route, code] if header == WPP else [*route, header, code]


def disconnect(route: Route, header: bytes, text: bytes = EMPTY) -> Message:
    """Encode a DISCONNECT, to or from a worker (C7, C9); only X1 has a text, from the broker.

    PPP has no DISCONNECT: the result is then empty, and nothing is sent.
    """
    if header == WPP:
        return []
    message = [*route, header, CODES[header][Kind.DISCONNECT]]
    return [*message, text] if text else message


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

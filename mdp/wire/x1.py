"""Decode and encode what X1 adds to MDP/0.2, in the framed form (docs/x1.md)."""

from collections.abc import Sequence
from typing import Any

from .commands import (
    CANCEL,
    CX1,
    DISCONNECT,
    EMPTY,
    ERROR,
    FINAL,
    HEARTBEAT,
    KINDS,
    PARTIAL,
    REQUEST,
    WX1,
    Cancel,
    Error,
    FromBroker,
    FromPeer,
    Heartbeat,
    Invalid,
    Message,
    Ready,
    Reason,
    Reply,
    Request,
    RequestId,
    Route,
)
from .envelope import bare, check_addressed, frame_of, id_of, route_before
from .names import displayed, valid_service
from .options import MAX_OPTIONS, parse_options


def valid_code(code: bytes) -> bool:
    """Return whether `code` is a valid code of an ERROR: three digits."""
    return len(code) == 3 and code.isdigit()


def from_client_x1(message: Message, at: int) -> FromPeer | Invalid:
    """Decode `MDPCX1 01 service options body+`, `MDPCX1 05 service` or `MDPCX1 06`.

    A frame follows the header: a bare header is in the batched form.
    """
    route, number = numbered_route(message, at)
    kind = KINDS[CX1].get(message[at + 1])
    if kind is HEARTBEAT:
        if len(message) > at + 2:
            return _answerable(Reason.TOO_MANY_FRAMES, route, number)
        return Heartbeat(route_before(message, at), CX1)
    if kind is not REQUEST and kind is not CANCEL:
        return _answerable(Reason.UNKNOWN_COMMAND, route, number)
    if len(message) < at + 3:
        return _answerable(Reason.TOO_FEW_FRAMES, route, number)
    service = message[at + 2]
    if not valid_service(service):
        return _answerable(Reason.BAD_SERVICE, route, number)
    if number is None:
        return _answerable(Reason.NO_NUMBER, route, None, service)
    if kind is CANCEL:
        if len(message) > at + 3:
            return Invalid(Reason.TOO_MANY_FRAMES, route, number, service)
        return Cancel(route, CX1, number, service)
    if len(message) < at + 5:
        return Invalid(Reason.TOO_FEW_FRAMES if len(message) < at + 4 else Reason.NO_BODY, route, number, service)
    options = parse_options(message[at + 3]) if len(message[at + 3]) <= MAX_OPTIONS else None
    if options is None:
        return Invalid(Reason.BAD_OPTIONS, route, number, service)
    return Request(route, CX1, service, message[at + 4 :], options, number)


def numbered_route(message: Message, at: int) -> tuple[Route, RequestId]:
    """Return the route of an X1 client, and the number of its request, which precedes the empty frame.

    For `id… number "" MDPCX1 …` the route is `id… ""`.
    """
    if at == 3:  # a client that is connected directly
        return (message[0], EMPTY), id_of(message[1])
    if at < 3:
        return route_before(message, at), None
    return (*message[: at - 2], EMPTY), id_of(message[at - 2])


def _answerable(reason: Reason, route: Route, number: RequestId, service: bytes = EMPTY) -> Invalid:
    """Return an X1 client's invalid message.  Without an envelope it cannot be answered, so it gets no route."""
    return Invalid(reason, route, number, service) if len(route) > 1 else Invalid(reason)


def worker_error(message: Message, at: int) -> Error | Invalid:
    """Decode `MDPWX1 07 address "" code text [detail]`."""
    wrong = check_addressed(message, at)
    if wrong is not None:
        return wrong
    if len(message) < at + 6:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if len(message) > at + 7:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if not valid_code(message[at + 4]):
        return Invalid(Reason.BAD_CODE)
    address, code = id_of(message[at + 2]), int(message[at + 4])
    return Error(route_before(message, at), WX1, address, code, message[at + 5], message[at + 6 :])


def ready_with(route: Route, service: bytes, raw: bytes, credit: int | None = None) -> Ready | Invalid:
    """Return an X1 worker's READY.  `raw` are its options: credit, name, host, pid, version, dialect, all optional; and
    over a link, hops and free.

    `credit`, if given, takes precedence over the option.
    """
    if not valid_service(service):
        return Invalid(Reason.BAD_SERVICE)
    values: dict[str, Any] = {}
    if raw:
        options = parse_options(raw) if len(raw) <= MAX_OPTIONS else None
        if options is None:
            return Invalid(Reason.BAD_OPTIONS)
        values = options.values()
    asked: Any = values.get("credit", 1) if credit is None else credit  # Any: compiled code would check another type
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        return Invalid(Reason.BAD_CREDIT)
    name, host, version = values.get("name", ""), values.get("host", ""), values.get("version", "")
    pid = values.get("pid", 0)
    if not (isinstance(name, str) and isinstance(host, str) and isinstance(version, str)):
        return Invalid(Reason.BAD_OPTIONS)
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 <= pid < 1 << 32:
        return Invalid(Reason.BAD_OPTIONS)
    dialect = values.get("dialect", False)
    if not isinstance(dialect, bool):
        return Invalid(Reason.BAD_OPTIONS)
    hops, free = values.get("hops", 0), values.get("free", 0)
    if not (_is_count(hops) and _is_count(free)):
        return Invalid(Reason.BAD_OPTIONS)
    return Ready(
        route, WX1, service, asked, displayed(name), displayed(host), pid, displayed(version), dialect, hops, free
    )  # fmt: skip


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def to_client_x1(message: Message, at: int) -> FromBroker | Invalid:
    """Decode `MDPCX1 02|03 service body+`, `MDPCX1 04 service code text [detail]`, `MDPCX1 06` or `MDPCX1 07`."""
    count = len(message) - at
    kind = KINDS[CX1].get(message[at + 1])
    if kind is HEARTBEAT or kind is DISCONNECT:
        return bare(message, at, kind)
    if kind is not PARTIAL and kind is not FINAL and kind is not ERROR:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if count < (5 if kind is ERROR else 4):
        return Invalid(Reason.TOO_FEW_FRAMES)
    service = message[at + 2]
    number = id_of(message[at - 2]) if at >= 2 else None
    if kind is not ERROR:
        return Reply(route_before(message, at), CX1, kind is FINAL, number, message[at + 3 :], service)
    if count > 6:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if not valid_code(message[at + 3]):
        return Invalid(Reason.BAD_CODE)
    code = int(message[at + 3])
    return Error(route_before(message, at), CX1, number, code, message[at + 4], message[at + 5 :], service)


def error_to_client(route: Route, service: bytes, code: int, text: bytes, detail: Sequence[bytes] = ()) -> Message:
    """Encode the broker's ERROR to an X1 client."""
    return [*route, CX1, b"\x04", service, b"%03d" % code, text, *detail]


def error_to_broker(route: Route, address: RequestId, code: int, text: bytes, detail: Sequence[bytes] = ()) -> Message:
    """Encode an X1 worker's ERROR."""
    return [*route, WX1, b"\x07", frame_of(address), EMPTY, b"%03d" % code, text, *detail]


def cancel_to_broker(route: Route, service: bytes) -> Message:
    """Encode an X1 client's CANCEL of the request that has this route."""
    return [*route, CX1, b"\x05", service]


def cancel_to_worker(route: Route, address: RequestId) -> Message:
    """Encode the broker's CANCEL to an X1 worker."""
    return [*route, WX1, b"\x08", frame_of(address), EMPTY]


def credit(route: Route, credit: int) -> Message:
    """Encode an X1 worker's CREDIT."""
    return [*route, WX1, b"\x0a", b"%d" % credit]


def release(route: Route, address: RequestId) -> Message:
    """Encode an X1 worker's RELEASE."""
    return [*route, WX1, b"\x0b", frame_of(address), EMPTY]

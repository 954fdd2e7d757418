"""X1, framed form: decode and encode what it adds to MDP/0.2 (docs/x1.md)."""

from collections.abc import Sequence
from typing import Any

from .commands import (
    CANCEL,
    CX1,
    EMPTY,
    ERROR,
    FINAL,
    HEARTBEAT,
    KINDS,
    PARTIAL,
    REQUEST,
    WX1,
    Address,
    Answer,
    Cancel,
    Error,
    Failure,
    FromBroker,
    FromPeer,
    Heartbeat,
    Invalid,
    Message,
    Number,
    Ready,
    Reason,
    Request,
    Route,
)
from .envelope import bare, check_addressed, frame_of, number_of, route_before
from .names import displayed, valid_service
from .options import MAX_OPTIONS, parse_options


def valid_code(code: bytes) -> bool:
    """Whether `code` is the code of an ERROR: three digits."""
    return len(code) == 3 and code.isdigit()


def from_client_x1(message: Message, at: int) -> FromPeer | Invalid:
    """`MDPCX1 01 service options body+`, `MDPCX1 05 service`, `MDPCX1 06`; what is wrong can be answered.

    There is a command: a bare header is in the batched form.
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
        return Cancel(route, CX1, service, number)
    if len(message) < at + 5:
        return Invalid(Reason.TOO_FEW_FRAMES if len(message) < at + 4 else Reason.NO_BODY, route, number, service)
    options = parse_options(message[at + 3]) if len(message[at + 3]) <= MAX_OPTIONS else None
    if options is None:
        return Invalid(Reason.BAD_OPTIONS, route, number, service)
    return Request(route, CX1, service, message[at + 4 :], options, number)


def numbered_route(message: Message, at: int) -> tuple[Route, Number]:
    """The route of an X1 client, and the number of its request, which stands before the empty frame.

    From `id… number "" MDPCX1 …` that is `id… ""`.
    """
    if at == 3:  # from a client that is connected itself
        return (message[0], EMPTY), number_of(message[1])
    if at < 3:
        return route_before(message, at), None
    return (*message[: at - 2], EMPTY), number_of(message[at - 2])


def _answerable(reason: Reason, route: Route, number: Number, service: bytes = EMPTY) -> Invalid:
    """What is wrong with an X1 client's message, and where to say so: nowhere if it came without an envelope."""
    return Invalid(reason, route, number, service) if len(route) > 1 else Invalid(reason)


def worker_error(message: Message, at: int) -> Failure | Invalid:
    """`MDPWX1 07 address "" code text [detail]`."""
    wrong = check_addressed(message, at)
    if wrong is not None:
        return wrong
    if len(message) < at + 6:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if len(message) > at + 7:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if not valid_code(message[at + 4]):
        return Invalid(Reason.BAD_CODE)
    address, code = number_of(message[at + 2]), int(message[at + 4])
    return Failure(route_before(message, at), WX1, address, code, message[at + 5], message[at + 6 :])


def ready_with(route: Route, service: bytes, raw: bytes, credit: int | None = None) -> Ready | Invalid:
    """An X1 worker's READY, with its options: credit, name, host, pid, version, dialect, each of them optional.

    `credit` goes before that of the options.
    """
    if not valid_service(service):
        return Invalid(Reason.BAD_SERVICE)
    values: dict[str, Any] = {}
    if raw:
        options = parse_options(raw) if len(raw) <= MAX_OPTIONS else None
        if options is None:
            return Invalid(Reason.BAD_OPTIONS)
        values = options.values()
    asked: Any = values.get("credit", 1) if credit is None else credit  # Any: compiled, another type would be checked
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
    return Ready(route, WX1, service, asked, displayed(name), displayed(host), pid, displayed(version), dialect)


def to_client_x1(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPCX1 02|03 service body+`, `MDPCX1 04 service code text [detail]`, `MDPCX1 06`."""
    count = len(message) - at
    kind = KINDS[CX1].get(message[at + 1])
    if kind is HEARTBEAT:
        return bare(message, at, kind)
    if kind is not PARTIAL and kind is not FINAL and kind is not ERROR:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if count < (5 if kind is ERROR else 4):
        return Invalid(Reason.TOO_FEW_FRAMES)
    service = message[at + 2]
    number = number_of(message[at - 2]) if at >= 2 else None
    if kind is not ERROR:
        return Answer(route_before(message, at), CX1, kind is FINAL, service, message[at + 3 :], number)
    if count > 6:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if not valid_code(message[at + 3]):
        return Invalid(Reason.BAD_CODE)
    text = message[at + 4].decode(errors="replace")
    return Error(route_before(message, at), CX1, service, int(message[at + 3]), text, message[at + 5 :], number)


def error(route: Route, service: bytes, code: bytes, text: bytes, detail: Sequence[bytes] = ()) -> Message:
    """The broker's ERROR to an X1 client."""
    return [*route, CX1, b"\x04", service, code, text, *detail]


def cancel(route: Route, service: bytes) -> Message:
    """An X1 client's CANCEL of the request that has this route."""
    return [*route, CX1, b"\x05", service]


def failure(route: Route, address: Address, code: int, text: bytes, detail: Sequence[bytes] = ()) -> Message:
    """An X1 worker's ERROR."""
    return [*route, WX1, b"\x07", frame_of(address), EMPTY, b"%03d" % code, text, *detail]


def withdraw(route: Route, address: Address) -> Message:
    """The broker's CANCEL to an X1 worker."""
    return [*route, WX1, b"\x08", frame_of(address), EMPTY]


def credit(route: Route, credit: int) -> Message:
    """An X1 worker's CREDIT."""
    return [*route, WX1, b"\x0a", b"%d" % credit]


def release(route: Route, address: Address) -> Message:
    """An X1 worker's RELEASE."""
    return [*route, WX1, b"\x0b", frame_of(address), EMPTY]

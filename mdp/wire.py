"""Frames ↔ commands: MDP/0.2 and MDP/0.1, every side of both sub-protocols.

Nothing here knows a socket, a queue or a clock.  A *message* is a list of frames.  Its *route* is what stands before
the header and must be put, unchanged, before every message that goes back: the ROUTER's identity frame where there is
one, then the envelope (C22).  The layouts, route left out:

    client → broker    MDPC02 01 service body+               MDPC01 service body+
    broker → client    MDPC02 02|03 service body+            MDPC01 service body+
    worker → broker    MDPW02 01 service                     MDPW01 01 service
                       MDPW02 03|04 client "" body+          MDPW01 03 client "" body+
                       MDPW02 05 · MDPW02 06                 MDPW01 04 · MDPW01 05
    broker → worker    MDPW02 02 client "" body+             MDPW01 02 client "" body+
                       MDPW02 05 · MDPW02 06                 MDPW01 04 · MDPW01 05

What a peer sent is decoded to a command or to `Invalid`; decoding never raises, whatever the bytes (C15).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from .errors import SettingError

Frame = bytes
Message = list[bytes]
Route = tuple[bytes, ...]

C01: Final = b"MDPC01"
C02: Final = b"MDPC02"
W01: Final = b"MDPW01"
W02: Final = b"MDPW02"

EMPTY: Final = b""
MMI: Final = b"mmi."
"""Services of this prefix the broker answers itself (C25)."""
MAX_ENVELOPE: Final = 16
"""Frames an envelope may have, its empty one included (C22)."""
MAX_NAME: Final = 255
"""Bytes a service name or an address may have (C23)."""


class Kind(Enum):
    """The commands of MDP/0.2.  MDP/0.1 has no PARTIAL: its REPLY is a FINAL."""

    READY = "READY"
    REQUEST = "REQUEST"
    PARTIAL = "PARTIAL"
    FINAL = "FINAL"
    HEARTBEAT = "HEARTBEAT"
    DISCONNECT = "DISCONNECT"


CODES: Final[Mapping[bytes, Mapping[Kind, bytes]]] = {
    C02: {Kind.REQUEST: b"\x01", Kind.PARTIAL: b"\x02", Kind.FINAL: b"\x03"},
    W02: {
        Kind.READY: b"\x01",
        Kind.REQUEST: b"\x02",
        Kind.PARTIAL: b"\x03",
        Kind.FINAL: b"\x04",
        Kind.HEARTBEAT: b"\x05",
        Kind.DISCONNECT: b"\x06",
    },
    W01: {
        Kind.READY: b"\x01",
        Kind.REQUEST: b"\x02",
        Kind.FINAL: b"\x03",
        Kind.HEARTBEAT: b"\x04",
        Kind.DISCONNECT: b"\x05",
    },
}
"""The command byte of each dialect's commands.  A 0.1 client's messages carry none."""

_KINDS: Final = {header: {code: kind for kind, code in codes.items()} for header, codes in CODES.items()}

DIALECTS: Final = {C01: "0.1", C02: "0.2", W01: "0.1", W02: "0.2"}
"""The protocol version behind each header."""


class Reason(StrEnum):
    """Why a message is invalid (C15).  The values are the keys under `invalid` in `mmi.stats`."""

    TOO_FEW_FRAMES = "too-few-frames"
    TOO_MANY_FRAMES = "too-many-frames"
    TOO_LARGE = "too-large"
    NO_HEADER = "no-header"
    ENVELOPE_TOO_DEEP = "envelope-too-deep"
    UNKNOWN_COMMAND = "unknown-command"
    NO_BODY = "no-body"
    NO_DELIMITER = "no-delimiter"
    BAD_ADDRESS = "bad-address"
    BAD_SERVICE = "bad-service-name"


class Invalid(NamedTuple):
    """A message that is no command: dropped and counted, never answered (C15)."""

    reason: Reason


class Request(NamedTuple):
    """A client's REQUEST (C2, C24)."""

    route: Route
    header: bytes
    service: bytes
    body: list[bytes]


class Ready(NamedTuple):
    """A worker's READY: it offers `service` (C7)."""

    route: Route
    header: bytes
    service: bytes


class Reply(NamedTuple):
    """A worker's PARTIAL or FINAL, for the client it was given in REQUEST (C7, C8)."""

    route: Route
    header: bytes
    final: bool
    client: bytes
    body: list[bytes]


class Heartbeat(NamedTuple):
    """HEARTBEAT, from a worker or from the broker."""

    route: Route
    header: bytes


class Disconnect(NamedTuple):
    """DISCONNECT, from a worker or from the broker."""

    route: Route
    header: bytes


class Answer(NamedTuple):
    """What the broker sends a client: a PARTIAL or a FINAL of `service` (C3)."""

    route: Route
    header: bytes
    final: bool
    service: bytes
    body: list[bytes]


class Work(NamedTuple):
    """What the broker sends a worker: a REQUEST from `client` (C7)."""

    route: Route
    header: bytes
    client: bytes
    body: list[bytes]


FromPeer = Request | Ready | Reply | Heartbeat | Disconnect
FromBroker = Answer | Work | Heartbeat | Disconnect


def valid_service(name: bytes) -> bool:
    """Whether `name` may name a service: 1 to 255 bytes of printable UTF-8 (C23)."""
    return 1 <= len(name) <= MAX_NAME and _printable(name)


def service_name(name: str | bytes) -> bytes:
    """`name` as it goes on the wire.  Raises `SettingError` if it names no service (C23)."""
    try:
        encoded = name.encode() if isinstance(name, str) else bytes(name)
    except UnicodeEncodeError:
        encoded = EMPTY
    if not valid_service(encoded):
        raise SettingError(f"{name!r} is no service name: it takes 1 to {MAX_NAME} bytes of printable text")
    return encoded


@lru_cache(maxsize=4096)
def _printable(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_peer(message: Message, *, max_message: int, max_frames: int) -> FromPeer | Invalid:
    """What a client or a worker sent to the broker.  `message[0]` is the ROUTER's identity frame."""
    if len(message) > max_frames:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if sum(map(len, message)) > max_message:
        return Invalid(Reason.TOO_LARGE)
    return _decode(message, 1, _FROM_PEER)  # type: ignore[return-value]  # _FROM_PEER holds only what returns these


def decode_broker(message: Message) -> FromBroker | Invalid:
    """What a broker sent to a client's or a worker's DEALER."""
    return _decode(message, 0, _FROM_BROKER)  # type: ignore[return-value]  # _FROM_BROKER holds only what returns these


_Decoder = Callable[[Message, int], FromPeer | FromBroker | Invalid]


def _decode(message: Message, start: int, decoders: Mapping[bytes, _Decoder]) -> FromPeer | FromBroker | Invalid:
    """Find the header, past an envelope if there is one, and hand over to that header's decoder."""
    count = len(message)
    if count <= start:
        return Invalid(Reason.TOO_FEW_FRAMES)
    decoder = decoders.get(message[start])
    if decoder is not None:
        return decoder(message, start)
    # C22: an envelope is what stands before the header, up to and including one empty frame.  Its frames are addresses.
    for at in range(start, min(count, start + MAX_ENVELOPE)):
        if len(message[at]) > MAX_NAME:
            return Invalid(Reason.NO_HEADER)
        if not message[at]:
            if at + 1 == count:
                return Invalid(Reason.TOO_FEW_FRAMES)
            decoder = decoders.get(message[at + 1])
            return Invalid(Reason.NO_HEADER) if decoder is None else decoder(message, at + 1)
    return Invalid(Reason.ENVELOPE_TOO_DEEP if count > start + MAX_ENVELOPE else Reason.NO_HEADER)


def _request_02(message: Message, at: int) -> FromPeer | Invalid:
    """`MDPC02 01 service body+` (C2, C19)."""
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if message[at + 1] != b"\x01":
        return Invalid(Reason.UNKNOWN_COMMAND)
    return _request(message, at, C02, at + 2)


def _request_01(message: Message, at: int) -> FromPeer | Invalid:
    """`MDPC01 service body+` (C24)."""
    return _request(message, at, C01, at + 1)


def _request(message: Message, at: int, header: bytes, service_at: int) -> FromPeer | Invalid:
    if len(message) <= service_at:
        return Invalid(Reason.TOO_FEW_FRAMES)
    service = message[service_at]
    if not valid_service(service):
        return Invalid(Reason.BAD_SERVICE)
    body = message[service_at + 1 :]
    if not body:
        return Invalid(Reason.NO_BODY)
    return Request(tuple(message[:at]), header, service, body)


def _from_worker(message: Message, at: int) -> FromPeer | Invalid:
    """`MDPW02 01 service`, `MDPW02 03|04 client "" body+`, `MDPW02 05|06` (C7); the 0.1 codes differ (C24)."""
    header = message[at]
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = _KINDS[header].get(message[at + 1])
    if kind is Kind.FINAL or kind is Kind.PARTIAL:
        wrong = _check_addressed(message, at)
        if wrong is not None:
            return wrong
        return Reply(tuple(message[:at]), header, kind is Kind.FINAL, message[at + 2], message[at + 4 :])
    if kind is Kind.READY:
        if len(message) < at + 3:
            return Invalid(Reason.TOO_FEW_FRAMES)
        if len(message) > at + 3:
            return Invalid(Reason.TOO_MANY_FRAMES)
        if not valid_service(message[at + 2]):
            return Invalid(Reason.BAD_SERVICE)
        return Ready(tuple(message[:at]), header, message[at + 2])
    return _bare(message, at, kind)


def _from_broker_to_worker(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPW0x 02 client "" body+`, `MDPW02 05|06`, `MDPW01 04|05` (C7, C24)."""
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = _KINDS[message[at]].get(message[at + 1])
    if kind is Kind.REQUEST:
        wrong = _check_addressed(message, at)
        if wrong is not None:
            return wrong
        return Work(tuple(message[:at]), message[at], message[at + 2], message[at + 4 :])
    return _bare(message, at, kind)


def _check_addressed(message: Message, at: int) -> Invalid | None:
    """`header command client "" body+`: exactly one address frame, then one empty frame (C8, C23)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if not 1 <= len(message[at + 2]) <= MAX_NAME:
        return Invalid(Reason.BAD_ADDRESS)
    if message[at + 3]:
        return Invalid(Reason.NO_DELIMITER)
    if len(message) == at + 4:
        return Invalid(Reason.NO_BODY)
    return None


def _bare(message: Message, at: int, kind: Kind | None) -> Heartbeat | Disconnect | Invalid:
    """HEARTBEAT or DISCONNECT: a header and a command, nothing more."""
    if kind is not Kind.HEARTBEAT and kind is not Kind.DISCONNECT:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if len(message) > at + 2:
        return Invalid(Reason.TOO_MANY_FRAMES)
    command = Heartbeat if kind is Kind.HEARTBEAT else Disconnect
    return command(tuple(message[:at]), message[at])


def _answer_02(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPC02 02|03 service body+` (C3)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = _KINDS[C02].get(message[at + 1])
    if kind is not Kind.PARTIAL and kind is not Kind.FINAL:
        return Invalid(Reason.UNKNOWN_COMMAND)
    return Answer(tuple(message[:at]), C02, kind is Kind.FINAL, message[at + 2], message[at + 3 :])


def _answer_01(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPC01 service body+` (C24)."""
    if len(message) < at + 3:
        return Invalid(Reason.TOO_FEW_FRAMES)
    return Answer(tuple(message[:at]), C01, True, message[at + 1], message[at + 2 :])


_FROM_PEER: Final[Mapping[bytes, _Decoder]] = {
    C02: _request_02,
    W02: _from_worker,
    C01: _request_01,
    W01: _from_worker,
}
_FROM_BROKER: Final[Mapping[bytes, _Decoder]] = {
    C02: _answer_02,
    W02: _from_broker_to_worker,
    C01: _answer_01,
    W01: _from_broker_to_worker,
}


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def request(route: Route, header: bytes, service: bytes, body: Sequence[bytes]) -> Message:
    """A client's REQUEST (C2, C24)."""
    if header == C01:
        return [*route, header, service, *body]
    return [*route, header, b"\x01", service, *body]


def answer(route: Route, header: bytes, final: bool, service: bytes, body: Sequence[bytes]) -> Message:
    """The broker's PARTIAL or FINAL to a client (C3); for a 0.1 client its one reply (C24)."""
    if header == C01:
        return [*route, header, service, *body]
    return [*route, header, b"\x03" if final else b"\x02", service, *body]


def ready(route: Route, header: bytes, service: bytes) -> Message:
    """A worker's READY (C7)."""
    return [*route, header, b"\x01", service]


def work(route: Route, header: bytes, client: bytes, body: Sequence[bytes]) -> Message:
    """The broker's REQUEST to a worker (C7)."""
    return [*route, header, b"\x02", client, EMPTY, *body]


def reply(route: Route, header: bytes, kind: Kind, client: bytes, body: Sequence[bytes]) -> Message:
    """A worker's PARTIAL or FINAL (C7); a 0.1 worker has only the FINAL."""
    return [*route, header, CODES[header][kind], client, EMPTY, *body]


def heartbeat(route: Route, header: bytes) -> Message:
    """HEARTBEAT, to or from a worker (C7, C13)."""
    return [*route, header, CODES[header][Kind.HEARTBEAT]]


def disconnect(route: Route, header: bytes) -> Message:
    """DISCONNECT, to or from a worker (C7, C9)."""
    return [*route, header, CODES[header][Kind.DISCONNECT]]


def is_work(message: Message, route: Route, header: bytes) -> bool:
    """Whether `message` is a REQUEST to the worker behind `route` (and no other command, nor one to a client there)."""
    return message[: len(route) + 2] == [*route, header, b"\x02"]


def reply_kind(message: Message, route: Route, header: bytes) -> Kind | None:
    """PARTIAL or FINAL if that is how `message`, from the worker behind `route`, begins; else None."""
    at = len(route)
    if message[: at + 1] != [*route, header] or len(message) < at + 2:
        return None
    kind = _KINDS[header].get(message[at + 1])
    return kind if kind is Kind.PARTIAL or kind is Kind.FINAL else None


# ── a failed request, in a dialect that has no ERROR ─────────────────────────────────────────────────────────────────

ERROR_MARK: Final = b"zmdp.error"
"""First body frame of a FINAL that tells of a failure: `zmdp.error`, three digits, text.

MDP/0.2 has no way to say that a request failed, and asks for exactly one FINAL all the same (C8).  zmdp's workers end
such a request with this body and its clients raise `ServiceError`; a client of another make sees three readable frames.
"""


def error_body(code: int, text: str) -> list[bytes]:
    """The body of a FINAL that tells of a failure."""
    return [ERROR_MARK, b"%03d" % code, text.encode(errors="replace")]


def parse_error(body: Sequence[bytes]) -> tuple[int, str] | None:
    """The code and text of a failure told by `error_body`, or None for any other body."""
    if len(body) != 3 or body[0] != ERROR_MARK or len(body[1]) != 3 or not body[1].isdigit():
        return None
    return int(body[1]), body[2].decode(errors="replace")

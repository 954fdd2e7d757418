"""Frames ↔ commands: MDP/0.2, MDP/0.1 and X1, every side of both sub-protocols.

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

X1 (docs/x1.md) adds numbers, options, ERROR, CANCEL and credit; the envelope of a client's request ends with its
number:

    client → broker    MDPCX1 01 service options body+ · MDPCX1 05 service · MDPCX1 06
    broker → client    MDPCX1 02|03 service body+ · MDPCX1 04 service code text [detail] · MDPCX1 06
    worker → broker    MDPWX1 01 service [options] · MDPWX1 03|04 address "" body+ · MDPWX1 05 · MDPWX1 06
                       MDPWX1 07 address "" code text [detail] · MDPWX1 0A credit · MDPWX1 0B address ""
    broker → worker    MDPWX1 02 address "" options body+ · MDPWX1 05 · MDPWX1 06 · MDPWX1 08 address ""

and a second form, in which one message carries many commands (`batch`):

    MDPCX1|MDPWX1 09 records [attachment…]

What a peer sent is decoded to a command, to `Batched` commands, or to `Invalid`; decoding never raises, whatever the
bytes (C15, C43).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple, cast

from ..errors import SettingError

Frame = bytes
Message = list[bytes]
Route = tuple[bytes, ...]
Number = int | bytes | None
"""The number of an X1 request: an integer if it is written in decimal without leading zeros and fits 64 bits, else the
frame itself.  None where there is none: in other dialects, and in messages that should have had one."""
Address = int | bytes
"""The client address in a worker's REQUEST.  Our broker's are integers, in decimal where they are frames (C32)."""

C01: Final = b"MDPC01"
C02: Final = b"MDPC02"
CX1: Final = b"MDPCX1"
W01: Final = b"MDPW01"
W02: Final = b"MDPW02"
WX1: Final = b"MDPWX1"

HEADER: Final = 6
"""Bytes of a header."""
EMPTY: Final = b""
MMI: Final = b"mmi."
"""Services of this prefix the broker answers itself (C25)."""
MAX_ENVELOPE: Final = 16
"""Frames an envelope may have, its empty one included (C22)."""
MAX_NAME: Final = 255
"""Bytes a service name or an address may have (C23)."""
KNOWN_NAMES: Final = 4096
"""Service names that are known to be valid without a look at their characters."""
MAX_OPTIONS: Final = 65535
"""Bytes that the options of an X1 request may have as its client sends them, which a record of the batched form can
hold; the broker may write them longer in the framed form."""
SHARED: Final = 8192
"""Bytes from which a frame that a peer sent may come as a memoryview of libzmq's buffer (`multipart`)."""
NO_LIMIT: Final = 1 << 60
OVERLONG: Final = bytes(MAX_OPTIONS + 1)
"""Longer than any frame may be that is not a body's."""
MAX_NESTING: Final = 64
"""Objects and lists that may be in one another in the options of an X1 request, so that every peer can read them."""


class Kind(Enum):
    """The commands.  MDP/0.1 has no PARTIAL: its REPLY is a FINAL.  Only X1 has the last four."""

    READY = "READY"
    REQUEST = "REQUEST"
    PARTIAL = "PARTIAL"
    FINAL = "FINAL"
    HEARTBEAT = "HEARTBEAT"
    DISCONNECT = "DISCONNECT"
    ERROR = "ERROR"
    CANCEL = "CANCEL"
    CREDIT = "CREDIT"
    RELEASE = "RELEASE"


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
    CX1: {
        Kind.REQUEST: b"\x01",
        Kind.PARTIAL: b"\x02",
        Kind.FINAL: b"\x03",
        Kind.ERROR: b"\x04",
        Kind.CANCEL: b"\x05",
        Kind.HEARTBEAT: b"\x06",
    },
    WX1: {
        Kind.READY: b"\x01",
        Kind.REQUEST: b"\x02",
        Kind.PARTIAL: b"\x03",
        Kind.FINAL: b"\x04",
        Kind.HEARTBEAT: b"\x05",
        Kind.DISCONNECT: b"\x06",
        Kind.ERROR: b"\x07",
        Kind.CANCEL: b"\x08",
        Kind.CREDIT: b"\x0a",
        Kind.RELEASE: b"\x0b",
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

# Up to Python 3.11 it takes a call to get at a member of an Enum.
READY: Final = Kind.READY
REQUEST: Final = Kind.REQUEST
PARTIAL: Final = Kind.PARTIAL
FINAL: Final = Kind.FINAL
HEARTBEAT: Final = Kind.HEARTBEAT
DISCONNECT: Final = Kind.DISCONNECT
ERROR: Final = Kind.ERROR
CANCEL: Final = Kind.CANCEL
CREDIT: Final = Kind.CREDIT
RELEASE: Final = Kind.RELEASE

BATCH: Final = b"\x09"
"""In place of a command: the message is in the batched form (`batch`)."""

_KINDS: Final = {header: {code: kind for kind, code in codes.items()} for header, codes in CODES.items()}

_WORKERS: Final = frozenset({W01, W02, WX1})

DIALECTS: Final = {C01: "0.1", C02: "0.2", CX1: "X1", W01: "0.1", W02: "0.2", WX1: "X1"}
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
    BAD_OPTIONS = "bad-options"
    BAD_CODE = "bad-code"
    NO_NUMBER = "no-number"
    NUMBER_IN_USE = "number-in-use"
    UNKNOWN_NUMBER = "unknown-number"
    BAD_CREDIT = "bad-credit"
    BAD_RECORD = "bad-record"


class Invalid(NamedTuple):
    """A message, or a record of one, that is not a command: dropped and counted (C15, C43).

    Only what an X1 client sent, and only if the broker can answer it with an ERROR, has a route.
    """

    reason: Reason
    route: Route = ()
    number: Number = None
    service: bytes = EMPTY
    over_limit: bool = False
    """It has more bytes or frames than the broker accepts; it was not decoded."""


class _Value:
    """What comes with every request: like a NamedTuple, but made in a fraction of the time."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()
    __hash__ = None  # type: ignore[assignment]  # it may be changed

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self.__match_args__])

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and type(self) is type(other) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple(self)}"


class Options(_Value):
    """The options of an X1 request: the frame as it came, and what the broker looks at."""

    __slots__ = ("only_ttl", "raw", "ttl", "ttl_apart", "wait")
    __match_args__: ClassVar[tuple[str, ...]] = ("raw", "ttl", "wait", "only_ttl", "ttl_apart")

    def __init__(
        self,
        raw: bytes = EMPTY,
        ttl: float | None = None,
        wait: bool = True,
        only_ttl: bool = False,
        ttl_apart: bool = False,
    ) -> None:
        self.raw = raw
        self.ttl = ttl
        """Seconds."""
        self.wait = wait
        self.only_ttl = only_ttl
        """There are no options but a ttl."""
        self.ttl_apart = ttl_apart
        """The ttl is not in `raw`: it was beside the options, in a record."""

    def values(self) -> dict[str, Any]:
        """All of them, parsed anew: a broker that kept what it parsed would keep many times what came."""
        values: dict[str, Any] = json.loads(self.raw) if self.raw else {}
        return values


NO_OPTIONS: Final = Options()
LEGACY_OPTIONS: Final = {C01: Options(b'{"dialect":"0.1"}'), C02: Options(b'{"dialect":"0.2"}')}
"""The options of a request of a client that has none, for a worker that wants to know the dialect."""


class Request(_Value):
    """A client's REQUEST (C2, C24).  The route of an X1 request is that of its client: the number is not in it."""

    __slots__ = ("body", "header", "number", "options", "route", "service")
    __match_args__: ClassVar[tuple[str, ...]] = ("route", "header", "service", "body", "options", "number")

    def __init__(
        self,
        route: Route,
        header: bytes,
        service: bytes,
        body: list[bytes],
        options: Options = NO_OPTIONS,
        number: Number = None,
    ) -> None:
        self.route = route
        self.header = header
        self.service = service
        self.body = body
        self.options = options
        self.number = number


class Cancel(NamedTuple):
    """A client's CANCEL: the request of that number is no longer wanted (X1)."""

    route: Route
    header: bytes
    service: bytes | None
    """None in the batched form, where the number is enough."""
    number: Number


class Ready(NamedTuple):
    """A worker's READY: it offers `service` (C7), and in X1 holds up to `credit` requests."""

    route: Route
    header: bytes
    service: bytes
    credit: int = 1
    name: str = ""
    """What the worker says of itself (X1): printable, at most 255 characters each; empty where it does not."""
    host: str = ""
    pid: int = 0
    version: str = ""
    dialect: bool = False
    """It wants to be told by the option `dialect` if a request is of a client that does not speak X1."""


class Reply(_Value):
    """A worker's PARTIAL or FINAL, for the address that it was given in REQUEST (C7, C8)."""

    __slots__ = ("address", "body", "final", "header", "route")
    __match_args__: ClassVar[tuple[str, ...]] = ("route", "header", "final", "address", "body")

    def __init__(self, route: Route, header: bytes, final: bool, address: Address, body: list[bytes]) -> None:
        self.route = route
        self.header = header
        self.final = final
        self.address = address
        self.body = body


class Failure(NamedTuple):
    """A worker's ERROR: the request it was given ends with that (X1)."""

    route: Route
    header: bytes
    address: Address
    code: int
    text: bytes
    detail: list[bytes]
    """At most one frame."""


class Credit(NamedTuple):
    """A worker's CREDIT: it holds up to `credit` requests from now on (X1)."""

    route: Route
    header: bytes
    credit: int


class Release(NamedTuple):
    """A worker's RELEASE: it returns a request that it has not begun (X1)."""

    route: Route
    header: bytes
    address: Address


class Heartbeat(NamedTuple):
    """HEARTBEAT, from a worker, from an X1 client, or from the broker."""

    route: Route
    header: bytes


class Disconnect(NamedTuple):
    """DISCONNECT, from a worker or from the broker."""

    route: Route
    header: bytes


class Answer(_Value):
    """What the broker sends a client: a PARTIAL or a FINAL of `service` (C3)."""

    __slots__ = ("body", "final", "header", "number", "route", "service")
    __match_args__: ClassVar[tuple[str, ...]] = ("route", "header", "final", "service", "body", "number")

    def __init__(
        self, route: Route, header: bytes, final: bool, service: bytes, body: list[bytes], number: Number = None
    ) -> None:
        self.route = route
        self.header = header
        self.final = final
        self.service = service
        """Empty in the batched form, where the number is enough."""
        self.body = body
        self.number = number


class Work(_Value):
    """What the broker sends a worker: a REQUEST, to be answered to `address` (C7).

    In the batched form `ttl` (seconds) and `attempt` come beside the options; else they are None and 0.
    """

    __slots__ = ("address", "attempt", "body", "header", "options", "route", "ttl")
    __match_args__: ClassVar[tuple[str, ...]] = ("route", "header", "address", "body", "options", "ttl", "attempt")

    def __init__(
        self,
        route: Route,
        header: bytes,
        address: Address,
        body: list[bytes],
        options: Options = NO_OPTIONS,
        ttl: float | None = None,
        attempt: int = 0,
    ) -> None:
        self.route = route
        self.header = header
        self.address = address
        self.body = body
        self.options = options
        self.ttl = ttl
        self.attempt = attempt


class Error(NamedTuple):
    """The broker's ERROR to a client: its request ends with that (X1)."""

    route: Route
    header: bytes
    service: bytes
    """Empty in the batched form, where the number is enough."""
    code: int
    text: str
    detail: list[bytes]
    """At most one frame."""
    number: Number = None


class Withdraw(NamedTuple):
    """The broker's CANCEL to a worker: nobody waits any more for the request it was given (X1)."""

    route: Route
    header: bytes
    address: Address


class Oversized(NamedTuple):
    """A worker's PARTIAL, FINAL or ERROR over the broker's limits: not decoded, and counted as invalid."""

    route: Route
    header: bytes
    reason: Reason
    kind: Kind
    address: Address


class Batched(NamedTuple):
    """A message in the batched form, which `batch` decodes (X1)."""

    route: Route
    header: bytes
    at: int
    """The place of the header in the message."""
    bare: bool
    """There is nothing behind the header: a HEARTBEAT."""


FromPeer = Request | Cancel | Ready | Reply | Failure | Oversized | Credit | Release | Heartbeat | Disconnect
FromBroker = Answer | Error | Work | Withdraw | Heartbeat | Disconnect


def valid_service(name: bytes) -> bool:
    """Whether `name` may name a service: 1 to 255 bytes of printable UTF-8 (C23)."""
    if name in _known_names:
        return True
    if not 1 <= len(name) <= MAX_NAME or not _printable(name):
        return False
    if len(_known_names) >= KNOWN_NAMES:
        _known_names.clear()
    _known_names.add(name)
    return True


def service_name(name: str | bytes | bytearray | memoryview) -> bytes:
    """`name` as it goes on the wire.  Raises `SettingError` if it names no service (C23)."""
    try:
        encoded = name.encode() if isinstance(name, str) else bytes(name)
    except UnicodeEncodeError:
        encoded = EMPTY
    if not valid_service(encoded):
        raise SettingError(f"{name!r} is no service name: it takes 1 to {MAX_NAME} bytes of printable text")
    return encoded


def number_of(frame: bytes) -> int | bytes:
    """A number or an address from its frame: an integer if it is one in decimal, without leading zeros, of 64 bits."""
    if not 1 <= len(frame) <= 20 or not frame.isdigit() or (frame[0] == 48 and len(frame) > 1):
        return frame
    number = int(frame)
    return number if number < 1 << 64 else frame


def frame_of(number: int | bytes) -> bytes:
    """The frame of a number or an address."""
    return number if isinstance(number, bytes) else b"%d" % number


def envelope_of(number: Number) -> Route:
    """The envelope of an X1 client's request: its number and the empty frame."""
    return (EMPTY,) if number is None else (frame_of(number), EMPTY)


def valid_code(code: bytes) -> bool:
    """Whether `code` is the code of an ERROR: three digits."""
    return len(code) == 3 and code.isdigit()


_known_names: Final[set[bytes]] = set()
"""Service names that were found valid lately."""


def _printable(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


@lru_cache(maxsize=1024)
def _cached_options(raw: bytes) -> Options | None:
    return _parse_options(raw)


def parse_options(raw: bytes) -> Options | None:
    """The options of an X1 request: empty, or a JSON object.  None if they are malformed."""
    if not raw:
        return NO_OPTIONS
    return _cached_options(raw) if len(raw) <= MAX_NAME else _parse_options(raw)


def _finite(number: str) -> float:
    """The number that JSON tells.  Raises `ValueError` for what could not be told in JSON again."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(number)
    return value


_JSON: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _parse_options(raw: bytes) -> Options | None:
    try:
        values = _JSON.decode(raw.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not _shallow(values):
        return None
    ttl, wait, headers = values.get("ttl"), values.get("wait", True), values.get("headers", {})
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 <= ttl < MAX_TTL):
        return None
    if not isinstance(wait, bool) or not isinstance(headers, dict):
        return None
    if not all(isinstance(value, str) for value in headers.values()):
        return None
    return Options(raw, None if ttl is None else ttl / 1000, wait, ttl is not None and len(values) == 1)


def _shallow(values: dict[str, Any]) -> bool:
    level: list[Any] = [values]
    for _ in range(MAX_NESTING):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


MAX_TTL: Final = 1e15
"""Milliseconds."""


def options(values: Mapping[str, Any]) -> bytes:
    """`values` as the options frame of an X1 request; empty if there are none.

    Raises `SettingError` for what is no JSON, or would be malformed.
    """
    if not values:
        return EMPTY
    try:
        raw = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"options cannot be sent as JSON: {error}") from None
    if len(raw) > MAX_OPTIONS or parse_options(raw) is None:
        raise SettingError(
            f"options are {raw[:200]!r}: ttl is a number of milliseconds, wait is true or false, headers map text to "
            f"text, and all together take at most {MAX_OPTIONS} bytes, no more than {MAX_NESTING} levels deep"
        )
    return raw


def options_with(given: Options, ttl: int | None, attempt: int) -> bytes:
    """The options frame of a request that is handed to a worker: with what is left of its ttl, in milliseconds, and
    from the second on with the attempt."""
    if attempt <= 1 and ttl is not None and (given.only_ttl or not given.raw):
        return b'{"ttl":%d}' % ttl
    values = given.values()
    if ttl is not None:
        values["ttl"] = ttl
    if attempt > 1:
        values["attempt"] = attempt
    return json.dumps(values, separators=(",", ":")).encode() if values else EMPTY


def options_without_ttl(given: Options) -> bytes:
    """The options of a request that is handed to a worker in a record, which has its ttl beside them."""
    if given.ttl is None or given.ttl_apart:
        return given.raw
    if given.only_ttl:
        return EMPTY
    values = given.values()
    del values["ttl"]
    return json.dumps(values, separators=(",", ":")).encode()


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    at = _header_at(message, 1)
    if at < 0:
        return Invalid(_NO_HEADER[at])
    header = message[at]
    if header in (W02, WX1, W01):
        return _from_worker(message, at)
    if header == CX1:
        return _from_client_x1(message, at)
    return _request(message, at, C02 if header == C02 else C01)  # not the frame, of which many may wait


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
            return Batched(_route(message, at), CX1 if frame == CX1 else WX1, at, bare)
        if len(frame) > MAX_NAME or (_is_header(frame) if at == start else ended):
            return None  # no envelope, or one that has ended: what follows is not looked at
    return None


def decode_broker(message: Message) -> FromBroker | Batched | Invalid:
    """What a broker sent to a client's or a worker's DEALER."""
    found = _batched(message, 0)
    if found is not None:
        return found
    at = _header_at(message, 0)
    if at < 0:
        return Invalid(_NO_HEADER[at])
    header = message[at]
    if header in (W02, WX1, W01):
        return _from_broker_to_worker(message, at)
    if header == CX1:
        return _to_client_x1(message, at)
    if header == C02:
        return _answer_02(message, at)
    return _answer_01(message, at)


def size_of(frames: Sequence[bytes]) -> int:
    """Bytes of all frames together."""
    size = 0
    every: Any = frames  # a memoryview is no bytes
    if isinstance(every, list):
        for frame in every:
            size += len(frame)
    else:
        for frame in every:
            size += len(frame)
    return size


_NO_HEADER: Final = (Reason.ENVELOPE_TOO_DEEP, Reason.TOO_FEW_FRAMES, Reason.NO_HEADER)
"""Why there is none, counted from the end."""


def _is_header(frame: bytes) -> bool:
    if len(frame) != HEADER:
        return False
    return frame in (C02, W02, CX1, WX1, C01, W01)


def _header_at(message: Message, start: int) -> int:
    """Where the header is, past an envelope if there is one; negative if there is none, see `_NO_HEADER`."""
    count = len(message)
    if count <= start:
        return -2
    if _is_header(message[start]):
        return start
    # C22: an envelope is what stands before the header, up to and including one empty frame.  Its frames are addresses.
    for at in range(start, min(count, start + MAX_ENVELOPE)):
        if len(message[at]) > MAX_NAME:
            return -1
        if not message[at]:
            if at + 1 == count:
                return -2
            return at + 1 if _is_header(message[at + 1]) else -1
    return -3 if count > start + MAX_ENVELOPE else -1


def _route(message: Message, at: int) -> Route:
    """What stands before the header."""
    return (message[0],) if at == 1 else tuple(message[:at])


def _request(message: Message, at: int, header: bytes) -> FromPeer | Invalid:
    """`MDPC02 01 service body+` (C2, C19), `MDPC01 service body+` (C24)."""
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
    return Request(_route(message, at), header, service, body)


def _from_client_x1(message: Message, at: int) -> FromPeer | Invalid:
    """`MDPCX1 01 service options body+`, `MDPCX1 05 service`, `MDPCX1 06`; what is wrong can be answered.

    There is a command: a bare header is in the batched form.
    """
    route, number = _numbered_route(message, at)
    kind = _KINDS[CX1].get(message[at + 1])
    if kind is HEARTBEAT:
        if len(message) > at + 2:
            return _answerable(Reason.TOO_MANY_FRAMES, route, number)
        return Heartbeat(_route(message, at), CX1)
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


def _numbered_route(message: Message, at: int) -> tuple[Route, Number]:
    """The route of an X1 client, and the number of its request, which stands before the empty frame.

    From `id… number "" MDPCX1 …` that is `id… ""`.
    """
    if at == 3:  # from a client that is connected itself
        return (message[0], EMPTY), number_of(message[1])
    if at < 3:
        return _route(message, at), None
    return (*message[: at - 2], EMPTY), number_of(message[at - 2])


def _answerable(reason: Reason, route: Route, number: Number, service: bytes = EMPTY) -> Invalid:
    """What is wrong with an X1 client's message, and where to say so: nowhere if it came without an envelope."""
    return Invalid(reason, route, number, service) if len(route) > 1 else Invalid(reason)


def _over_limit(message: Message, reason: Reason) -> Invalid | Oversized:
    """What is over a limit is not decoded; but an X1 client that sent it with an envelope can be told, and a worker's
    reply concerns the request that it is for."""
    at = _header_at(message, 1)
    if at < 0 or at + 1 >= len(message):
        return Invalid(reason, over_limit=True)
    header = message[at]
    if header == CX1 and at > 1:
        route, number = _numbered_route(message, at)
        service = message[at + 2] if len(message) > at + 2 and valid_service(message[at + 2]) else EMPTY
        return Invalid(reason, route, number, service, over_limit=True)
    if header in _WORKERS:
        kind = _KINDS[header].get(message[at + 1])
        addressed = len(message) > at + 2 and 1 <= len(message[at + 2]) <= MAX_NAME
        if addressed and (kind is PARTIAL or kind is FINAL or kind is ERROR):
            return Oversized(_route(message, at), header, reason, kind, number_of(message[at + 2]))
    return Invalid(reason, over_limit=True)


def _from_worker(message: Message, at: int) -> FromPeer | Invalid:
    """`MDPW02 01 service`, `MDPW02 03|04 address "" body+`, `MDPW02 05|06` (C7); the 0.1 codes differ (C24).

    X1 has options with READY, `MDPWX1 07 address "" code text [detail]`, CREDIT and RELEASE besides.
    """
    header = message[at]
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = _KINDS[header].get(message[at + 1])
    if kind is FINAL or kind is PARTIAL:
        return _worker_reply(message, at, final=kind is FINAL)
    if kind is ERROR:
        return _worker_error(message, at)
    if kind is READY:
        return _worker_ready(message, at)
    if kind is CREDIT:
        if len(message) != at + 3:
            return Invalid(Reason.TOO_FEW_FRAMES if len(message) < at + 3 else Reason.TOO_MANY_FRAMES)
        if not 1 <= len(message[at + 2]) <= 20 or not message[at + 2].isdigit():
            return Invalid(Reason.BAD_CREDIT)
        return Credit(_route(message, at), WX1, int(message[at + 2]))
    if kind is RELEASE:
        wrong = _check_address(message, at)
        if wrong is not None:
            return wrong
        if len(message) > at + 4:
            return Invalid(Reason.TOO_MANY_FRAMES)
        return Release(_route(message, at), WX1, number_of(message[at + 2]))
    return _bare(message, at, kind)


def _worker_reply(message: Message, at: int, *, final: bool) -> Reply | Invalid:
    body_at = at + 4
    if message[at] == W01 and len(message) > at + 3 and message[at + 3]:
        body_at = at + 3  # C33: the Guide's PHP worker leaves out the empty frame
        wrong = None if 1 <= len(message[at + 2]) <= MAX_NAME else Invalid(Reason.BAD_ADDRESS)
    else:
        wrong = _check_addressed(message, at)
    if wrong is not None:
        return wrong
    return Reply(_route(message, at), message[at], final, number_of(message[at + 2]), message[body_at:])


def _worker_error(message: Message, at: int) -> Failure | Invalid:
    wrong = _check_addressed(message, at)
    if wrong is not None:
        return wrong
    if len(message) < at + 6:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if len(message) > at + 7:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if not valid_code(message[at + 4]):
        return Invalid(Reason.BAD_CODE)
    address, code = number_of(message[at + 2]), int(message[at + 4])
    return Failure(_route(message, at), WX1, address, code, message[at + 5], message[at + 6 :])


def _worker_ready(message: Message, at: int) -> Ready | Invalid:
    header = message[at]
    if len(message) < at + 3:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if len(message) > at + (4 if header == WX1 else 3):
        return Invalid(Reason.TOO_MANY_FRAMES)
    if header == WX1:
        return ready_with(_route(message, at), message[at + 2], message[at + 3] if len(message) > at + 3 else EMPTY)
    if not valid_service(message[at + 2]):
        return Invalid(Reason.BAD_SERVICE)
    return Ready(_route(message, at), header, message[at + 2])


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
    return Ready(route, WX1, service, asked, _displayed(name), _displayed(host), pid, _displayed(version), dialect)


def _displayed(text: str) -> str:
    """`text` as it may stand in a log: at most 255 characters, all of them printable."""
    text = text[:MAX_NAME]
    return text if text.isprintable() else "".join([each if each.isprintable() else "?" for each in text])


def _from_broker_to_worker(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPW0x 02 address "" body+`, `MDPW02 05|06`, `MDPW01 04|05` (C7, C24); X1 has options and CANCEL besides."""
    if len(message) < at + 2:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = _KINDS[message[at]].get(message[at + 1])
    if kind is REQUEST:
        wrong = _check_addressed(message, at)
        if wrong is not None:
            return wrong
        address = number_of(message[at + 2])
        if message[at] != WX1:
            return Work(_route(message, at), message[at], address, message[at + 4 :])
        options = parse_options(message[at + 4])
        if options is None:
            return Invalid(Reason.BAD_OPTIONS)
        if len(message) == at + 5:
            return Invalid(Reason.NO_BODY)
        return Work(_route(message, at), WX1, address, message[at + 5 :], options)
    if kind is CANCEL:
        wrong = _check_address_only(message, at)
        return Withdraw(_route(message, at), WX1, number_of(message[at + 2])) if wrong is None else wrong
    return _bare(message, at, kind)


def _check_addressed(message: Message, at: int) -> Invalid | None:
    """`header command address "" body+` (C8)."""
    wrong = _check_address(message, at)
    if wrong is None and len(message) == at + 4:
        return Invalid(Reason.NO_BODY)
    return wrong


def _check_address(message: Message, at: int) -> Invalid | None:
    """`header command address ""`: exactly one address frame, then one empty frame (C8, C23)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    if not 1 <= len(message[at + 2]) <= MAX_NAME:
        return Invalid(Reason.BAD_ADDRESS)
    if message[at + 3]:
        return Invalid(Reason.NO_DELIMITER)
    return None


def _check_address_only(message: Message, at: int) -> Invalid | None:
    """`header command address ""`, and nothing more."""
    wrong = _check_address(message, at)
    if wrong is None and len(message) > at + 4:
        return Invalid(Reason.TOO_MANY_FRAMES)
    return wrong


def _bare(message: Message, at: int, kind: Kind | None) -> Heartbeat | Disconnect | Invalid:
    """HEARTBEAT or DISCONNECT: a header and a command, nothing more."""
    if kind is not HEARTBEAT and kind is not DISCONNECT:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if len(message) > at + 2:
        return Invalid(Reason.TOO_MANY_FRAMES)
    command = Heartbeat if kind is HEARTBEAT else Disconnect
    return command(_route(message, at), message[at])


def _answer_02(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPC02 02|03 service body+` (C3)."""
    if len(message) < at + 4:
        return Invalid(Reason.TOO_FEW_FRAMES)
    kind = _KINDS[C02].get(message[at + 1])
    if kind is not PARTIAL and kind is not FINAL:
        return Invalid(Reason.UNKNOWN_COMMAND)
    return Answer(_route(message, at), C02, kind is FINAL, message[at + 2], message[at + 3 :])


def _answer_01(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPC01 service body+` (C24)."""
    if len(message) < at + 3:
        return Invalid(Reason.TOO_FEW_FRAMES)
    return Answer(_route(message, at), C01, True, message[at + 1], message[at + 2 :])


def _to_client_x1(message: Message, at: int) -> FromBroker | Invalid:
    """`MDPCX1 02|03 service body+`, `MDPCX1 04 service code text [detail]`, `MDPCX1 06`."""
    count = len(message) - at
    kind = _KINDS[CX1].get(message[at + 1])
    if kind is HEARTBEAT:
        return _bare(message, at, kind)
    if kind is not PARTIAL and kind is not FINAL and kind is not ERROR:
        return Invalid(Reason.UNKNOWN_COMMAND)
    if count < (5 if kind is ERROR else 4):
        return Invalid(Reason.TOO_FEW_FRAMES)
    service = message[at + 2]
    number = number_of(message[at - 2]) if at >= 2 else None
    if kind is not ERROR:
        return Answer(_route(message, at), CX1, kind is FINAL, service, message[at + 3 :], number)
    if count > 6:
        return Invalid(Reason.TOO_MANY_FRAMES)
    if not valid_code(message[at + 3]):
        return Invalid(Reason.BAD_CODE)
    text = message[at + 4].decode(errors="replace")
    return Error(_route(message, at), CX1, service, int(message[at + 3]), text, message[at + 5 :], number)


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def request(route: Route, header: bytes, service: bytes, body: Sequence[bytes], options: bytes = EMPTY) -> Message:
    """A client's REQUEST (C2, C24); only X1 has options."""
    if header == CX1:
        return [*route, header, b"\x01", service, options, *body]
    if header == C01:
        return [*route, header, service, *body]
    return [*route, header, b"\x01", service, *body]


def answer(route: Route, header: bytes, final: bool, service: bytes, body: Sequence[Any]) -> Message:
    """The broker's PARTIAL or FINAL to a client (C3); for a 0.1 client its one reply (C24).

    What the broker passes on may have memoryviews in its body.
    """
    if header == C01:
        return [*route, header, service, *body]
    command = b"\x03" if final else b"\x02"
    if len(body) == 1:  # the common cases, which are worth a short way
        if len(route) == 1:
            return [route[0], header, command, service, body[0]]
        if len(route) == 3:
            return [route[0], route[1], route[2], header, command, service, body[0]]
    return [*route, header, command, service, *body]


def error(route: Route, service: bytes, code: bytes, text: bytes, detail: Sequence[bytes] = ()) -> Message:
    """The broker's ERROR to an X1 client."""
    return [*route, CX1, b"\x04", service, code, text, *detail]


def cancel(route: Route, service: bytes) -> Message:
    """An X1 client's CANCEL of the request that has this route."""
    return [*route, CX1, b"\x05", service]


def ready(route: Route, header: bytes, service: bytes, options: bytes = EMPTY) -> Message:
    """A worker's READY (C7); only X1 has options."""
    return [*route, header, b"\x01", service, options] if options else [*route, header, b"\x01", service]


def work(route: Route, header: bytes, address: Address, body: Sequence[Any], options: bytes = EMPTY) -> Message:
    """The broker's REQUEST to a worker (C7), with a body as in `answer`; only X1 has options."""
    client = frame_of(address)
    if header == WX1:
        return [*route, header, b"\x02", client, EMPTY, options, *body]
    if len(body) == 1 and len(route) == 1:  # the common case, which is worth a short way
        return [route[0], header, b"\x02", client, EMPTY, body[0]]
    return [*route, header, b"\x02", client, EMPTY, *body]


def reply(route: Route, header: bytes, kind: Kind, address: Address, body: Sequence[bytes]) -> Message:
    """A worker's PARTIAL or FINAL (C7); a 0.1 worker has only the FINAL."""
    return [*route, header, CODES[header][kind], frame_of(address), EMPTY, *body]


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


def heartbeat(route: Route, header: bytes) -> Message:
    """HEARTBEAT, to or from a worker (C7, C13), to or from an X1 client."""
    return [*route, header, CODES[header][Kind.HEARTBEAT]]


def disconnect(route: Route, header: bytes) -> Message:
    """DISCONNECT, to or from a worker (C7, C9)."""
    return [*route, header, CODES[header][Kind.DISCONNECT]]


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

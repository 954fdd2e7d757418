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

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import ClassVar, Final, NamedTuple

from .options import NO_OPTIONS, Options
from .value import Value

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
EMPTY: Final = b""


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
KINDS: Final = {header: {code: kind for kind, code in codes.items()} for header, codes in CODES.items()}
WORKER_HEADERS: Final = frozenset({W01, W02, WX1})
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


LEGACY_OPTIONS: Final = {C01: Options(b'{"dialect":"0.1"}'), C02: Options(b'{"dialect":"0.2"}')}
"""The options of a request of a client that has none, for a worker that wants to know the dialect."""


class Request(Value):
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


class Reply(Value):
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


class Answer(Value):
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


class Work(Value):
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

"""The commands of MDP/0.2, MDP/0.1 and X1: one class per command, the same on both sides of the wire.

Nothing here uses a socket, a queue or a clock.  A *message* is a list of frames.  Its *route* is the frames before the
header, which are put unchanged in front of every message that goes back: the ROUTER's identity frame if there is one,
then the envelope (C22).  The layouts, without the route:

    client → broker    MDPC02 01 service body+               MDPC01 service body+
    broker → client    MDPC02 02|03 service body+            MDPC01 service body+
    worker → broker    MDPW02 01 service                     MDPW01 01 service
                       MDPW02 03|04 client "" body+          MDPW01 03 client "" body+
                       MDPW02 05 · MDPW02 06                 MDPW01 04 · MDPW01 05
    broker → worker    MDPW02 02 client "" body+             MDPW01 02 client "" body+
                       MDPW02 05 · MDPW02 06                 MDPW01 04 · MDPW01 05

X1 (docs/reference/x1.md) has other messages, each with many commands (`batch`); a bare header is a HEARTBEAT:

    MDPCX1|MDPWX1 [09 records [attachment…]]

Links between brokers (docs/reference/links.md) use such messages under two headers of their own: `MDPCL1` for what a
broker says as a client of the other, and `MDPWL1` for what it says as a worker.

A message decodes to a command, to `Batched`, or to `Invalid`.  Decoding never raises, whatever the bytes (C15, C43).
"""

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import ClassVar, Final, NamedTuple

from ..service_limits import NO_LIMITS, ServiceLimits
from .options import NO_OPTIONS, Options
from .value import Value

Frame = bytes
Message = list[bytes]
Route = tuple[bytes, ...]
RequestId = int | bytes | None
"""What distinguishes requests: the number that an X1 client gave, or the client address in a worker's REQUEST.

X1's are integers of 64 bits.  A worker's address in another dialect is an integer if the frame is decimal without
leading zeros and fits 64 bits, else the frame itself.  None if the message has none: a client's in other dialects, or a
malformed one.
"""
Address = int | bytes
"""The id in a REQUEST to a worker and in its replies.  Our broker's addresses are integers (C32)."""
C01: Final = b"MDPC01"
C02: Final = b"MDPC02"
CX1: Final = b"MDPCX1"
W01: Final = b"MDPW01"
W02: Final = b"MDPW02"
WX1: Final = b"MDPWX1"
CL1: Final = b"MDPCL1"
WL1: Final = b"MDPWL1"
CPP: Final = b"PPP client"
WPP: Final = b"PPP worker"
WSP: Final = b"Simple Pirate worker"
"""Headers that stand for none, in the commands of pirates (`pirate`); never on the wire."""
EMPTY: Final = b""


class Kind(Enum):
    """The names of the commands.  MDP/0.1 has no PARTIAL: its REPLY is a FINAL.  Only X1 has the last two."""

    READY = "READY"
    REQUEST = "REQUEST"
    PARTIAL = "PARTIAL"
    FINAL = "FINAL"
    HEARTBEAT = "HEARTBEAT"
    DISCONNECT = "DISCONNECT"
    ERROR = "ERROR"
    CANCEL = "CANCEL"


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
    WPP: {Kind.READY: b"\x01", Kind.HEARTBEAT: b"\x02"},
}
"""The command byte of the commands of each dialect except X1.  The messages of 0.1 clients carry none; with PPP, only
these do."""
# Up to Python 3.11, reading a member of an Enum takes a call.
READY: Final = Kind.READY
REQUEST: Final = Kind.REQUEST
PARTIAL: Final = Kind.PARTIAL
FINAL: Final = Kind.FINAL
HEARTBEAT: Final = Kind.HEARTBEAT
DISCONNECT: Final = Kind.DISCONNECT
ERROR: Final = Kind.ERROR
BATCH: Final = b"\x09"
"""Stands in place of a command in an X1 message that has records (`batch`)."""
KINDS: Final = {header: {code: kind for kind, code in codes.items()} for header, codes in CODES.items()}
ONE_REPLY: Final = frozenset({C01, CPP})
"""The headers of clients that get the PARTIALs and the FINAL in one reply (C24)."""
DIALECTS: Final = {
    C01: "0.1",
    C02: "0.2",
    CX1: "X1",
    W01: "0.1",
    W02: "0.2",
    WX1: "X1",
    CPP: "PPP",
    WPP: "PPP",
    WSP: "Simple Pirate",
}
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
    NUMBER_IN_USE = "number-in-use"
    UNKNOWN_NUMBER = "unknown-number"
    BAD_RECORD = "bad-record"


class Invalid(NamedTuple):
    """A message, or a record of one, that is not a valid command: dropped and counted (C15, C43).

    It has a route only if it came from an X1 client whom the broker can answer with an ERROR.
    """

    reason: Reason
    route: Route = ()
    id: int | None = None
    over_limit: bool = False
    """Whether it has more bytes or frames than the broker accepts, and was not decoded."""


class Request(Value):
    """REQUEST: from a client to the broker (C2, C24), or from the broker to a worker (C7).

    From a client, `id` is the number of an X1 request.  To a worker, `id` is the address to reply to.
    """

    __slots__ = ("attempt", "body", "header", "id", "options", "route", "service", "ttl")
    __match_args__: ClassVar[tuple[str, ...]] = (
        "route", "header", "service", "body", "options", "id", "ttl", "attempt",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        header: bytes,
        service: bytes,
        body: list[bytes],
        options: Options = NO_OPTIONS,
        id: RequestId = None,  # noqa: A002 - the wire's word
        ttl: float | None = None,
        attempt: int = 0,
    ) -> None:
        self.route = route
        self.header = header
        self.service = service
        """Empty in a REQUEST to a worker, which offers one service only."""
        self.body = body
        self.options = options
        self.id = id
        self.ttl = ttl
        """Seconds left; None without a limit, as always in 0.2 and 0.1."""
        self.attempt = attempt
        """Which attempt this is, to an X1 worker, counted from 1; else 0."""


class Reply(Value):
    """PARTIAL or FINAL: from a worker to the broker (C7, C8), or from the broker to a client (C3)."""

    __slots__ = ("body", "final", "header", "id", "route", "service")
    __match_args__: ClassVar[tuple[str, ...]] = ("route", "header", "final", "id", "body", "service")

    def __init__(
        self,
        route: Route,
        header: bytes,
        final: bool,
        id: RequestId,  # noqa: A002 - the wire's word
        body: list[bytes],
        service: bytes = EMPTY,
    ) -> None:
        self.route = route
        self.header = header
        self.final = final
        self.id = id
        self.body = body
        self.service = service
        """Empty from a worker, and in X1, where the id is enough."""


class Error(NamedTuple):
    """ERROR (X1), which ends a request: from a worker to the broker, or from the broker to a client."""

    route: Route
    header: bytes
    id: int
    code: int
    text: bytes
    detail: list[bytes]
    """At most one frame."""
    reason: bytes = EMPTY
    """The broker's name for why it ended the request; empty if a worker did."""
    lost: int = 0
    """How many workers were lost while they held the request, as the broker says: 65535 or more are 65535."""


class Cancel(NamedTuple):
    """CANCEL (X1), from a client or from the broker to a worker: nobody wants the reply any longer."""

    route: Route
    header: bytes
    id: int


class Limits(NamedTuple):
    """LIMITS (X1): from a client, the question how large a request may be; from the broker, the answer."""

    route: Route
    header: bytes
    max_bytes: int = 0
    max_frames: int = 0


class Ready(NamedTuple):
    """A worker's READY: it offers `service` (C7), and in X1 holds up to `credit` requests."""

    route: Route
    header: bytes
    service: bytes
    credit: int = 1
    name: str = ""
    """What the worker reports about itself (X1): printable, at most 255 characters each; empty if not given."""
    host: str = ""
    pid: int = 0
    version: str = ""
    dialect: bool = False
    """The worker wants the option `dialect` with each request of a client that does not speak X1."""
    hops: int = 0
    """Over a link: how many brokers away the service is.  0 withdraws it."""
    free: int = 0
    """Over a link: how much of `credit` is free."""
    about: bytes = EMPTY
    """What the worker says of its service (X1): a JSON object, or empty if it says nothing, or too much."""
    limits: ServiceLimits = NO_LIMITS
    """The limits that it declares for its service (X1)."""


class Credit(NamedTuple):
    """A worker's CREDIT: it holds up to `credit` requests from now on (X1)."""

    route: Route
    header: bytes
    credit: int


class Release(NamedTuple):
    """A worker's RELEASE: it returns a request that it has not started (X1)."""

    route: Route
    header: bytes
    id: int


class Heartbeat(NamedTuple):
    """HEARTBEAT, from a worker, from an X1 client, or from the broker."""

    route: Route
    header: bytes


class Disconnect(NamedTuple):
    """DISCONNECT, from a worker or from the broker.  To an X1 client it says that the broker drains."""

    route: Route
    header: bytes
    text: bytes = EMPTY
    """Why the broker refuses the worker, or ends the link (X1); else empty."""


class Oversized(NamedTuple):
    """A worker's PARTIAL, FINAL or ERROR over the broker's limits: not decoded, and counted as invalid."""

    route: Route
    header: bytes
    reason: Reason
    kind: Kind
    id: RequestId
    service: bytes = EMPTY
    """What a Simple Pirate offers, as in its `Reply`."""


class Batched(NamedTuple):
    """An X1 message, which `batch` decodes."""

    route: Route
    header: bytes
    at: int
    """The index of the header in the message."""
    bare: bool
    """Nothing follows the header: a HEARTBEAT."""


FromPeer = Request | Reply | Ready | Oversized | Heartbeat | Disconnect
"""What a message to the broker is in every dialect but X1."""
FromBroker = Request | Reply | Heartbeat | Disconnect
"""What a message from the broker is in every dialect but X1."""

"""Flux messages: parts ↔ typed values, for RFC 3 as flux-core speaks it and for CMB1, its predecessor.

Nothing here uses a socket or a clock.  A message is a list of *parts*, the last of which is the header:

    [route… ""] [topic] [payload] header

    header := 8E 01 type flags userid:u32 rolemask:u32 a:u32 b:u32      integers big-endian

    type 1  request     a = nodeid       b = matchtag
    type 2  response    a = errnum       b = matchtag
    type 4  event       a = sequence     b = 0
    type 8  control     a = type         b = status       (CMB1: keepalive, a = errnum)

The flags say which parts are there.  The first route is the hop that the message passed last.  Topics and routes have
no NUL at their end; JSON and string payloads do.

The dialects differ in this: in CMB1, only a message with routes needs the delimiter; in RFC 3, requests and responses
always have it.  RFC 3 forbids it in events, but flux-core sends events with it, and with routes, so it is accepted.
CMB1 topics consist of letters, digits and periods.  Only flux-core has the flag `user1`, which belongs to the
application.  A flag without a meaning for the type of its message is ignored, as flux-core ignores it.

A message decodes to a value or to `Invalid`.  Decoding never raises, whatever the bytes.
"""

import string
from dataclasses import dataclass
from struct import Struct
from typing import Final, Literal

Parts = list[bytes]
Routes = tuple[bytes, ...]
"""The route stack; the first is on top."""
Dialect = Literal["RFC3", "CMB1"]
RFC3: Final = "RFC3"
CMB1: Final = "CMB1"

MAX_ROUTES: Final = 256
MAX_ROUTE: Final = 255
"""The size of a route in bytes; ZeroMQ has the same limit."""
MAX_TOPIC: Final = 1024
"""The size of a topic in bytes."""
MAX_PARTS: Final = MAX_ROUTES + 4
"""The routes, their delimiter, topic, payload and header."""
HEADER_SIZE: Final = 20

NODEID_ANY: Final = 0xFFFFFFFF
NODEID_UPSTREAM: Final = 0xFFFFFFFE
"""Reserved for programming interfaces: on the wire, it is the flag `upstream` and the sender's rank."""
USERID_UNKNOWN: Final = 0xFFFFFFFF
MATCHTAG_NONE: Final = 0

ROLE_NONE: Final = 0
ROLE_OWNER: Final = 1
ROLE_USER: Final = 2
ROLE_LOCAL: Final = 4

# Linux's numbers, whatever the system that this runs on.
EPERM: Final = 1
ENOENT: Final = 2
EIO: Final = 5
EAGAIN: Final = 11
EEXIST: Final = 17
EINVAL: Final = 22
ENOSYS: Final = 38
ENODATA: Final = 61
EPROTO: Final = 71
EMSGSIZE: Final = 90
ETIMEDOUT: Final = 110
EHOSTUNREACH: Final = 113
ECANCELED: Final = 125

# Plain integers: members of an IntFlag take a microsecond to combine.
_REQUEST: Final = 0x01
_RESPONSE: Final = 0x02
_EVENT: Final = 0x04
_CONTROL: Final = 0x08

_TOPIC: Final = 0x01
_PAYLOAD: Final = 0x02
_NORESPONSE: Final = 0x04
_ROUTE: Final = 0x08
_UPSTREAM: Final = 0x10
_PRIVATE: Final = 0x20
_STREAMING: Final = 0x40
_USER1: Final = 0x80
_PARTS: Final = _TOPIC | _PAYLOAD | _ROUTE
_NEVER: Final = _NORESPONSE | _STREAMING

_MAGIC: Final = 0x8E
_VERSION: Final = 1
_HEADER: Final = Struct(">BBBBIIII")
_unpack: Final = _HEADER.unpack
_pack: Final = _HEADER.pack
_CMB1_CHARACTERS: Final = f"{string.ascii_letters}{string.digits}.".encode()


@dataclass(frozen=True, slots=True)
class FluxRequest:
    """A request to the service that its topic begins with."""

    topic: str
    payload: bytes | None = None
    """None if there is none, which is not the same as an empty one."""
    matchtag: int = MATCHTAG_NONE
    nodeid: int = NODEID_ANY
    """The rank to which the request goes; with `upstream`, the rank that sent it."""
    routes: Routes | None = ()
    """None without a route delimiter, as CMB1 allows."""
    userid: int = USERID_UNKNOWN
    rolemask: int = ROLE_NONE
    noresponse: bool = False
    """The sender wants no response, not even that the request failed."""
    upstream: bool = False
    streaming: bool = False
    user1: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """A response; the last one to a request, unless it is streaming and `errnum` is 0."""

    topic: str
    payload: bytes | None = None
    matchtag: int = MATCHTAG_NONE
    errnum: int = 0
    """0, or why the request failed; ENODATA ends a stream."""
    routes: Routes | None = ()
    userid: int = USERID_UNKNOWN
    rolemask: int = ROLE_NONE
    upstream: bool = False
    """Means nothing here; flux-core leaves it set if the request had it."""
    streaming: bool = False
    user1: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """An event, which goes to all subscribers of its topic."""

    topic: str
    payload: bytes | None = None
    sequence: int = 0
    routes: Routes | None = None
    """Means nothing here."""
    userid: int = USERID_UNKNOWN
    rolemask: int = ROLE_NONE
    private: bool = False
    """Only for connections of the user who published it, and of the instance owner."""
    user1: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """RFC 3: what direct peers tell each other; never routed."""

    type: int = 0
    status: int = 0
    userid: int = USERID_UNKNOWN
    rolemask: int = ROLE_NONE
    user1: bool = False


@dataclass(frozen=True, slots=True)
class Keepalive:
    """CMB1: the peer is alive."""

    errnum: int = 0
    status: int = 0
    userid: int = USERID_UNKNOWN
    rolemask: int = ROLE_NONE


@dataclass(frozen=True, slots=True)
class Invalid:
    """A message that breaks a rule.  The reasons are a fixed set: they contain nothing of the message."""

    reason: str


Message = FluxRequest | Response | Event | Control | Keepalive


# ── encode ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Message) -> Parts:
    """Return the parts of `message`.

    Its topic must be valid (`valid_topic`).  Raises `struct.error` if an integer does not fit 32 bits.
    """
    if isinstance(message, Response):
        flags = _STREAMING if message.streaming else 0
        if message.upstream:
            flags |= _UPSTREAM
        header = (_RESPONSE, message.errnum, message.matchtag)
    elif isinstance(message, FluxRequest):
        flags = _STREAMING if message.streaming else 0
        if message.noresponse:
            flags |= _NORESPONSE
        if message.upstream:
            flags |= _UPSTREAM
        header = (_REQUEST, message.nodeid, message.matchtag)
    elif isinstance(message, Event):
        flags = _PRIVATE if message.private else 0
        header = (_EVENT, message.sequence, 0)
    elif isinstance(message, Control):
        flags = _USER1 if message.user1 else 0
        return [
            _pack(_MAGIC, _VERSION, _CONTROL, flags, message.userid, message.rolemask, message.type, message.status)
        ]
    else:
        return [_pack(_MAGIC, _VERSION, _CONTROL, 0, message.userid, message.rolemask, message.errnum, message.status)]
    if message.user1:
        flags |= _USER1
    kind, first, second = header
    parts: Parts = []
    if message.routes is not None:
        flags |= _ROUTE
        parts += message.routes
        parts.append(b"")
    parts.append(message.topic.encode())
    if message.payload is not None:
        flags |= _PAYLOAD
        parts.append(message.payload)
    parts.append(_pack(_MAGIC, _VERSION, kind, flags | _TOPIC, message.userid, message.rolemask, first, second))
    return parts


# ── decode ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(parts: Parts, dialect: Dialect = RFC3) -> Message | Invalid:
    """Return the message that consists of `parts`, or what is wrong with them."""
    if not parts:
        return Invalid("no header")
    if len(parts[-1]) != HEADER_SIZE:
        return Invalid("the header does not have 20 bytes")
    header = _unpack(parts[-1])
    magic, version, kind, flags, userid, rolemask, first, second = header
    if magic != _MAGIC:
        return Invalid("wrong magic byte in the header")
    if version != _VERSION:
        return Invalid("unknown version")
    if dialect == CMB1 and flags & _USER1:
        return Invalid("unknown flag")
    if kind in (_REQUEST, _RESPONSE, _EVENT):
        return _decode_routed(parts, header, dialect)
    if kind != _CONTROL:
        return Invalid("unknown type")
    if flags & _PARTS:
        return Invalid("control message with routes, topic or payload")
    if len(parts) > 1:
        return Invalid("surplus parts")
    if dialect == CMB1:
        return Keepalive(first, second, userid, rolemask)
    return Control(first, second, userid, rolemask, flags & _USER1 != 0)


def _decode_routed(parts: Parts, header: tuple[int, ...], dialect: Dialect) -> Message | Invalid:
    """Decode a request, a response or an event."""
    _, _, kind, flags, userid, rolemask, first, second = header
    last = len(parts) - 1
    if not flags & _TOPIC:
        return Invalid("no topic")
    routes = None
    at = 0
    if flags & _ROUTE:
        found = _routes(parts, last, dialect)
        if isinstance(found, Invalid):
            return found
        routes = found
        at = len(routes) + 1
    elif dialect == RFC3 and kind != _EVENT:
        return Invalid("no route delimiter")
    expected = at + 1 + (flags & _PAYLOAD != 0)
    if last != expected:
        return Invalid("missing parts" if last < expected else "surplus parts")
    topic = _topic(parts[at], dialect)
    if isinstance(topic, Invalid):
        return topic
    payload = parts[at + 1] if flags & _PAYLOAD else None
    if kind == _RESPONSE:
        upstream, streaming, user1 = flags & _UPSTREAM != 0, flags & _STREAMING != 0, flags & _USER1 != 0
        return Response(topic, payload, second, first, routes, userid, rolemask, upstream, streaming, user1)
    if kind == _EVENT:
        if second != 0:
            return Invalid("event whose unused field is not zero")
        return Event(topic, payload, first, routes, userid, rolemask, flags & _PRIVATE != 0, flags & _USER1 != 0)
    if flags & _NEVER == _NEVER:
        return Invalid("streaming request that wants no response")  # flux-core never sets both
    if dialect == CMB1 and first == NODEID_UPSTREAM:
        return Invalid("reserved nodeid")
    return FluxRequest(
        topic,
        payload,
        second,
        first,
        routes,
        userid,
        rolemask,
        flags & _NORESPONSE != 0,
        flags & _UPSTREAM != 0,
        flags & _STREAMING != 0,
        flags & _USER1 != 0,
    )


def valid_topic(topic: str, dialect: Dialect = RFC3) -> bool:
    """Return whether a message may have this topic: not empty, not too long, and without NUL."""
    try:
        return isinstance(_topic(topic.encode(), dialect), str)
    except UnicodeEncodeError:  # surrogates, which JSON can contain
        return False


def _routes(parts: Parts, last: int, dialect: Dialect) -> Routes | Invalid:
    """Return the routes in front of the delimiter."""
    if last and not parts[0]:
        return ()  # by far the most frequent: a message of a client
    at = 0
    while at < last and parts[at]:
        if at == MAX_ROUTES:
            return Invalid("too many routes")
        if len(parts[at]) > MAX_ROUTE:
            return Invalid("route too long")
        if dialect == RFC3 and b"\0" in parts[at]:
            return Invalid("NUL in a route")
        at += 1
    if at == last:
        return Invalid("missing route delimiter")
    return tuple(parts[:at])


def _topic(part: bytes, dialect: Dialect) -> str | Invalid:
    """Return the topic."""
    if not part:
        return Invalid("empty topic")
    if len(part) > MAX_TOPIC:
        return Invalid("topic too long")
    if dialect == CMB1:
        if part.translate(None, _CMB1_CHARACTERS):
            return Invalid("topic with characters other than letters, digits and periods")
    elif b"\0" in part:
        return Invalid("NUL in the topic")
    try:
        return part.decode()
    except UnicodeDecodeError:
        return Invalid("topic is not UTF-8")

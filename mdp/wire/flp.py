"""Decode and encode the commands of FLP, the Freelance Protocol (RFC 10, C46): clients and servers without a broker.

Both sides use ROUTER sockets, so the first frame of each message is the routing id of the other side: that of a server
is its endpoint.

    client → server    PING         control body+
    server → client    PONG         control body+

The control frame is the client's own: the server returns it unmodified, even if it is empty.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from .commands import Invalid, Message, Reason

PING: Final = b"PING"
PONG: Final = b"PONG"


class Ping(NamedTuple):
    """A client asks whether the server is alive."""

    peer: bytes


class Pong(NamedTuple):
    """A server is alive."""

    peer: bytes


class Exchange(NamedTuple):
    """A request or its reply."""

    peer: bytes
    control: bytes
    body: Sequence[bytes]


def decode_client(message: Message) -> Ping | Exchange | Invalid:
    """Decode what a client sent to a server."""
    if len(message) > 2:
        return Exchange(message[0], message[1], message[2:])
    if len(message) == 2 and message[1] == PING:
        return Ping(message[0])
    return Invalid(Reason.TOO_FEW_FRAMES)


def decode_server(message: Message) -> Pong | Exchange | Invalid:
    """Decode what a server sent to a client."""
    if len(message) > 2:
        return Exchange(message[0], message[1], message[2:])
    if len(message) == 2 and message[1] == PONG:
        return Pong(message[0])
    return Invalid(Reason.TOO_FEW_FRAMES)


def ping(server: bytes) -> Message:
    """Encode a PING."""
    return [server, PING]


def pong(client: bytes) -> Message:
    """Encode a PONG."""
    return [client, PONG]


def exchange(peer: bytes, control: bytes, body: Sequence[bytes]) -> Message:
    """Encode a request, or its reply with the control frame of the request."""
    return [peer, control, *body]

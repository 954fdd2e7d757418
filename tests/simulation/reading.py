"""Messages at the broker's socket, decoded to values."""

from typing import Any, NamedTuple

from zmdp.mdp import wire
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Kind, Message, RequestId, Route, batch

from .rules import Broken, check

Peer = tuple[bytes, ...]
"""How the broker identifies a peer: by its routing id, behind a proxy by the proxy's and its own."""


def peer_of(route: Route) -> Peer:
    """Return the peer whose messages have `route` in front of the header."""
    return route if len(route) == 1 or route[-1] else route[:-1]


class Said(NamedTuple):
    """A command of the broker to a client, or CANCEL or DISCONNECT to a worker."""

    to: Route
    """For answers to X1 clients the peer, otherwise all frames before the header (C22)."""
    kind: Kind
    number: RequestId = None
    """The number of an X1 request, or the address at a worker."""
    service: bytes = b""
    """Empty in X1; the header of a DISCONNECT."""
    body: tuple[bytes, ...] | None = ()
    """The body, or the detail of an ERROR; None stands for any frame, or none."""
    code: int = 0
    text: str | None = ""
    """The text of an ERROR; None stands for any text of the broker."""
    reason: str = ""
    lost: int = 0


def matches(said: Said, expected: Said) -> bool:
    """Return whether the broker sent what was expected."""
    if expected.text is None:
        said = said._replace(text=None)
    if expected.body is None and said.body is not None and len(said.body) <= 1:
        said = said._replace(body=None)
    return said == expected


class Heard(NamedTuple):
    """One message of a peer."""

    header: bytes
    """Empty if it is invalid."""
    route: Route
    commands: list[Any]


def hear(message: Message, limits: Limits) -> Heard:
    """Decode a message from a peer to the broker."""
    found = wire.decode_peer(message, limits.max_message, limits.max_frames)
    if not isinstance(found, wire.Batched):
        return Heard(b"" if isinstance(found, wire.Invalid) else found.header, found.route, [found])
    if found.bare:
        return Heard(found.header, found.route, [wire.Heartbeat(found.route, found.header)])
    unpack = batch.from_client if found.header == wire.CX1 else batch.from_worker
    commands = unpack(message, found.at, found.route, limits.max_message, limits.max_frames)
    return Heard(found.header, found.route, commands)


class Work(NamedTuple):
    """A REQUEST to a worker."""

    to: Route
    work: wire.Request


class Beat(NamedTuple):
    """A HEARTBEAT to a worker."""

    to: Route
    header: bytes


def read(message: Message) -> list[Said | Work | Beat]:
    """Decode a message from the broker, which begins with the peer's routing id."""
    found = wire.decode_broker(message[1:])
    if isinstance(found, wire.Invalid):
        raise Broken(f"the broker sent an invalid message: {message}")
    route = (message[0], *found.route)
    if not isinstance(found, wire.Batched):
        return [_said(found, route)]
    if found.bare:
        return [Beat(route, found.header) if found.header == wire.WX1 else Said(route, Kind.HEARTBEAT)]
    unpack = batch.to_client if found.header == wire.CX1 else batch.to_worker
    commands = unpack(message[1:], found.at)
    check(bool(commands), f"the broker sent an empty batch: {message}")
    return [_said(command, route) for command in commands]


def _said(command: Any, route: Route) -> Said | Work | Beat:
    match command:
        case wire.Request():
            return Work(route, command)
        case wire.Cancel():
            return Said(route, Kind.CANCEL, command.id)
        case wire.Disconnect():
            return Said(route, Kind.DISCONNECT, None, command.header, text="why" if command.text else "")
        case wire.Heartbeat():
            return Beat(route, command.header)
        case wire.Reply():
            to = peer_of(route) if command.header == wire.CX1 else route
            kind = Kind.FINAL if command.final else Kind.PARTIAL
            return Said(to, kind, command.id, command.service, tuple(command.body))
        case wire.Error():
            body, text = tuple(command.detail), command.text.decode(errors="replace")
            reason = command.reason.decode()
            return Said(peer_of(route), Kind.ERROR, command.id, b"", body, command.code, text, reason, command.lost)
    raise Broken(f"the broker sent an invalid command: {command} to {route}")

"""Messages at the broker's socket, decoded to values that do not depend on the form of X1."""

from typing import Any, NamedTuple

from zmdp.mdp import wire
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Kind, Message, RequestId, Route, batch

from .rules import Broken, check

Peer = tuple[bytes, ...]
"""How the broker identifies a peer: by its routing id, behind a proxy by the proxy's and its own."""


def peer_of(route: Route) -> Peer:
    """Return the peer whose messages have `route` in front of the header, without an X1 request's number."""
    return route if len(route) == 1 or route[-1] else route[:-1]


class Said(NamedTuple):
    """A command of the broker to a client, or CANCEL or DISCONNECT to a worker."""

    to: Route
    """For answers to X1 clients the peer, otherwise all frames before the header (C22)."""
    kind: Kind
    batched: bool
    number: RequestId = None
    """The number of an X1 request, or the address at a worker."""
    service: bytes = b""
    """Empty in the batched form."""
    body: tuple[bytes, ...] | None = ()
    """The body, or the detail of an ERROR; None stands for any single frame."""
    code: int = 0
    text: str | None = ""
    """The text of an ERROR; None stands for any text of the broker."""


def matches(said: Said, expected: Said) -> bool:
    """Return whether the broker sent what was expected."""
    if expected.text is None:
        said = said._replace(text=None)
    if expected.body is None and said.body is not None and len(said.body) == 1:
        said = said._replace(body=None)
    return said == expected


def to_client(
    path: Peer, number: RequestId, kind: Kind, *, batched: bool, service: bytes = b"", **details: Any
) -> Said:
    """Return what an X1 client must be sent for its request `number`; records can contain only integers."""
    if batched and isinstance(number, int):
        return Said(path, kind, True, number, b"", **details)
    to, number = _split((*path, *wire.envelope_of(number)))
    return Said(to, kind, False, number, service, **details)


def _split(route: Route) -> tuple[Route, RequestId]:
    """Return an X1 client and the number before the header."""
    return (route[:-2], wire.id_of(route[-2])) if len(route) > 2 else (route[:-1], None)


class Heard(NamedTuple):
    """One message of a peer."""

    header: bytes
    """Empty if it is invalid, and framed."""
    route: Route
    batched: bool
    commands: list[Any]
    bare: bool = False
    """Whether it is a HEARTBEAT in the batched form."""


def hear(message: Message, limits: Limits) -> Heard:
    """Decode a message from a peer to the broker."""
    found = wire.decode_peer(message, limits.max_message, limits.max_frames)
    if isinstance(found, wire.Batched):
        if found.bare:
            return Heard(found.header, found.route, True, [wire.Heartbeat(found.route, found.header)], True)
        unpack = batch.from_client if found.header == wire.CX1 else batch.from_worker
        commands = unpack(message, found.at, found.route, limits.max_message, limits.max_frames)
        return Heard(found.header, found.route, True, commands)
    header = b"" if isinstance(found, wire.Invalid) else found.header
    return Heard(header, found.route, False, [found])


class Work(NamedTuple):
    """A REQUEST to a worker."""

    to: Route
    batched: bool
    work: wire.Request


class Beat(NamedTuple):
    """A HEARTBEAT to a worker."""

    to: Route
    batched: bool


def read(message: Message) -> list[Said | Work | Beat]:
    """Decode a message from the broker, which begins with the peer's routing id."""
    found = wire.decode_broker(message[1:])
    if isinstance(found, wire.Invalid):
        raise Broken(f"the broker sent an invalid message: {message}")
    route = (message[0], *found.route)
    if not isinstance(found, wire.Batched):
        return [_said(found, route, batched=False)]
    if found.bare:
        return [Beat(route, True) if found.header == wire.WX1 else Said(route, Kind.HEARTBEAT, True)]
    unpack = batch.to_client if found.header == wire.CX1 else batch.to_worker
    commands = unpack(message[1:], found.at)
    check(bool(commands), f"the broker sent an empty batch: {message}")
    return [_said(command, route, batched=True) for command in commands]


def _said(command: Any, route: Route, *, batched: bool) -> Said | Work | Beat:
    match command:
        case wire.Request():
            return Work(route, batched, command)
        case wire.Cancel():
            return Said(route, Kind.CANCEL, batched, command.id)
        case wire.Disconnect():
            return Said(route, Kind.DISCONNECT, batched, None, command.header, text="why" if command.text else "")
        case wire.Heartbeat() if command.header == wire.CX1:
            return Said(route, Kind.HEARTBEAT, batched)
        case wire.Heartbeat():
            return Beat(route, batched)
        case wire.Reply():
            kind = Kind.FINAL if command.final else Kind.PARTIAL
            to, number = route, None
            if command.header == wire.CX1:
                to, number = (peer_of(route), command.id) if batched else _split(route)
            return Said(to, kind, batched, number, command.service, tuple(command.body))
        case wire.Error():
            to, number = (peer_of(route), command.id) if batched else _split(route)
            body, text = tuple(command.detail), command.text.decode(errors="replace")
            return Said(to, Kind.ERROR, batched, number, command.service, body, command.code, text)
    raise Broken(f"the broker sent an invalid command: {command} to {route}")

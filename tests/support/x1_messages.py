"""X1 messages to a broker's machine, and what it sends, command by command; without sockets.

A peer is named by its routing id; behind a proxy, by a tuple of the proxy's and its own addresses there.  What a broker
sends is a list of tuples: the peer, the name of the command, and its fields in the order of the record.
"""

import json
from typing import Any

from zmdp.mdp import wire
from zmdp.mdp.broker.core.records import key_of
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.wire import CX1, WX1, batch

from . import turns
from .peers import body_of, ready_of, record, request_of

Peer = bytes | tuple[bytes, ...]
Message = list[bytes]
Told = tuple[Any, ...]


def packed(peer: Peer, header: bytes, *records: bytes) -> Message:
    return [*route(peer), header, wire.BATCH, b"".join(records)]


def route(peer: Peer) -> Message:
    return [peer, b""] if isinstance(peer, bytes) else [*peer, b""]


def together(*messages: Message) -> Message:
    """Return one message with the records of several of one peer, which have no attachments."""
    return [*messages[0][:-1], b"".join(each[-1] for each in messages)]


# ── what clients send ────────────────────────────────────────────────────────────────────────────────────────────────


def request(
    number: int = 1,
    *,
    client: Peer = b"c",
    service: bytes = b"echo",
    body: bytes = b"x",
    ttl: int = 0,
    options: bytes = b"",
    **values: Any,
) -> Message:
    """Return a REQUEST whose options are these bytes, or these values."""
    raw = json.dumps(values).encode() if values else options
    return packed(client, CX1, request_of(number, service, body, ttl=ttl, options=raw))


def cancel(number: int = 1, *, client: Peer = b"c") -> Message:
    return packed(client, CX1, record(5, number))


def client_heartbeat(client: Peer = b"c") -> Message:
    return [*route(client), CX1]


# ── what workers send ────────────────────────────────────────────────────────────────────────────────────────────────


def ready(worker: Peer = b"w", service: bytes = b"echo", credit: int = 1, **options: Any) -> Message:
    return packed(worker, WX1, ready_of(service, credit, json.dumps(options).encode() if options else b""))


def partial(address: int = 1, worker: Peer = b"w", body: bytes = b"x") -> Message:
    return packed(worker, WX1, record(3, address, body_of(body)))


def final(address: int = 1, worker: Peer = b"w", body: bytes = b"x") -> Message:
    return packed(worker, WX1, record(4, address, body_of(body)))


def failure(
    address: int = 1, worker: Peer = b"w", code: int = 500, text: bytes = b"it broke", *detail: bytes
) -> Message:
    """Return an ERROR."""
    told = code.to_bytes(2, "big") + bytes(3) + len(text).to_bytes(2, "big") + text
    return packed(worker, WX1, record(7, address, told + body_of(*detail)))


def release(address: int = 1, worker: Peer = b"w") -> Message:
    return packed(worker, WX1, record(11, address))


def credit(value: int, worker: Peer = b"w") -> Message:
    return packed(worker, WX1, record(10, 0, value.to_bytes(4, "big")))


def leave(worker: Peer = b"w") -> Message:
    """Return a DISCONNECT."""
    return packed(worker, WX1, record(6, 0))


def heartbeat(worker: Peer = b"w") -> Message:
    return [*route(worker), WX1]


# ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────────


def told(messages: list[Message]) -> list[Any]:
    """Return what `messages` of a broker say, command by command; messages in other dialects as they are."""
    found: list[Any] = []
    for each in messages:
        at = wire.header_at(each, 1)
        if each[at] not in {CX1, WX1}:
            found.append(each)
            continue
        peer = key_of(tuple(each[:at]))
        if len(each) == at + 1:
            found.append(beaten(peer))
            continue
        commands = (batch.to_client if each[at] == CX1 else batch.to_worker)(each, at)
        found += [(peer, *_fields(command)) for command in commands]
    return found


def _fields(command: Any) -> Told:
    match command:
        case wire.Request():
            ttl = round((command.ttl or 0) * 1000)
            return "REQUEST", command.id, ttl, command.attempt, command.options.raw, *map(bytes, command.body)
        case wire.Reply():
            return "FINAL" if command.final else "PARTIAL", command.id, *map(bytes, command.body)
        case wire.Error():
            return "ERROR", command.id, command.code, command.text, *command.detail
        case wire.Cancel():
            return "CANCEL", command.id
        case wire.Disconnect():
            return "DISCONNECT", *([command.text] if command.text else [])
    raise AssertionError(command)


def feed(broker: Broker, *messages: Message, now: float = 0) -> list[Any]:
    """Return what the broker sends for `messages`, each in a turn of its own."""
    return [sent for each in messages for sent in told(turns.receive(broker, each, now))]


def turn(broker: Broker, *messages: Message) -> list[Any]:
    """Return what the broker sends for `messages` that arrive in one turn."""
    for each in messages:
        broker.receive(each, 0)
    return told(broker.take_messages())


def part(number: int = 1, body: bytes = b"x", *, client: Peer = b"c") -> Told:
    return client, "PARTIAL", number, body


def answer(number: int = 1, body: bytes = b"x", *, client: Peer = b"c") -> Told:
    return client, "FINAL", number, body


def error(code: int, text: str, number: int = 1, *, client: Peer = b"c", detail: tuple[bytes, ...] = ()) -> Told:
    return client, "ERROR", number, code, text.encode(), *detail


def work(
    address: int = 1,
    worker: Peer = b"w",
    *,
    body: bytes = b"x",
    ttl: int = 0,
    attempt: int = 1,
    options: bytes = b"",
) -> Told:
    return worker, "REQUEST", address, ttl, attempt, options, body


def withdraw(address: int = 1, worker: Peer = b"w") -> Told:
    """Return a CANCEL to a worker."""
    return worker, "CANCEL", address


def beaten(peer: Peer = b"w") -> Told:
    """Return a HEARTBEAT."""
    return peer, "HEARTBEAT"


def disconnected(peer: Peer = b"w", *text: bytes) -> Told:
    return peer, "DISCONNECT", *text

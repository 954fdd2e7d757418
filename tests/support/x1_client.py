"""What an X1 client's session sends and delivers as plain values, and a broker's messages to it, without sockets."""

import random
from typing import Any

from zmdp.clients.calls.reply import Outcome, Reply
from zmdp.clients.x1.broker_connection import BrokerConnection
from zmdp.clients.x1.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.errors import RequestError
from zmdp.mdp.wire import batch, x1

ROUTE = (b"amy", b"")
HEARTBEAT = [b"", b"MDPCX1"]

Command = tuple[Any, ...]


class Highest(random.Random):
    """Jitter at its upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


# ── what the session sends, as the broker reads it ───────────────────────────────────────────────────────────────────


def request(number: int, body: bytes = b"x", *, ttl: int | None = None, **options: Any) -> Command:
    """A REQUEST with a ttl in milliseconds."""
    return "REQUEST", number, b"echo", [body], None if ttl is None else ttl / 1000, options


def cancel(number: int) -> Command:
    return "CANCEL", number


ASKING = ("HEARTBEAT",)


def sent(connection: ClientSession | BrokerConnection) -> list[Command]:
    """Take the commands that the session sends, or those for a connection that it has left."""
    commands: list[Command] = []
    for message in connection.take_messages():
        found = wire.decode_peer([b"amy", *message], 1 << 30, 1024)
        assert isinstance(found, wire.Batched)
        commands += [ASKING] if found.bare else map(read, unpack(message))
    return commands


def unpack(message: list[bytes]) -> list[Any]:
    commands: list[Any] = batch.from_client([b"amy", *message], 2, ROUTE, 1 << 30, 1 << 30)
    return commands


def read(command: wire.Request | wire.Cancel | wire.Limits) -> Command:
    if isinstance(command, wire.Cancel):
        return "CANCEL", command.id
    if isinstance(command, wire.Limits):
        return ("LIMITS",)
    options = command.options
    return "REQUEST", command.id, command.service, command.body, command.ttl, options.values()


# ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────────


def partial(number: int, *body: bytes) -> list[bytes]:
    packed = _batch()
    packed.reply(x1.CLIENT_PARTIAL, number, body)
    return _message(packed)


def final(number: int, *body: bytes) -> list[bytes]:
    packed = _batch()
    packed.reply(x1.CLIENT_FINAL, number, body)
    return _message(packed)


def error(number: int, code: int, text: bytes, *detail: bytes) -> list[bytes]:
    packed = _batch()
    packed.error(x1.CLIENT_ERROR, number, code, text, detail)
    return _message(packed)


DISCONNECT = wire.disconnect((b"",), wire.CX1)


def together(*messages: list[bytes]) -> list[bytes]:
    """Return one message with the records of several, which have no attachments."""
    return [*messages[0][:3], b"".join(message[3] for message in messages)]


def _batch() -> Any:
    return batch.Batch((b"",), wire.CX1)


def _message(packed: Any) -> list[bytes]:
    (message,) = packed.messages()
    return list(message)


def plain(outcome: Outcome) -> tuple[Any, ...]:
    """An outcome as a plain value."""
    if isinstance(outcome, Reply):
        return list(outcome), outcome.service, outcome.final
    if isinstance(outcome, RequestError):
        return type(outcome), str(outcome), outcome.service, outcome.code
    return type(outcome), str(outcome)


def events(session: ClientSession) -> list[tuple[Any, ...]]:
    """Take the outcomes that the session delivers, as (number, outcome)."""
    return [(call.number, *plain(outcome)) for call, outcome in session.take_events()]

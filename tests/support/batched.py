"""Reads requests of X1 clients in the batched form, and writes replies to them; with or without a ROUTER."""

from dataclasses import dataclass

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

from .router import Router


@dataclass(frozen=True)
class Asked:
    """A REQUEST and its sender."""

    sender: bytes
    number: int
    service: bytes
    body: list[bytes]


def requests(message: list[bytes]) -> list[Asked]:
    """Return the REQUESTs in a message that begins with the sender's routing id; other commands are ignored."""
    commands = batch.from_client(message, 2, (message[0], b""), 1 << 30, 1 << 30) if len(message) > 3 else []
    return [
        Asked(message[0], command.id, command.service, command.body)
        for command in commands
        if isinstance(command, wire.Request)
    ]


def replies(*told: tuple[Asked, list[bytes]], final: bool = True) -> list[bytes]:
    """Return a message with FINALs, or PARTIALs, for requests of one sender."""
    packed = batch.Batch((told[0][0].sender, b""), wire.CX1)
    for asked, body in told:
        packed.reply(3 if final else 2, asked.number, body)
    (message,) = packed.messages()
    return list(message)


class BatchedRouter(Router):
    """A hand-written broker that speaks the batched form."""

    def requests(self, count: int) -> list[Asked]:
        """Receive `count` requests, in any number of messages."""
        found: list[Asked] = []
        while len(found) < count:
            found += requests(self.recv())
        assert len(found) == count
        return found

    def reply(self, *told: tuple[Asked, list[bytes]], final: bool = True) -> None:
        self.send(*replies(*told, final=final))

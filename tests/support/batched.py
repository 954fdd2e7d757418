"""What an X1 client sends in the batched form, and replies to it, by hand: on a ROUTER or beside a socket."""

from dataclasses import dataclass

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

from .router import Router


@dataclass(frozen=True)
class Asked:
    """A REQUEST, and who sent it."""

    sender: bytes
    number: int
    service: bytes
    body: list[bytes]


def requests(message: list[bytes]) -> list[Asked]:
    """The REQUESTs in a message, the sender's identity first; other commands are left out."""
    commands = batch.from_client(message, 2, (message[0], b""), 1 << 30, 1 << 30) if len(message) > 3 else []
    return [
        Asked(message[0], command.id, command.service, command.body)
        for command in commands
        if isinstance(command, wire.Request)
    ]


def replies(*told: tuple[Asked, list[bytes]], final: bool = True) -> list[bytes]:
    """FINALs, or PARTIALs, for requests of one sender, as one message."""
    packed = batch.Batch((told[0][0].sender, b""), wire.CX1)
    for asked, body in told:
        packed.reply(3 if final else 2, asked.number, body)
    (message,) = packed.messages()
    return list(message)


class BatchedRouter(Router):
    """A broker made by hand that speaks the batched form."""

    def requests(self, count: int) -> list[Asked]:
        """The next `count` requests, however they are packed."""
        found: list[Asked] = []
        while len(found) < count:
            found += requests(self.recv())
        assert len(found) == count
        return found

    def reply(self, *told: tuple[Asked, list[bytes]], final: bool = True) -> None:
        self.send(*replies(*told, final=final))

"""A broker of X1 written by hand: its messages to clients and to a worker, most of them over a `Router`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zmdp.mdp import wire
from zmdp.mdp.wire import batch, x1

from .processes import TIMEOUT_SECONDS
from .router import Router

# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Return a message of FINALs, or of PARTIALs, for requests of one sender."""
    packed = batch.Batch((told[0][0].sender, b""), wire.CX1)
    for asked, body in told:
        packed.reply(x1.CLIENT_FINAL if final else x1.CLIENT_PARTIAL, asked.number, body)
    (message,) = packed.messages()
    return list(message)


class X1Router(Router):
    """A broker to which X1 clients connect."""

    def requests(self, count: int) -> list[Asked]:
        """Receive `count` requests, in any number of messages."""
        found: list[Asked] = []
        while len(found) < count:
            found += requests(self.recv())
        assert len(found) == count
        return found

    def reply(self, *told: tuple[Asked, list[bytes]], final: bool = True) -> None:
        self.send(*replies(*told, final=final))


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Peer:
    """The one X1 worker that is connected to `router`.  Its HEARTBEATs are ignored."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._identity = b""
        self._commands: list[Any] = []
        self.messages = 0
        """Number of messages from the worker that contained commands."""

    def ready(self) -> wire.Ready:
        """Wait for READY."""
        command = self.next()
        assert isinstance(command, wire.Ready), command
        return command

    def send(self, *, work: Sequence[int] = (), cancel: Sequence[int] = (), body: bytes = b"x") -> None:
        """Send REQUESTs and CANCELs with these addresses, in one message."""
        packed = batch.Batch((self._identity, b""), wire.WX1)
        for address in work:
            packed.request_to_worker(address, 0, 1, b"", [body])
        for address in cancel:
            packed.signal(x1.WORKER_CANCEL, address)
        for message in packed.messages():
            self._router.send(*message)

    def disconnect(self) -> None:
        self._router.send(*wire.disconnect((self._identity, b""), wire.WX1))

    def next(self, timeout: float = TIMEOUT_SECONDS) -> Any:
        """Return the next command, which may be `wire.Disconnect`."""
        while not self._commands:
            message = self._router.recv(timeout)
            self._identity, empty, *frames = message
            assert empty == b""
            if frames != [b"MDPWX1"]:
                self.messages += 1
                self._commands = batch.from_worker(message, 2, (self._identity, b""), 1 << 30, 10_000)
        return self._commands.pop(0)

    def ends(self, count: int) -> dict[int, Any]:
        """Wait until `count` requests have ended; return by address the frame of the FINAL, or (code, text)."""
        found: dict[int, Any] = {}
        while len(found) < count:
            command = self.next()
            if isinstance(command, wire.Reply) and command.final:
                assert isinstance(command.id, int)
                found[command.id] = command.body[0]
            elif isinstance(command, wire.Error):
                found[command.id] = (command.code, command.text)
        return found

    def let_go(self, stop: Callable[[], None]) -> list[Any]:
        """Have the worker leave; return the commands that it sent before DISCONNECT."""
        stop()
        said = []
        while not isinstance(command := self.next(), wire.Disconnect):
            said.append(command)
        self.disconnect()
        return said

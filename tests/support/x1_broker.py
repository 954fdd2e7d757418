"""Hand-written messages to an X1 worker in the batched form, over a `Router`."""

from collections.abc import Callable, Sequence
from typing import Any

from support.processes import TIMEOUT_SECONDS
from support.router import Router

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

DISCONNECT = [b"MDPWX1", b"\x06"]


class Peer:
    """The one worker that is connected to `router`.  Its HEARTBEATs are ignored."""

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

    def send(self, *, work: Sequence[int] = (), cancel: Sequence[int] = (), body: bytes = b"x", ttl: int = 0) -> None:
        """Send REQUESTs and CANCELs with these addresses, in one message."""
        packed = batch.Batch((self._identity, b""), wire.WX1)
        for address in work:
            packed.request_to_worker(address, ttl, 1, b"", [body])
        for address in cancel:
            packed.signal(8, address)
        for message in packed.messages():
            self._router.send(*message)

    def disconnect(self) -> None:
        self._router.send(self._identity, b"", *DISCONNECT)

    def next(self, timeout: float = TIMEOUT_SECONDS) -> Any:
        """Return the next command, which may be `wire.Disconnect`."""
        while not self._commands:
            self._identity, empty, *frames = self._router.recv(timeout)
            assert empty == b""
            if frames == DISCONNECT:
                self.messages += 1
                return wire.Disconnect((), wire.WX1)
            if frames != [b"MDPWX1"]:
                self.messages += 1
                message = [self._identity, empty, *frames]
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
                assert isinstance(command.id, int)
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

"""The messages that a worker sends, in the dialect that it speaks."""

from collections.abc import Sequence
from typing import Any, Final

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.errors import SettingError
from ...mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ...mdp.wire import Address, Message, Route, batch, x1


class CollectedPartials:
    """The frames of one request's PARTIALs; none are kept once they exceed the limits of a reply."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._count = 0
        self._bytes = 0

    def add(self, body: Sequence[bytes]) -> None:
        """Add the frames of one more PARTIAL."""
        self._count += len(body)
        self._bytes += wire.size_of(body)
        if self._bytes > MAX_BODY or self._count > MAX_BODY_FRAMES:
            self._frames = []  # the reply will be an error
        else:
            self._frames += body

    def reply(self, last: Sequence[bytes]) -> list[bytes]:
        """Return the body of the reply, which ends with `last`; that of a failure if it exceeds the limits."""
        self.add(last)
        if self._bytes > MAX_BODY or self._count > MAX_BODY_FRAMES:
            text = f"the parts of the reply together have more than {MAX_BODY} bytes or {MAX_BODY_FRAMES} frames"
            return wire.error_body(Code.TOO_LARGE, text)
        return self._frames


HEADERS: Final[dict[str, tuple[Route, bytes]]] = {
    "X1": ((wire.EMPTY,), wire.WX1),
    "0.2": ((), wire.W02),
    "0.1": ((wire.EMPTY,), wire.W01),
}
"""Envelope and header of a worker's messages, by protocol version (C7, C24, C36)."""


class Outgoing:
    """The commands of an X1 worker that are to be sent, packed into as few messages as possible."""

    def __init__(self, route: Route, header: bytes) -> None:
        self.header = header
        self._route = route
        self._batch: Any = batch.Batch(route, header)
        self._messages: list[Message] = []  # to be sent before the batch

    def ready(self, credit: int, service: bytes, options: bytes) -> None:
        """Add READY (C7)."""
        self._batch.ready(min(credit, x1.MAX_CREDIT), service, options)

    def credit(self, credit: int) -> None:
        """Announce that the credit has changed."""
        self._batch.credit(min(credit, x1.MAX_CREDIT))

    def partial(self, address: Address, body: Sequence[bytes]) -> bool:
        """Add a PARTIAL.  Return whether it is to be sent now."""
        self._batch.reply(x1.WORKER_PARTIAL, address, body)
        return True

    def final(self, address: Address, body: Sequence[bytes]) -> None:
        """Add the FINAL of a request."""
        self._batch.reply(x1.WORKER_FINAL, address, body)

    def error(self, address: Address, code: int, text: str, detail: Sequence[bytes]) -> None:
        """Add the ERROR of a request."""
        self._batch.error(x1.WORKER_ERROR, address, code, text.encode(errors="replace"), detail)

    def release(self, address: Address) -> None:
        """Return a request to the broker."""
        self._batch.signal(x1.WORKER_RELEASE, address)

    def heartbeat(self) -> None:
        """Add a HEARTBEAT."""
        self._add(wire.heartbeat(self._route, self.header))

    def disconnect(self, text: bytes = b"") -> None:
        """Add DISCONNECT, with a text for the broker."""
        self._add(wire.disconnect(self._route, self.header, text))

    def _add(self, message: Message) -> None:
        if len(self._batch):
            self._messages += self._batch.messages()
        self._messages.append(message)

    def __bool__(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self._messages or self._batch)

    def take(self) -> list[Message]:
        """Return the messages to send now."""
        if len(self._batch):
            self._messages += self._batch.messages()
        messages, self._messages = self._messages, []
        return messages

    def discard(self) -> None:
        """Forget everything that has not been taken."""
        self._batch.messages()
        self._messages = []


class LegacyOutgoing(Outgoing):
    """The messages of a worker that speaks 0.2 or 0.1, each a command.  Its credit is always 1."""

    def __init__(self, route: Route, header: bytes) -> None:
        super().__init__(route, header)
        self._partials: dict[Address, CollectedPartials] | None = {} if header == wire.W01 else None

    def ready(self, credit: int, service: bytes, options: bytes) -> None:  # noqa: D102 - without either
        self._add(wire.ready(self._route, self.header, service))

    def credit(self, credit: int) -> None:
        """Do nothing."""

    def partial(self, address: Address, body: Sequence[bytes]) -> bool:
        """Add a PARTIAL, or keep it for the reply: 0.1 has no PARTIAL (C24).  Return whether it is to be sent now."""
        if self._partials is not None:
            if address not in self._partials:
                self._partials[address] = CollectedPartials()
            self._partials[address].add(body)
            return False
        self._reply(wire.PARTIAL, address, body)
        return True

    def final(self, address: Address, body: Sequence[bytes]) -> None:
        """Add the FINAL of a request; in 0.1, the REPLY, which begins with its PARTIALs."""
        collected = self._partials.pop(address, None) if self._partials else None
        if collected is not None:
            body = collected.reply(body)
        self._reply(wire.FINAL, address, body)

    def error(self, address: Address, code: int, text: str, detail: Sequence[bytes]) -> None:
        """Add a FINAL that clients of ours recognize as a failure.  They could not if it followed PARTIALs in 0.1."""
        if self._partials:
            self._partials.pop(address, None)
        self._reply(wire.FINAL, address, wire.error_body(code, text))

    def discard(self) -> None:
        """Forget everything that has not been taken, and the PARTIALs that were kept."""
        super().discard()
        if self._partials:
            self._partials.clear()

    def _reply(self, kind: wire.Kind, address: Address, body: Sequence[bytes]) -> None:
        self._add(wire.reply_to_broker(self._route, self.header, kind, address, body))


def outgoing(protocol: str) -> Outgoing:
    """Return what is to be sent over a connection that speaks `protocol`.  Raises `SettingError`."""
    if protocol not in HEADERS:
        raise SettingError(f"protocol is {protocol!r}: it must be one of {', '.join(HEADERS)}")
    route, header = HEADERS[protocol]
    return Outgoing(route, header) if protocol == "X1" else LegacyOutgoing(route, header)

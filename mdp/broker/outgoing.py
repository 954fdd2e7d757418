"""What the broker sends because of one turn: framed messages, and for peers that speak the batched form, batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .. import wire
from ..wire import Message, batch
from .registry import Client, Request, Worker

if TYPE_CHECKING:
    from .link import Link

# The command bytes of batched records, to a client …
_PARTIAL: Final = 2
_FINAL: Final = 3
_ERROR: Final = 4
# … and to a broker that has passed a request on, as from a worker.
_PARTIAL_FROM_WORKER: Final = 3
_FINAL_FROM_WORKER: Final = 4
_ERROR_FROM_WORKER: Final = 7
_RELEASE: Final = 11


class Outgoing:
    """The messages of the current turn, in the order in which they are sent.

    Everything for one peer that speaks the batched form is put into one message, the peer's open batch.  A framed
    message to it closes the batch, so that the order is kept.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        """Framed messages and batches."""
        self._open: list[Client | Worker | Link] = []
        """The peers of the open batches."""

    def add(self, message: Message) -> None:
        """Send a framed message to a peer that is not registered, or that has no open batch."""
        self._messages.append(message)

    def say(self, peer: Client | Worker, message: Message) -> None:
        """Send a framed message, after what the peer's open batch contains so far."""
        peer.batch = None
        self._messages.append(message)

    def batch_for(self, peer: Client | Worker | Link, route: wire.Route, header: bytes) -> Any:
        """Return the open batch (`batch.Batch`) of a peer that speaks the batched form."""
        if peer.batch is None:
            peer.batch = batch.Batch(route, header)
            self._messages.append(peer.batch)
            self._open.append(peer)
        return peer.batch

    def reply(self, request: Request, final: bool, body: list[bytes]) -> None:
        """Send a PARTIAL or FINAL to the client of `request`."""
        client, number = request.client, request.number
        route = client.batch_route
        if route is not None and isinstance(number, int) and len(body) <= batch.MAX_BODY_FRAMES:
            self.batch_for(client, route, wire.CX1).reply(_FINAL if final else _PARTIAL, number, body)
        elif client.link is not None and isinstance(number, int):
            command = _FINAL_FROM_WORKER if final else _PARTIAL_FROM_WORKER
            self.batch_for(client, client.path, wire.WL1).reply(command, number, body)
        else:
            self.say(client, wire.reply_to_client(request.route, request.header, final, request.name, body))

    def error(
        self, client: Client, number: wire.RequestId, service: bytes, code: int, text: bytes, detail: list[bytes]
    ) -> None:
        """Send an ERROR to an X1 client."""
        route = client.batch_route
        if route is not None and isinstance(number, int):
            self.batch_for(client, route, wire.CX1).error(_ERROR, number, code, text, detail)
        elif client.link is not None and isinstance(number, int):
            self.batch_for(client, client.path, wire.WL1).error(_ERROR_FROM_WORKER, number, code, text, detail)
        else:
            envelope = (*client.path, *wire.envelope_of(number))
            self.say(client, wire.error_to_client(envelope, service, code, text, detail))

    def release(self, client: Client, number: int) -> None:
        """Return a request to the broker that passed it on."""
        self.batch_for(client, client.path, wire.WL1).signal(_RELEASE, number)

    def take(self) -> list[Message]:
        """Return the messages to send, and begin the next turn."""
        messages, self._messages = self._messages, []
        if not self._open:
            return messages
        for peer in self._open:
            peer.batch = None
        self._open = []
        sent: list[Message] = []
        for each in messages:
            if isinstance(each, list):
                sent.append(each)
            else:
                sent += each.messages()
        return sent

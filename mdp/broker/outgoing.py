"""What the broker sends because of one turn: framed messages, and for peers that speak the batched form, batches."""

from typing import Any, Final

from .. import wire
from ..wire import Message, batch
from .registry import Client, Request, Worker

# The command bytes of batched records.
_PARTIAL: Final = 2
_FINAL: Final = 3
_ERROR: Final = 4


class Outgoing:
    """The messages of the current turn, in the order in which they are sent.

    Everything for one peer that speaks the batched form is put into one message, the peer's open batch.  A framed
    message to it closes the batch, so that the order is kept.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        """Framed messages and batches."""
        self._open: list[Client | Worker] = []
        """The peers of the open batches."""

    def add(self, message: Message) -> None:
        """Send a framed message to a peer that is not registered, or that has no open batch."""
        self._messages.append(message)

    def say(self, peer: Client | Worker, message: Message) -> None:
        """Send a framed message, after what the peer's open batch contains so far."""
        peer.batch = None
        self._messages.append(message)

    def batch_for(self, peer: Client | Worker, route: wire.Route, header: bytes) -> Any:
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
        else:
            self.say(client, wire.reply_to_client(request.route, request.header, final, request.service.name, body))

    def error(
        self, client: Client, number: wire.RequestId, service: bytes, code: int, text: bytes, detail: list[bytes]
    ) -> None:
        """Send an ERROR to an X1 client."""
        route = client.batch_route
        if route is not None and isinstance(number, int):
            self.batch_for(client, route, wire.CX1).error(_ERROR, number, code, text, detail)
        else:
            envelope = (*client.path, *wire.envelope_of(number))
            self.say(client, wire.error_to_client(envelope, service, code, text, detail))

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

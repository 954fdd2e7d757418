"""The messages that one turn of the broker sends, one batch for each X1 peer, and the tasks of the shell."""

from typing import Any, NamedTuple

from ... import wire
from ...wire import Message, Route, batch, x1
from .records import Client, Request, Worker

Event = tuple[Any, ...]
"""Something that the shell is to do: a NamedTuple, such as `WorkerForgotten`."""


class WorkerForgotten(NamedTuple):
    """Discard the messages that wait for a worker of that route, unless they were sent in `turn` or later.

    Nothing is sent to a worker after its DISCONNECT (C16).
    """

    route: Route
    turn: int


class Recipient:
    """A peer beside clients and workers that gets batches."""

    def __init__(self) -> None:
        self.batch: Any = None
        """The open batch (`batch.Batch`), which is sent at the end of the broker's turn."""


class Outgoing:
    """The messages of the current turn, in the order in which they are sent.

    Everything for one peer that speaks X1 is put into one message, the peer's open batch.  Another message to it closes
    the batch, so that the order is kept.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        """Messages and batches."""
        self._open: list[Client | Worker | Recipient] = []
        """The peers of the open batches."""
        self._events: list[Event] = []

    def ask(self, event: Event) -> None:
        """Ask the shell to do something."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """Return the tasks of the shell, to do after it has sent the messages."""
        events, self._events = self._events, []
        return events

    def add(self, message: Message) -> None:
        """Send a message to a peer that is not registered, or that has no open batch."""
        self._messages.append(message)

    def say(self, peer: Client | Worker, message: Message) -> None:
        """Send a message, after the commands that the peer's open batch contains so far."""
        peer.batch = None
        self._messages.append(message)

    def close_batch(self, peer: Client | Worker | Recipient) -> None:
        """Let nothing more be added to the peer's open batch."""
        peer.batch = None

    def batch_for(self, peer: Client | Worker | Recipient, route: wire.Route, header: bytes) -> Any:
        """Return the open batch (`batch.Batch`) of a peer that speaks X1."""
        if peer.batch is None:
            peer.batch = batch.Batch(route, header)
            self._messages.append(peer.batch)
            self._open.append(peer)
        return peer.batch

    def reply(self, request: Request, final: bool, body: list[bytes]) -> None:
        """Send a PARTIAL or FINAL to the client of `request`."""
        client, number = request.client, request.number
        if number is None:
            self.say(client, wire.reply_to_client(request.route, request.header, final, request.name, body))
        elif not client.is_broker:
            command = x1.CLIENT_FINAL if final else x1.CLIENT_PARTIAL
            self.batch_for(client, client.route, wire.CX1).reply(command, number, body)
        else:
            command = x1.WORKER_FINAL if final else x1.WORKER_PARTIAL
            self.batch_for(client, client.route, wire.WL1).reply(command, number, body)

    def error(
        self, client: Client, number: int, code: int, text: bytes, detail: list[bytes], reason: bytes, lost: int
    ) -> None:
        """Send an ERROR to an X1 client, or to another broker."""
        if not client.is_broker:
            records = self.batch_for(client, client.route, wire.CX1)
            records.error(x1.CLIENT_ERROR, number, code, text, detail, reason, lost)
        else:
            records = self.batch_for(client, client.route, wire.WL1)
            records.error(x1.WORKER_ERROR, number, code, text, detail, reason, lost)

    def release(self, client: Client, number: int) -> None:
        """Return a request to the broker that passed it on."""
        self.batch_for(client, client.route, wire.WL1).signal(x1.WORKER_RELEASE, number)

    def discard(self, identity: bytes) -> None:
        """Send none of the turn's messages so far to the peers with that routing id."""
        self._messages = [message for message in self.take() if message[0] != identity]

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

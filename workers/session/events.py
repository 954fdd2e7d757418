"""What a worker's session tells its shell."""

from typing import NamedTuple

from .request import Request


class Cancelled(NamedTuple):
    """A handler should stop: its request was cancelled, or the connection of the request was lost."""

    request: Request


class HandlerStuck(NamedTuple):
    """A handler has exceeded `handler_timeout`; its request goes to another worker."""

    request: Request


class ConnectionEnded(NamedTuple):
    """The connection has ended: send the remaining messages, and close the socket."""

    reason: str
    dismissed: bool = False
    """The broker ended it with DISCONNECT, as it does when it shuts down."""
    refused: bool = False
    """The broker ended it with DISCONNECT because of this worker, and said why."""
    keep_messages: bool = False
    """Whether the messages that are still unsent are of use to the broker."""


Event = Cancelled | HandlerStuck | ConnectionEnded

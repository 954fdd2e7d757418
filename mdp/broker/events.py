"""What a broker's machine asks its shell to do, beside sending messages."""

from typing import NamedTuple

from ..wire import Route


class OpenLink(NamedTuple):
    """Open the connection of a link, and report it with `Broker.link_opened` or `Broker.link_failed`."""

    identity: bytes


class CloseLink(NamedTuple):
    """Close the connection of a link, if there is one."""

    identity: bytes


class WorkerForgotten(NamedTuple):
    """Discard what waits for a worker of that route, unless it was sent in `turn` or later.

    Nothing is sent to a worker after its DISCONNECT (C16).
    """

    route: Route
    turn: int


Event = OpenLink | CloseLink | WorkerForgotten

"""A worker's session as its shell sees it: its settings, the states of its connection, and its events.

A worker has one connection at a time.  It serves over it, until the connection is lost or the worker ends it.  Ending
it cleanly takes a while: the worker drains, which is to say that it takes no more requests, and finishes those that it
has begun.  Then it connects again, or it is leaving for good.

    WAITING    There is no connection; the next one is due at `deadline`.
    SERVING    READY was sent.  The broker answers it, at the latest with a HEARTBEAT, and sends requests.
    DRAINING   The worker will connect again, because a handler does not end, or the first broker is back.
    LEAVING    The worker will not connect again: it was told to leave.
    CLOSED     There is no connection, and there will be none.

Four things happen: a socket was opened (`connect`), the worker has a reason to drain (`drain`), it is told to leave
(`leave`), and the connection ends, whoever ended it (`end`).  An empty field is impossible.

                connect    drain      leave      end
    WAITING     SERVING               CLOSED     WAITING
    SERVING                DRAINING   LEAVING    WAITING
    DRAINING               DRAINING   LEAVING    WAITING
    LEAVING                LEAVING    LEAVING    CLOSED
    CLOSED                            CLOSED     CLOSED

Whether the broker has been heard is not a state: a worker may have to drain before that.  `Heartbeats` knows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from ...mdp.errors import SettingError
from ...mdp.limits import DEFAULT_ENDPOINT, check_number
from .request import Request

Trigger = Literal["connect", "drain", "leave", "end"]


class SessionState(Enum):
    """A state, and its properties."""

    WAITING = (False, False, False)
    SERVING = (True, False, False)
    DRAINING = (True, True, False)
    LEAVING = (True, True, True)
    CLOSED = (False, False, True)

    def __init__(self, connected: bool, draining: bool, leaving: bool) -> None:
        self.connected = connected
        """Whether there is a connection."""
        self.draining = draining
        """Whether the connection is to end with the requests that have begun."""
        self.leaving = leaving
        """Whether there will be no other connection."""


WAITING: Final = SessionState.WAITING
SERVING: Final = SessionState.SERVING
DRAINING: Final = SessionState.DRAINING
LEAVING: Final = SessionState.LEAVING
CLOSED: Final = SessionState.CLOSED

TRANSITIONS: Final[dict[SessionState, dict[Trigger, SessionState]]] = {
    WAITING: {"connect": SERVING, "leave": CLOSED, "end": WAITING},
    SERVING: {"drain": DRAINING, "leave": LEAVING, "end": WAITING},
    DRAINING: {"drain": DRAINING, "leave": LEAVING, "end": WAITING},
    LEAVING: {"drain": LEAVING, "leave": LEAVING, "end": CLOSED},
    CLOSED: {"leave": CLOSED, "end": CLOSED},
}
"""The state that follows."""


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


@dataclass(frozen=True)
class SessionSettings:
    """How a worker's session talks to its broker.  Raises `SettingError` if a setting is invalid."""

    protocol: str = "X1"
    heartbeat: float = 1.0
    """Seconds; like `liveness`, it should be the broker's (see `Heartbeats`)."""
    liveness: int = 5
    """Silent heartbeat intervals after which the broker is considered dead."""
    handler_timeout: float | None = None
    """Seconds after which a handler that has neither ended nor sent a PARTIAL is given up."""
    endpoints: Sequence[str] = (DEFAULT_ENDPOINT,)
    """The brokers' endpoints.  Each may be tried without delay before there is a backoff."""

    def __post_init__(self) -> None:
        check_number("heartbeat", self.heartbeat)
        check_number("liveness", self.liveness, whole=True)
        timeout = self.handler_timeout
        if timeout is None:
            return
        check_number("handler_timeout", timeout)
        if not timeout > 0:
            raise SettingError(f"handler_timeout is {timeout!r}: it must be a number of seconds above 0, or None")

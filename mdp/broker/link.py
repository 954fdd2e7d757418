"""One link to another broker: who is at the other end, how far the link is, and what goes over it (C44)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .registry import Attempt, Client, Remote
from .roles import Role


class Kind(StrEnum):
    """What the broker at the other end is to this one."""

    PEER = "peer"
    PARENT = "parent"
    CHILD = "child"


class State(StrEnum):
    """How far a link is."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"


class Link:
    """One link, from this broker's point of view."""

    __slots__ = (
        "announced", "attempts", "backoff", "batch", "client", "dirty", "heartbeat_at", "identity", "instance", "key",
        "kind", "last_seen", "name", "opens", "penalty", "received", "remotes", "retry_at", "role", "sent", "standby",
        "state", "trouble", "untried", "up_since", "where",
    )  # fmt: skip

    def __init__(self, identity: bytes, kind: Kind, role: Role, *, opens: bool, where: str = "") -> None:
        self.identity = identity
        """The first frame of its messages."""
        self.kind = kind
        self.role = role
        """The role of the other broker's key."""
        self.opens = opens
        """Whether this broker opens the connection."""
        self.where = where
        """The endpoint that it opens, for people."""
        self.state = State.DOWN
        self.name = ""
        """The other broker's name; empty until it is known."""
        self.instance = ""
        """Distinguishes brokers of the same name, and a broker from itself before a restart."""
        self.key: tuple[str, int] = ("", 0)
        """Decides which of several links between two brokers is used.  Both ends of a link have the same key."""
        self.standby = False
        """There is another link to the same broker, which is used instead."""
        self.client = Client(identity, role, self)
        """The other broker as a client of this one."""
        self.batch: Any = None
        """The open batch of requests to the other broker, which is sent at the end of the broker's turn."""
        self.remotes: dict[bytes, Remote] = {}
        """What can be reached there, by service."""
        self.attempts: dict[int, Attempt] = {}
        """The requests that are there, by address."""
        self.announced: dict[bytes, tuple[int, int, int]] = {}
        """The credit, free credit and hops announced for each service."""
        self.dirty: dict[bytes, None] = {}
        """Services whose announcement may have to change."""
        self.last_seen = 0.0
        self.heartbeat_at = 0.0
        self.up_since = 0.0
        self.retry_at = 0.0
        """When to open the connection again, if it is down."""
        self.backoff = 0.0
        self.penalty = 0.0
        """The pause after the link was ended last, in seconds, until it has lasted for `LASTING`."""
        self.trouble = ""
        """Why it is not up."""
        self.untried = False
        """It has not failed yet, nor has the other broker announced all that it offers."""
        self.sent = 0
        """Number of requests passed on over it so far."""
        self.received = 0
        """Number of requests that came over it so far."""

    def joins(self, other: Link) -> bool:
        """Return whether what comes over this link may go over `other`, and the reverse.

        To the parent and to peers goes only what comes from children, so that nothing goes in circles (C44).
        """
        return other is not self and (self.kind is Kind.CHILD or other.kind is Kind.CHILD)

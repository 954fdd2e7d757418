"""The records of links to other brokers: the link, and the other broker as a client and as workers of this one."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

from ...backoff import jittered
from ...wire import CX1, RequestId
from ..core.outgoing import Recipient
from ..core.records import Attempt, Client, Remote, Request, Service
from ..core.roles import Role

MAX_UNANSWERED: Final = 64
"""Requests that may be at another broker that has not answered any yet: it may claim more than it can do.  Handlers may
wait for each other, so they are as many as an asyncio worker takes by default."""
MAX_REFUSED: Final = 30.0
"""Longest pause, in seconds, before another attempt to link to a broker that refuses."""
LASTING: Final = 60.0
"""Seconds that a link must be up before earlier ends of it are forgotten (`Redial.ended`)."""
# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (0.1, 5.0)
"""The shortest and the longest pause, in seconds, between attempts to connect to a broker that does not answer."""


class LinkKind(StrEnum):
    """The relation of the broker at the other end to this one."""

    PEER = "peer"
    PARENT = "parent"
    CHILD = "child"


class LinkState(StrEnum):
    """How far a link is."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"


class Redial:
    """When the connection of a link that has ended is opened again."""

    __slots__ = ("_penalty", "at", "backoff")

    def __init__(self) -> None:
        self.at = 0.0
        self.backoff = BACKOFF[0]
        self._penalty = 0.0
        """The pause after the link was ended last, in seconds, until it has lasted for `LASTING`."""

    def succeeded(self) -> None:
        """Record that the link is up."""
        self.backoff = BACKOFF[0]

    def refused(self) -> None:
        """Record that one of the two brokers does not want the link."""
        self.backoff = min(max(4 * self.backoff, 1.0), MAX_REFUSED)

    def ended(self, seconds: float) -> None:
        """Record that one of the two brokers has ended the link, which was up for so many seconds.

        A link that closes a circle would otherwise come and go, and with it the requests that it takes.
        """
        if seconds >= LASTING:
            self._penalty = 0.0
        self._penalty = min(max(4 * self._penalty, 1.0), MAX_REFUSED)
        self.backoff = max(self.backoff, self._penalty)

    def plan(self, now: float, rng: random.Random, *, was_up: bool) -> None:
        """Decide when to open the connection again, which has ended or failed."""
        # A random part, so that brokers that have lost the same one do not all come back at the same moment.
        self.at = now + jittered(self.backoff, rng)
        if not was_up:
            self.backoff = max(self.backoff, min(2 * self.backoff, BACKOFF[1]))


class Link(Recipient):
    """One link, from this broker's point of view."""

    __slots__ = (
        "announced", "attempts", "client", "dirty", "heartbeat_at", "identity", "instance", "key", "kind", "last_seen",
        "name", "opens", "received", "redial", "remotes", "role", "sent", "standby", "state", "trouble", "trusted",
        "untried", "up_since", "where",
    )  # fmt: skip

    def __init__(self, identity: bytes, kind: LinkKind, role: Role, *, opens: bool, where: str = "") -> None:
        super().__init__()
        self.identity = identity
        """The first frame of its messages."""
        self.kind = kind
        self.role = role
        """The role of the other broker's key."""
        self.opens = opens
        """Whether this broker opens the connection."""
        self.where = where
        """The endpoint that it opens, for people."""
        self.state = LinkState.DOWN
        self.name = ""
        """The other broker's name; empty until it is known."""
        self.instance = ""
        """Distinguishes brokers of the same name, and a broker from itself before a restart."""
        self.key: tuple[str, int] = ("", 0)
        """Decides which of several links between two brokers is used.  Both ends of a link have the same key."""
        self.standby = False
        """Whether there is another link to the same broker, which is used instead."""
        self.client: Client = LinkClient(self)
        """The other broker as a client of this one."""
        self.remotes: dict[bytes, LinkRemote] = {}
        """The workers that can be reached there, by service."""
        self.attempts: dict[RequestId, Attempt] = {}
        """The requests that are there, by address."""
        self.announced: dict[bytes, tuple[int, int, int]] = {}
        """The credit, free credit and hops announced for each service."""
        self.dirty: dict[bytes, None] = {}
        """Services whose announcement may have to change."""
        self.trusted = False
        """Whether the other broker has answered a request since the link is up."""
        self.last_seen = 0.0
        self.heartbeat_at = 0.0
        self.up_since = 0.0
        self.redial = Redial()
        """When to open the connection again, if it is down."""
        self.trouble = ""
        """Why it is not up."""
        self.untried = False
        """Whether it is still being tried: it has not failed, nor has the other broker announced all that it offers."""
        self.sent = 0
        """Number of requests passed on over it so far."""
        self.received = 0
        """Number of requests that came over it so far."""

    def joins(self, other: Link) -> bool:
        """Return whether requests that come over this link may go over `other`, and the reverse.

        Only requests of children go to the parent and to peers, so that none goes in circles (C44).
        """
        return other is not self and (self.kind is LinkKind.CHILD or other.kind is LinkKind.CHILD)


class LinkClient(Client):
    """The broker at the other end of a link, as a client of this one."""

    __slots__ = ("link",)

    def __init__(self, link: Link) -> None:
        super().__init__(link.identity, link.role)
        self.link = link
        self.is_broker = True

    @property
    def broker(self) -> str:
        """The name of the other broker."""
        return self.link.name


class LinkRemote(Remote):
    """The workers of a service that are reached over a link."""

    __slots__ = ("link",)

    def __init__(self, link: Link, service: Service) -> None:
        super().__init__((link.identity,), CX1, service, link.role, link.name)
        self.link = link

    @property
    def takes_more(self) -> bool:
        """Whether another request may be passed on over the link."""
        return self.link.trusted or len(self.link.attempts) < MAX_UNANSWERED

    def may_take(self, request: Request) -> bool:
        """Return whether `request` may be passed on over the link (C44): it must not go to where it has been."""
        client = request.client
        if isinstance(client, LinkClient) and not client.link.joins(self.link):
            return False
        return request.way is None or self.link.name not in request.way.via

    def hold(self, attempt: Attempt) -> None:
        """Record that a request is at the other broker."""
        super().hold(attempt)
        self.link.attempts[attempt.address] = attempt

    def let_go(self, attempt: Attempt) -> None:
        """Record that a request is no longer at the other broker."""
        super().let_go(attempt)
        del self.link.attempts[attempt.address]

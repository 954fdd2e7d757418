"""Links to other brokers: who is at the other end, what can be reached there, and what is announced (C44).

A link is one connection, which one of the two brokers opens (`--peer`, `--parent`).  The one that opens it asks the
other for `mmi.link`, as any X1 client would, and the answer establishes the link.  From then on each of the two is both
a client of the other (`MDPCL1`: REQUEST, CANCEL) and a worker of it (`MDPWL1`: PARTIAL, FINAL, ERROR, RELEASE, and
READY to announce the services that it can reach).

What is announced never leads in a circle: to its parent and its peers a broker announces its own services and those of
its children; to its children, everything else too.  So a broker that hears its own name knows that the brokers are
linked in a circle, and ends that link.

Like the rest of the machine, this has no socket and no clock.  `Broker` (`machine`) owns the requests.
"""

from __future__ import annotations

import json
import logging
import random
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from .. import wire
from ..limits import Limits
from ..wire import Message
from ..wire.options import MAX_HOPS
from .outgoing import Outgoing
from .registry import Attempt, Client, Registry, Remote, Service
from .roles import Role

if TYPE_CHECKING:
    from .journal import Journal

HELLO: Final = b"mmi.link"
"""The name by which a broker asks another for a link."""
BROKER: Final = b"mmi.broker."
"""What a broker's name follows in the name under which it is announced."""
MAX_BROKER_NAME: Final = 64
ANNOUNCE_INTERVAL: Final = 0.05
"""Minimum seconds between two announcements over a link."""
FREE_INTERVAL: Final = 0.25
"""The same for services of which nothing has changed but the free credit, which does so all the time."""
MAX_ANNOUNCED: Final = 1000
"""Maximum number of services in an announcement; others follow in the next."""
MAX_REFUSED: Final = 30.0
"""Longest pause, in seconds, before another attempt to link to a broker that refuses."""
LASTING: Final = 60.0
"""Seconds after which a link is no longer held responsible for having ended before."""
BROKER_CREDIT: Final = 1_000_000
"""Credit announced for requests that are addressed to a broker."""
# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (0.1, 5.0)
"""The shortest and the longest pause, in seconds, between attempts to connect to a broker that does not answer."""


class Kind(StrEnum):
    """What the broker at the other end is to this one."""

    PEER = "peer"
    PARENT = "parent"
    CHILD = "child"


_REVERSE: Final = {Kind.PEER: Kind.PEER, Kind.PARENT: Kind.CHILD, Kind.CHILD: Kind.PARENT}


class State(StrEnum):
    """How far a link is."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"


class Link:
    """One link, from this broker's point of view."""

    __slots__ = (
        "announced",
        "attempts",
        "backoff",
        "batch",
        "client",
        "dirty",
        "heartbeat_at",
        "identity",
        "instance",
        "key",
        "kind",
        "last_seen",
        "name",
        "opens",
        "penalty",
        "received",
        "remotes",
        "retry_at",
        "role",
        "sent",
        "standby",
        "state",
        "trouble",
        "untried",
        "up_since",
        "where",
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
        """The same at both ends, to decide which of several links between two brokers is used."""
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
        self.backoff = BACKOFF[0]
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


class Links:
    """The links of one broker.

    `name` is its name, `instance` a random text that no other broker has.
    """

    def __init__(
        self,
        name: str,
        instance: str,
        limits: Limits,
        registry: Registry,
        outgoing: Outgoing,
        journal: Journal,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.instance = instance
        self._own = BROKER + name.encode()
        self.by_identity: dict[bytes, Link] = {}
        """Every link that this broker opens, and those that others have opened and that are up."""
        self.opening: dict[bytes, Link] = {}
        """Those that this broker has opened and that the other broker has not accepted yet."""
        self.withdrawn_services: list[Service] = []
        """Services that can no longer be reached over some link.  The broker empties it."""
        self.untried = 0
        """Number of links that this broker opens and whose first attempt is not over: until they have failed, or the
        other broker has announced all that it offers."""
        self.withdrawn = False
        """Nothing is announced any longer, since this broker is draining."""
        self._limits = limits
        self._registry = registry
        self._outgoing = outgoing
        self._journal = journal
        self._rng = rng
        self._opened = 0
        self._to_close: list[bytes] = []
        self._announce_at = 0.0
        self._free_at = 0.0
        self._changed: dict[bytes, None] = {}
        """Services whose announcements over all links may have to change."""
        self._dirty = False
        """Whether there is anything to announce."""
        self._due: float | None = None
        """When `tick` or `due` has something to do, or earlier; None if there are no links."""

    def at(self, identity: bytes) -> Link | None:
        """Return the link whose messages have this first frame, if it is up."""
        link = self.by_identity.get(identity)
        return link if link is not None and link.state is State.UP else None

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, kind: Kind, role: Role, where: str, identity: bytes) -> Link:
        """Add a link that this broker opens.  Without an `identity`, it gets one that is unique among links only."""
        self._opened += 1
        link = Link(identity or b"uplink-%d" % self._opened, kind, role, opens=True, where=where)
        link.key = (self.name, self._opened)
        link.untried = True
        self.untried += 1
        self.by_identity[link.identity] = link
        self._plan()
        return link

    def due(self, now: float) -> list[bytes]:
        """Return the identities of the links for which a new connection is to be opened now."""
        if self.withdrawn or self._due is None or now < self._due:
            return []
        return [
            link.identity
            for link in self.by_identity.values()
            if link.opens and link.state is State.DOWN and now >= link.retry_at
        ]

    def opened(self, identity: bytes, now: float, role: Role | None) -> None:
        """Ask for the link over a new connection."""
        link = self.by_identity[identity]
        if role is not None and role is not link.role:
            link.role = role
            link.client = Client(identity, role, link)
        link.state = State.OPENING
        link.last_seen = now
        self.opening[identity] = link
        hello = self._hello()
        hello["kind"] = _REVERSE[link.kind].value
        hello["link"] = link.key[1]
        body = json.dumps(hello).encode()
        self._outgoing.add([identity, b"1", b"", wire.CX1, b"\x01", HELLO, b"", body])
        self._plan()

    def _hello(self) -> dict[str, Any]:
        return {"name": self.name, "instance": self.instance, "heartbeat": self._limits.heartbeat}

    def answered(self, link: Link, message: Message, now: float) -> None:
        """Take in the answer to the request for a link."""
        command = wire.decode_broker(message[1:])
        if isinstance(command, wire.Error):
            self._refused(link, command.text.decode(errors="replace"), now)
        elif isinstance(command, wire.Reply) and command.final and command.service == HELLO:
            hello = _parse(bytes(command.body[0]))
            if hello is None:
                self._refused(link, "that broker does not know links, or its answer is malformed", now)
                return
            link.name, link.instance = hello["name"], hello["instance"]
            trouble = self._trouble_with(link.name, link.instance)
            if trouble:
                self._refused(link, trouble, now)
            else:
                self.up(link, now)

    def asked(self, client: Client, body: list[bytes]) -> tuple[Link | None, str]:
        """Answer another broker that asks for a link.  Return the link, or why it is refused."""
        identity = client.key
        hello = _parse(body[0])
        if hello is None or not isinstance(identity, bytes):
            return None, "malformed request for a link, or one through a proxy"
        if client.role.restricted and not client.role.link:
            text = f"role {client.role.name} may not link brokers: it needs link = true in the broker's access file"
            return None, text
        if client.requests or identity in self.by_identity:
            return None, "a connection that is a link already, or has outstanding requests, cannot become a link"
        if len(self.by_identity) >= self._limits.max_links:
            return None, f"broker {self.name} has {self._limits.max_links} links already (max-links)"
        name, instance = hello["name"], hello["instance"]
        trouble = self._trouble_with(name, instance)
        if trouble:
            return None, trouble
        link = Link(identity, Kind(hello["kind"]), client.role, opens=False)
        link.name, link.instance, link.key = name, instance, (name, hello["link"])
        self.by_identity[identity] = link
        return link, ""

    def answer(self) -> list[bytes]:
        """Return the body that accepts a link."""
        return [json.dumps(self._hello()).encode()]

    def _trouble_with(self, name: str, instance: str) -> str:
        """Return why this broker cannot be linked to the broker of that name, or an empty string."""
        if instance == self.instance:
            return f"broker {self.name} cannot be linked to itself"
        if name == self.name:
            return f"both brokers are named {name}: start one with another --name"
        for link in self.by_identity.values():
            if link.state is State.UP and link.name == name and link.instance != instance:
                return f"another broker named {name} is linked to {self.name}: start one with another --name"
        return ""

    def _refused(self, link: Link, text: str, now: float) -> None:
        link.backoff = min(max(4 * link.backoff, 1.0), MAX_REFUSED)
        self.down(link, text, now)

    def ended(self, link: Link, now: float) -> None:
        """Wait for longer and longer before the link is opened again, since one of the two brokers has ended it.

        A link that closes a circle would otherwise come and go, and with it the requests that it takes.
        """
        if now - link.up_since >= LASTING:
            link.penalty = 0.0
        link.penalty = min(max(4 * link.penalty, 1.0), MAX_REFUSED)
        link.backoff = max(link.backoff, link.penalty)

    def up(self, link: Link, now: float) -> None:
        """Record that both brokers have agreed on the link."""
        link.state = State.UP
        link.trouble = ""
        link.backoff = BACKOFF[0]
        link.last_seen = link.up_since = now
        link.heartbeat_at = now + self._limits.heartbeat
        self.opening.pop(link.identity, None)
        self._registry.linked[link.identity] = link.client
        self._journal.note(
            now, logging.INFO, "link-up", "linked to broker %s (%s)%s", link.name, link.kind.value,
            f" at {link.where}" if link.where else "",
        )  # fmt: skip
        self._choose(link.name)

    def _tried(self, link: Link) -> None:
        self.untried -= link.untried
        link.untried = False

    def _choose(self, name: str) -> None:
        """Decide which of the links to a broker is used; the other broker decides alike."""
        links = [each for each in self.by_identity.values() if each.state is State.UP and each.name == name]
        links.sort(key=_key)
        for at, link in enumerate(links):
            link.standby = at > 0
            if link.standby:
                self._tried(link)  # nothing is announced over it
            link.dirty.update(dict.fromkeys([*link.announced, *self._announceable()]))
        self._dirty = True
        self._plan()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def down(self, link: Link, why: str, now: float) -> list[Attempt]:
        """Record that a link has ended; return the requests that are at the other broker, which are released.

        If this broker opens the connection, it is to be closed, and opened again later.
        """
        was_up = link.state is State.UP
        self._note_down(link, why, was_up, now)
        link.state = State.DOWN
        self._tried(link)
        link.trouble = why
        link.batch = None
        self.opening.pop(link.identity, None)
        if link.opens:
            self._to_close.append(link.identity)
            link.retry_at = now + link.backoff * self._rng.uniform(0.5, 1.0)
            if not was_up:
                link.backoff = max(link.backoff, min(2 * link.backoff, BACKOFF[1]))
        else:
            del self.by_identity[link.identity]
        self._plan()
        if not was_up:
            return []
        self._registry.linked.pop(link.identity, None)
        for remote in list(link.remotes.values()):
            self._withdraw(remote)
        attempts = list(link.attempts.values())
        for attempt in attempts:
            self._registry.release(attempt)
        link.announced.clear()
        link.dirty.clear()
        self._choose(link.name)
        return attempts

    def _note_down(self, link: Link, why: str, was_up: bool, now: float) -> None:
        who = link.name or link.where
        if was_up:
            self._journal.note(now, logging.WARNING, "link-down", "the link to broker %s has ended: %s", who, why)
        elif why != link.trouble:
            self._journal.note(now, logging.WARNING, "link-failed", "no link to broker %s yet: %s", who, why)

    def to_close(self) -> list[bytes]:
        """Return the identities of the connections that this broker has opened and must close now."""
        closed, self._to_close = self._to_close, []
        return closed

    # ── what is announced ────────────────────────────────────────────────────────────────────────────────────────────

    def changed(self, service: Service) -> None:
        """Record that what is announced about a service may have to change."""
        self._changed[service.name] = None
        self._dirty = True

    def withdraw_all(self) -> None:
        """Announce nothing any longer."""
        self.withdrawn = True
        for link in self.by_identity.values():
            link.dirty.update(dict.fromkeys(link.announced))
        self._dirty = True
        self._plan()

    def announce_again(self, link: Link, name: bytes) -> None:
        """Announce a service over `link` even if nothing has changed, since a request was returned."""
        if name in link.announced:
            link.announced[name] = (-1, -1, -1)
        link.dirty[name] = None
        self._dirty = True

    def announce(self, now: float) -> None:
        """Announce what has changed, if it is time."""
        if not self._dirty or now < self._announce_at:
            return
        self._announce_at = now + ANNOUNCE_INTERVAL
        self._dirty = False
        free_too = now >= self._free_at
        if free_too:
            self._free_at = now + FREE_INTERVAL
        changed, self._changed = self._changed, {}
        for link in self.by_identity.values():
            if link.state is not State.UP:
                continue
            link.dirty.update(changed)
            names = list(link.dirty)[:MAX_ANNOUNCED]
            for name in names:
                if self._announce(link, name, free_too):
                    del link.dirty[name]
            if link.dirty:
                self._dirty = True

    def _announce(self, link: Link, name: bytes, free_too: bool) -> bool:
        """Announce what has changed of a service.  Return whether nothing is left to announce of it."""
        credit, free, hops = offer = self._offer(link, name)
        before = link.announced.get(name)
        if not hops:
            if before is None:
                return True
            del link.announced[name]
        elif offer == before:
            return True
        else:
            if before is None and name != self._own and len(link.announced) >= self._limits.max_services:
                return True
            if before is not None and before[0] == credit and before[2] == hops and not free_too:
                return False
            link.announced[name] = offer
        client = link.client
        batch = self._outgoing.batch_for(client, (link.identity,), wire.WL1)
        batch.ready(credit, name, b'{"hops":%d,"free":%d}' % (hops, free) if hops else b"")
        return True

    def _offer(self, link: Link, name: bytes) -> tuple[int, int, int]:
        """Return the credit, free credit and hops to announce over `link` for a service; no hops if there is none."""
        if self.withdrawn or link.standby:
            return 0, 0, 0
        if name == self._own:
            return BROKER_CREDIT, BROKER_CREDIT, 1
        registry = self._registry
        service = registry.services.get(name) or registry.reachable.get(name)
        if service is None:
            return 0, 0, 0
        credit = free = hops = held = 0
        remotes = service.schedule.remotes
        for remote in remotes:
            held += remote.load
            if self._passes(link, remote.link):
                credit += remote.credit
                free += max(remote.may_hold - remote.load, 0)
                hops = min(hops, remote.hops + 1) if hops else remote.hops + 1
        if service.available:
            credit += service.schedule.capacity + max(service.running - held, 0)
            free += service.schedule.capacity
            hops = 1
        if not 0 < hops <= MAX_HOPS:
            return 0, 0, 0
        if name.startswith(BROKER):
            return BROKER_CREDIT, BROKER_CREDIT, hops
        return max(1, min(credit, BROKER_CREDIT)), min(free, BROKER_CREDIT), hops

    @staticmethod
    def _passes(link: Link, other: Link) -> bool:
        """Return whether what is reached over `other` is announced over `link`."""
        return other is not link and (link.kind is Kind.CHILD or other.kind is Kind.CHILD)

    def _announceable(self) -> list[bytes]:
        """Return what may be announced over a new link; this broker's name is last, and shows that this is all."""
        registry = self._registry
        local = [service.name for service in registry.services.values() if service.available]
        return [*local, *registry.reachable, self._own]

    def heard(self, link: Link, command: wire.Ready, now: float) -> bool:
        """Take in an announcement.  Return False if it tells that the brokers are linked in a circle."""
        name, hops = command.service, command.hops
        if name == self._own:
            return False
        if link.untried and name == BROKER + link.name.encode():
            self._tried(link)
        remote = link.remotes.get(name)
        if not hops:
            if remote is not None:
                self._withdraw(remote)
            return True
        if remote is None:
            if not self._may_announce(link, name, hops, now):
                return True
            remote = link.remotes[name] = self._registry.add_remote(link, name)
        credit = min(command.credit, BROKER_CREDIT)
        self._registry.update_remote(remote, credit, min(command.free, credit), hops)
        self.changed(remote.service)
        return True

    def _may_announce(self, link: Link, name: bytes, hops: int, now: float) -> bool:
        """Return whether the other broker may announce a service that it has not announced before."""
        reachable = self._registry.reachable
        if hops > MAX_HOPS:
            why = f"it is more than {MAX_HOPS} links away"
        elif name not in reachable and len(reachable) >= self._limits.max_services * (1 + name.startswith(BROKER)):
            why = "other brokers have announced as many services as this one keeps (max-services)"
        elif name.startswith(BROKER):
            return True
        elif name.startswith(wire.MMI):
            why = "the name is reserved"
        elif not link.role.may_offer(name):
            why = f"role {link.role.name} may not offer it: the access file decides"
        else:
            return True
        text = "ignored service %s of broker %s: %s"
        self._journal.note(now, logging.WARNING, "link-service", text, name, link.name, why)
        return False

    def _withdraw(self, remote: Remote) -> None:
        """Forget that a service can be reached over a link.  Requests that are there go on."""
        del remote.link.remotes[remote.service.name]
        self._registry.remove_remote(remote)
        self.withdrawn_services.append(remote.service)
        self.changed(remote.service)

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[Link]:
        """Send heartbeats; return the links whose other end has been silent for too long."""
        silent: list[Link] = []
        if self._due is None or now < self._due:
            return silent
        for link in self.by_identity.values():
            if link.state is State.DOWN:
                continue
            if now >= link.last_seen + self._limits.patience:
                silent.append(link)
            elif link.state is State.UP and now >= link.heartbeat_at:
                link.heartbeat_at = now + self._limits.heartbeat
                self._outgoing.add([link.identity, wire.WL1])
                self._tried(link)  # a broker that drains announces nothing
        self._plan()
        return silent

    def _plan(self) -> None:
        """Compute when something is due next.  What is heard from a link only moves that to a later time."""
        self._due = None
        for link in self.by_identity.values():
            if link.state is State.DOWN:
                if self.withdrawn:
                    continue  # a draining broker opens no links
                at = link.retry_at
            else:
                at = link.last_seen + self._limits.patience
                if link.state is State.UP:
                    at = min(at, link.heartbeat_at)
            if self._due is None or at < self._due:
                self._due = at

    def deadline(self) -> float | None:
        """Return when `tick`, `announce` or `due` has something to do, or None."""
        if self._dirty and self.by_identity and (self._due is None or self._announce_at < self._due):
            return self._announce_at
        return self._due


def _key(link: Link) -> tuple[str, int]:
    return link.key


def _parse(body: bytes) -> dict[str, Any] | None:
    """Return what a broker says about itself when it asks for a link or answers, or None if it is malformed."""
    try:
        hello = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(hello, dict):
        return None
    name, instance, number = hello.get("name"), hello.get("instance"), hello.get("link", 0)
    if not isinstance(name, str) or not isinstance(instance, str) or not valid_name(name) or len(instance) > 64:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or hello.setdefault("kind", "peer") not in list(Kind):
        return None
    hello["link"] = number
    return hello


def valid_name(name: str) -> bool:
    """Return whether `name` can be a broker's name: printable, without spaces, of at most `MAX_BROKER_NAME` bytes."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return 0 < len(raw) <= MAX_BROKER_NAME and " " not in name and wire.valid_service(BROKER + raw)

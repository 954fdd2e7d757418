"""Links to other brokers: how they are opened, agreed upon, kept and ended (C44).

A link is one connection, which one of the two brokers opens (`--peer`, `--parent`).  Each of the two is both a client
of the other (`MDPCL1`: REQUEST, CANCEL) and a worker of it (`MDPWL1`: PARTIAL, FINAL, ERROR, RELEASE, and READY to
announce the services that it can reach).  The one that opens the connection first asks the other for `mmi.link`, and
the answer establishes the link.

Like the rest of the machine, this has no socket and no clock.  `Announcements` keeps the services that links lead to,
and `LinkDialog` passes on requests.
"""

import json
import logging
import math
import random
from typing import Any, Final, NamedTuple

from ... import wire
from ...timers import Alarm
from ...wire import BROKER, HELLO, MMI, batch
from ...wire.names import displayed
from ..core.records import Attempt, Client, Service
from ..core.roles import Role
from ..core.state import Part, State
from .announcements import Announcements
from .link import Link, LinkClient, LinkKind, LinkState

MAX_BROKER_NAME: Final = 64
_NOT_ALLOWED: Final = "role %s may not link brokers: it needs link = true in %s broker's access file"
_REVERSE: Final = {LinkKind.PEER: LinkKind.PEER, LinkKind.PARENT: LinkKind.CHILD, LinkKind.CHILD: LinkKind.PARENT}


class OpenLink(NamedTuple):
    """The shell is to open the connection of a link, and to report it: `Broker.link_opened` or `Broker.link_failed`."""

    identity: bytes


class CloseLink(NamedTuple):
    """The shell is to close the connection of a link, if there is one."""

    identity: bytes


class Links(Part):
    """The links of one broker.  `instance` is a random text that no other broker has."""

    def __init__(self, state: State, instance: str, rng: random.Random, announcing: Alarm) -> None:
        super().__init__(state)
        self.name = state.name
        self.instance = instance
        self.by_identity: dict[bytes, Link] = {}
        """Every link that this broker opens, and those that others have opened and that are up."""
        self.opening: dict[bytes, Link] = {}
        """The links that this broker has opened and that the other broker has not accepted yet."""
        self.untried = 0
        """Number of links that this broker opens and whose first attempt is not over: until they have failed, or the
        other broker has announced all that it offers."""
        self._rng = rng
        self.announcements = Announcements(state, self.by_identity, announcing)
        self._opened = 0
        self.alarm: Alarm | None = None
        """Set to when `tick` has something to do, or earlier."""

    def at(self, identity: bytes) -> Link | None:
        """Return the link whose messages have this first frame, if it is up."""
        link = self.by_identity.get(identity)
        return link if link is not None and link.state is LinkState.UP else None

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, kind: LinkKind, role: Role, where: str, identity: bytes) -> Link:
        """Add a link that this broker opens.  Without an `identity`, it gets one that is unique among links only."""
        self._opened += 1
        link = Link(identity or b"uplink-%d" % self._opened, kind, role, opens=True, where=where)
        link.key = (self.name, self._opened)
        link.untried = True
        self.untried += 1
        self.by_identity[link.identity] = link
        self._plan()
        return link

    def _open(self, link: Link, now: float) -> None:
        """Have the connection of a link opened."""
        link.state = LinkState.OPENING
        link.last_seen = now
        self._outgoing.ask(OpenLink(link.identity))

    def opened(self, identity: bytes, now: float, role: Role | None) -> None:
        """Ask for the link over a new connection."""
        link = self.by_identity[identity]
        if role is not None:
            link.role = role
        if not link.role.link:
            self._refused(link, _NOT_ALLOWED % (link.role.name, "this"), now)
            return
        link.client = LinkClient(link)  # the requests of the one before may still have to be dropped
        link.state = LinkState.OPENING
        link.last_seen = now
        self.opening[identity] = link
        hello = self._hello()
        hello["kind"] = _REVERSE[link.kind].value
        hello["link"] = link.key[1]
        asked = batch.Batch((identity,), wire.CL1)
        asked.request_to_broker(1, 0, HELLO, b"", [json.dumps(hello).encode()])
        for message in asked.messages():
            self._outgoing.add(message)
        self._plan()

    def _hello(self) -> dict[str, Any]:
        return {"name": self.name, "instance": self.instance, "heartbeat": self._limits.heartbeat}

    def settle_hello(self, link: Link, command: Any, now: float) -> None:
        """Take in the answer to our request for a link, if `command` is one."""
        if isinstance(command, wire.Error):
            self._refused(link, displayed(command.text.decode(errors="replace")), now)
        elif isinstance(command, wire.Reply) and command.final:
            hello = _parse(bytes(command.body[0]))
            if hello is None:
                self._refused(link, "that broker does not know links, or its answer is malformed", now)
                return
            link.name, link.instance = hello["name"], hello["instance"]
            trouble = self._trouble_with(link.name, link.instance)
            if trouble:
                self._refused(link, trouble, now)
            else:
                self.begin(link, now)

    def check_hello(self, client: Client, role: Role, body: list[bytes]) -> tuple[Link | None, str]:
        """Decide on another broker's request for a link, over the connection of `client`, whose key has that role.

        Return the link, or why it is refused.
        """
        identity = client.key
        hello = _parse(bytes(body[0]))
        if hello is None or not isinstance(identity, bytes):
            return None, "malformed request for a link, or one through a proxy"
        if not role.link:
            return None, _NOT_ALLOWED % (role.name, "the")
        if client.requests or identity in self.by_identity:
            return None, "a connection that is a link already, or has outstanding requests, cannot become a link"
        if len(self.by_identity) >= self._limits.max_links:
            return None, f"broker {self.name} has {self._limits.max_links} links already (max-links)"
        name, instance = hello["name"], hello["instance"]
        trouble = self._trouble_with(name, instance)
        if trouble:
            return None, trouble
        link = Link(identity, LinkKind(hello["kind"]), role, opens=False)
        link.name, link.instance, link.key = name, instance, (name, hello["link"])
        self.by_identity[identity] = link
        return link, ""

    def replaced_by(self, link: Link) -> Link | None:
        """Return the link that was up when the other broker opened `link`, over a connection that must have ended."""
        for each in self.by_identity.values():
            if (
                each is not link
                and each.key == link.key
                and each.instance == link.instance
                and each.state is LinkState.UP
            ):
                return each
        return None

    def accepting_hello(self) -> list[bytes]:
        """Return the body that accepts another broker's request for a link."""
        return [json.dumps(self._hello()).encode()]

    def _trouble_with(self, name: str, instance: str) -> str:
        """Return why this broker cannot be linked to the broker of that name, or an empty string."""
        if instance == self.instance:
            return f"broker {self.name} cannot be linked to itself"
        if name == self.name:
            return f"both brokers are named {name}: start one with another --name"
        for link in self.by_identity.values():
            if link.state is LinkState.UP and link.name == name and link.instance != instance:
                return f"another broker named {name} is linked to {self.name}: start one with another --name"
        return ""

    def _refused(self, link: Link, text: str, now: float) -> None:
        link.redial.refused()
        self.take_down(link, text, now)

    def begin(self, link: Link, now: float) -> None:
        """Record that both brokers have agreed on the link."""
        link.state = LinkState.UP
        link.trouble = ""
        link.trusted = False
        link.redial.succeeded()
        link.last_seen = link.up_since = now
        link.heartbeat_at = now + self._limits.heartbeat
        self.opening.pop(link.identity, None)
        self._directory.brokers[link.identity] = link.client
        self._journal.note(
            now, logging.INFO, "link-up", "linked to broker %s (%s)%s", link.name, link.kind.value,
            f" at {link.where}" if link.where else "",
        )  # fmt: skip
        self._choose(link.name)

    def seen(self, link: Link, now: float) -> None:
        """Record a sign of life."""
        link.last_seen = now

    def _tried(self, link: Link) -> None:
        self.untried -= link.untried
        link.untried = False

    def _choose(self, name: str) -> None:
        """Decide which of the links to a broker is used; the other broker decides alike."""
        links = [each for each in self.by_identity.values() if each.state is LinkState.UP and each.name == name]
        links.sort(key=_key)
        for at, link in enumerate(links):
            link.standby = at > 0
            if link.standby:
                self._tried(link)  # nothing will be announced over it, so no client has to wait for that
            self.announcements.review(link)
        self._plan()

    def describe(self, now: float) -> list[dict[str, Any]]:
        """Return the links, as `mmi.brokers` shows them."""
        return [
            {
                "broker": link.name,
                "kind": str(link.kind),
                "endpoint": link.where,
                "state": "standby" if link.standby and link.state is LinkState.UP else str(link.state),
                "trouble": link.trouble,
                "up_seconds": round(now - link.up_since, 3) if link.state is LinkState.UP else 0,
                "services": sum([not name.startswith(MMI) for name in link.remotes]),
                "outstanding_there": len(link.attempts),
                "outstanding_here": link.client.requests,
                "sent": link.sent,
                "received": link.received,
            }
            for link in self.by_identity.values()
        ]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_down(self, link: Link, why: str, now: float) -> tuple[list[Attempt], list[Service]]:
        """Record that a link has ended.

        Return the requests that are at the other broker, which are released, and the services that can no longer be
        reached over this link.  If this broker opens the connection, it is to be closed, and opened again later.
        """
        was_up = link.state is LinkState.UP
        self._note_down(link, why, was_up, now)
        link.state = LinkState.DOWN
        self._tried(link)
        link.trouble = why
        self._outgoing.close_batch(link)
        self.opening.pop(link.identity, None)
        if link.opens:
            self._outgoing.ask(CloseLink(link.identity))
            link.redial.plan(now, self._rng, was_up=was_up)
        else:
            del self.by_identity[link.identity]
            link.client = Client(link.identity, link.role)  # the one before refers to the link: that would be a cycle
        self._plan()
        if not was_up:
            return [], []
        self._directory.brokers.pop(link.identity, None)
        services: list[Service] = []
        for remote in list(link.remotes.values()):
            self.announcements.withdraw(remote)
            services.append(remote.service)
        attempts = list(link.attempts.values())
        for attempt in attempts:
            self._registry.release(attempt)
        link.announced.clear()
        link.dirty.clear()
        self._choose(link.name)
        return attempts, services

    def _note_down(self, link: Link, why: str, was_up: bool, now: float) -> None:
        who = link.name or link.where
        if was_up:
            self._journal.note(now, logging.WARNING, "link-down", "the link to broker %s has ended: %s", who, why)
        elif why != link.trouble:
            self._journal.note(now, logging.WARNING, "link-failed", "no link to broker %s yet: %s", who, why)

    def announced(self, link: Link, command: wire.Ready, now: float) -> list[Service]:
        """Take in an announcement.  Return the services that can no longer be reached over this link."""
        if link.untried and command.service == BROKER + link.name.encode():
            self._tried(link)
        return self.announcements.take_in(link, command, now)

    def trust(self, link: Link, *, returned: bool) -> None:
        """Record that the other broker answers a request, or has only returned it: it may be given more."""
        link.trusted = not returned
        for remote in link.remotes.values():
            self._directory.touch(remote.service)

    def withdraw_all(self) -> None:
        """Withdraw every service, announce none from now on, and open no links."""
        self.announcements.withdraw_all()
        self._plan()

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, read_until: float) -> list[Link]:
        """Send heartbeats, and have connections opened.

        Return the links whose other end has been silent for too long, up to the time `read_until`.
        """
        silent: list[Link] = []
        for link in self.by_identity.values():
            if link.state is LinkState.DOWN:
                if now >= link.redial.at and not self.announcements.withdrawn:
                    self._open(link, now)
            elif read_until >= link.last_seen + self._limits.patience:
                silent.append(link)
            elif link.state is LinkState.UP and now >= link.heartbeat_at:
                link.heartbeat_at = now + self._limits.heartbeat
                self._outgoing.add(wire.heartbeat((link.identity,), wire.WL1))
                self._tried(link)  # a broker that drains announces nothing
        self._plan()
        return silent

    def _plan(self) -> None:
        """Compute when something is due next.  A message over a link only moves that to a later time."""
        due = math.inf
        for link in self.by_identity.values():
            if link.state is LinkState.DOWN:
                if self.announcements.withdrawn:
                    continue  # a draining broker opens no links
                at = link.redial.at
            else:
                at = link.last_seen + self._limits.patience
                if link.state is LinkState.UP:
                    at = min(at, link.heartbeat_at)
            due = min(due, at)
        assert self.alarm is not None  # noqa: S101 - the machine has set it
        self.alarm.set(due)


def _key(link: Link) -> tuple[str, int]:
    return link.key


def _parse(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a broker's request for a link, or of the answer; None if it is malformed."""
    try:
        hello = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(hello, dict):
        return None
    name, instance, number = hello.get("name"), hello.get("instance"), hello.get("link", 0)
    if not isinstance(name, str) or not isinstance(instance, str) or not valid_name(name) or len(instance) > 64:
        return None
    if (
        not isinstance(number, int)
        or isinstance(number, bool)
        or hello.setdefault("kind", "peer") not in list(LinkKind)
    ):
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

"""Links to other brokers: how they are opened, agreed upon, kept and ended (C44).

A link is one connection, which one of the two brokers opens (`--peer`, `--parent`).  Each of the two is both a client
of the other (`MDPCL1`: REQUEST, CANCEL) and a worker of it (`MDPWL1`: PARTIAL, FINAL, ERROR, RELEASE, and READY to
announce the services that it can reach).  The one that opens the connection first asks the other for `mmi.link`, and
the answer establishes the link.

Like the rest of the machine, this has no socket and no clock.  `Announcements` says what can be reached over links, and
`LinkDialog` what passes over them.
"""

import json
import logging
import math
import random
from typing import Any, Final

from .. import wire
from ..backoff import jittered
from ..timers import Alarm
from ..wire import BROKER, HELLO, batch
from ..wire.names import displayed
from .announcements import Announcements
from .events import CloseLink, OpenLink
from .records import Attempt, Client, Link, LinkKind, LinkState
from .roles import Role
from .shared import Part, Shared

MAX_BROKER_NAME: Final = 64
MAX_REFUSED: Final = 30.0
"""Longest pause, in seconds, before another attempt to link to a broker that refuses."""
LASTING: Final = 60.0
"""Seconds that a link must be up before earlier ends of it are forgotten (`Links.ended`)."""
# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (0.1, 5.0)
"""The shortest and the longest pause, in seconds, between attempts to connect to a broker that does not answer."""


_NOT_ALLOWED: Final = "role %s may not link brokers: it needs link = true in %s broker's access file"
_REVERSE: Final = {LinkKind.PEER: LinkKind.PEER, LinkKind.PARENT: LinkKind.CHILD, LinkKind.CHILD: LinkKind.PARENT}


class Links(Part):
    """The links of one broker.  `instance` is a random text that no other broker has."""

    def __init__(self, shared: Shared, instance: str, rng: random.Random) -> None:
        super().__init__(shared)
        self.name = shared.name
        self.instance = instance
        self.by_identity: dict[bytes, Link] = {}
        """Every link that this broker opens, and those that others have opened and that are up."""
        self.opening: dict[bytes, Link] = {}
        """The links that this broker has opened and that the other broker has not accepted yet."""
        self.untried = 0
        """Number of links that this broker opens and whose first attempt is not over: until they have failed, or the
        other broker has announced all that it offers."""
        self._rng = rng
        self.announcements = Announcements(shared, self.by_identity)
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
        link.backoff = BACKOFF[0]
        link.untried = True
        self.untried += 1
        self.by_identity[link.identity] = link
        self._plan()
        return link

    def _open(self, link: Link, now: float) -> None:
        """Have the connection of a link opened."""
        link.state = LinkState.OPENING
        link.last_seen = now
        self._shared.ask(OpenLink(link.identity))

    def opened(self, identity: bytes, now: float, role: Role | None) -> None:
        """Ask for the link over a new connection."""
        link = self.by_identity[identity]
        if role is not None:
            link.role = role
        if not link.role.link:
            self._refused(link, _NOT_ALLOWED % (link.role.name, "this"), now)
            return
        link.client = Client(identity, link.role, link)  # the requests of the one before may still have to be dropped
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

    def answered(self, link: Link, command: Any, now: float) -> None:
        """Take in the answer to the request for a link, if `command` is one."""
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
                self.up(link, now)

    def asked(self, client: Client, role: Role, body: list[bytes]) -> tuple[Link | None, str]:
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
            if link.state is LinkState.UP and link.name == name and link.instance != instance:
                return f"another broker named {name} is linked to {self.name}: start one with another --name"
        return ""

    def _refused(self, link: Link, text: str, now: float) -> None:
        link.backoff = min(max(4 * link.backoff, 1.0), MAX_REFUSED)
        self.down(link, text, now)

    def ended(self, link: Link, now: float) -> None:
        """Wait longer each time before the link is opened again, because one of the two brokers has ended it.

        A link that closes a circle would otherwise come and go, and with it the requests that it takes.
        """
        if now - link.up_since >= LASTING:
            link.penalty = 0.0
        link.penalty = min(max(4 * link.penalty, 1.0), MAX_REFUSED)
        link.backoff = max(link.backoff, link.penalty)

    def up(self, link: Link, now: float) -> None:
        """Record that both brokers have agreed on the link."""
        link.state = LinkState.UP
        link.trouble = ""
        link.answered = False
        link.backoff = BACKOFF[0]
        link.last_seen = link.up_since = now
        link.heartbeat_at = now + self._limits.heartbeat
        self.opening.pop(link.identity, None)
        self._directory.linked[link.identity] = link.client
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
                self._tried(link)  # nothing will be announced over it, so nobody should wait for that
            self.announcements.review(link)
        self._plan()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def down(self, link: Link, why: str, now: float) -> list[Attempt]:
        """Record that a link has ended; return the requests that are at the other broker, which are released.

        If this broker opens the connection, it is to be closed, and opened again later.
        """
        was_up = link.state is LinkState.UP
        self._note_down(link, why, was_up, now)
        link.state = LinkState.DOWN
        self._tried(link)
        link.trouble = why
        self._outgoing.close_batch(link)
        self.opening.pop(link.identity, None)
        if link.opens:
            self._shared.ask(CloseLink(link.identity))
            # A random part, so that brokers that have lost the same one do not all come back at the same moment.
            link.retry_at = now + jittered(link.backoff, self._rng)
            if not was_up:
                link.backoff = max(link.backoff, min(2 * link.backoff, BACKOFF[1]))
        else:
            del self.by_identity[link.identity]
            link.client = Client(link.identity, link.role)  # the one before refers to the link: that would be a cycle
        self._plan()
        if not was_up:
            return []
        self._directory.linked.pop(link.identity, None)
        for remote in list(link.remotes.values()):
            self.announcements.withdraw(remote)
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

    def heard(self, link: Link, command: wire.Ready, now: float) -> bool:
        """Take in an announcement.  Return False if it tells that the brokers are linked in a circle."""
        if link.untried and command.service == BROKER + link.name.encode():
            self._tried(link)
        return self.announcements.heard(link, command, now)

    def answers(self, link: Link, *, returned: bool) -> None:
        """Record that the other broker answers a request, or has only returned it.  It may be given more then."""
        link.answered = not returned
        for remote in link.remotes.values():
            self._directory.touch(remote.service)

    def withdraw_all(self) -> None:
        """Withdraw every service, announce none from now on, and open no links."""
        self.announcements.withdraw_all()
        self._plan()

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, heard: float) -> list[Link]:
        """Send heartbeats, and have connections opened.

        Return the links whose other end has been silent for too long, until the time `heard`.
        """
        silent: list[Link] = []
        for link in self.by_identity.values():
            if link.state is LinkState.DOWN:
                if now >= link.retry_at and not self.announcements.withdrawn:
                    self._open(link, now)
            elif heard >= link.last_seen + self._limits.patience:
                silent.append(link)
            elif link.state is LinkState.UP and now >= link.heartbeat_at:
                link.heartbeat_at = now + self._limits.heartbeat
                self._outgoing.add(wire.heartbeat((link.identity,), wire.WL1))
                self._tried(link)  # a broker that drains announces nothing
        self._plan()
        return silent

    def _plan(self) -> None:
        """Compute when something is due next.  What is heard from a link only moves that to a later time."""
        due = math.inf
        for link in self.by_identity.values():
            if link.state is LinkState.DOWN:
                if self.announcements.withdrawn:
                    continue  # a draining broker opens no links
                at = link.retry_at
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

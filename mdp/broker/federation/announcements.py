"""The services that brokers announce to each other (C44).

Announcements never lead in a circle: to its parent and its peers a broker announces its own services and those of
its children; to its children, everything else too (`Link.joins`).  So if a broker's own name is announced to it, the
brokers are linked in a circle.
"""

import logging
import math
from collections.abc import Mapping
from itertools import islice
from typing import Final

from ... import wire
from ...timers import Alarm
from ...wire import BROKER
from ...wire.options import MAX_HOPS
from ..core.records import Service
from ..core.state import Part, State
from .link import Link, LinkRemote, LinkState

ANNOUNCE_INTERVAL: Final = 0.05
"""Minimum seconds between two announcements over a link."""
FREE_INTERVAL: Final = 0.25
"""Minimum seconds between two announcements of a service when only its free credit has changed."""
MAX_ANNOUNCED: Final = 1000
"""Maximum number of services in an announcement; others follow in the next."""
BROKER_CREDIT: Final = 1_000_000
"""Credit announced for requests that are addressed to a broker."""


class Announcements(Part):
    """The announcements of one broker, over `links`, which are by identity."""

    def __init__(self, state: State, links: Mapping[bytes, Link], alarm: Alarm) -> None:
        super().__init__(state)
        self.withdrawn = False
        """Nothing is announced any longer, since this broker is draining."""
        self._own = BROKER + state.name.encode()
        self._links = links
        self._announce_at = 0.0
        self._free_at = 0.0
        self._changed: dict[bytes, None] = {}
        """Services whose announcements over all links may have to change."""
        self.alarm = alarm
        """Set while there is anything to announce."""

    # ── own announcements ────────────────────────────────────────────────────────────────────────────────────────────

    def changed(self, service: Service) -> None:
        """Record that the announcements of a service may have to change."""
        self._changed[service.name] = None
        self._announce_soon()

    def _announce_soon(self) -> None:
        self.alarm.set(self._announce_at)

    def withdraw_all(self) -> None:
        """Withdraw every service, and announce none from now on."""
        self.withdrawn = True
        for link in self._links.values():
            link.dirty.update(dict.fromkeys(link.announced))
            self._announce_soon()

    def repeat(self, link: Link, name: bytes) -> None:
        """Announce a service over `link` even if nothing has changed, since a request was returned."""
        if name in link.announced:
            link.announced[name] = (-1, -1, -1)
        link.dirty[name] = None
        self._announce_soon()

    def announce(self, now: float) -> None:
        """Announce what has changed; call it when the alarm is due."""
        self._announce_at = now + ANNOUNCE_INTERVAL
        self.alarm.set(math.inf)
        free_too = now >= self._free_at
        if free_too:
            self._free_at = now + FREE_INTERVAL
        changed, self._changed = self._changed, {}
        for link in self._links.values():
            if link.state is not LinkState.UP:
                continue
            link.dirty.update((name, None) for name in changed if self._concerns(link, name))
            for name in list(islice(link.dirty, MAX_ANNOUNCED)):
                if self._announce(link, name, free_too):
                    del link.dirty[name]
            if link.dirty:
                self._announce_soon()

    def _concerns(self, link: Link, name: bytes) -> bool:
        """Return whether there may be anything to announce of a service: clients can name any number of others."""
        directory = self._directory
        if name in link.announced or name in directory.reachable:
            return True
        service = directory.services.get(name)
        return service is not None and service.available > 0

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
        directory = self._directory
        service = directory.services.get(name) or directory.reachable.get(name)
        if service is None:
            return 0, 0, 0
        credit = free = hops = held = 0
        for remote in service.remotes:
            held += remote.load
            if isinstance(remote, LinkRemote) and link.joins(remote.link):
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

    def review(self, link: Link) -> None:
        """Decide again about everything that is announced over `link`, or may be.

        This broker's name comes last, and shows the other that it knows all.
        """
        directory = self._directory
        local = [service.name for service in directory.services.values() if service.available]
        link.dirty.update(dict.fromkeys([*link.announced, *local, *directory.reachable, self._own]))
        self._announce_soon()

    # ── others' announcements ────────────────────────────────────────────────────────────────────────────────────────

    def shows_circle(self, command: wire.Ready) -> bool:
        """Return whether an announcement shows that the brokers are linked in a circle: it has this broker's name."""
        return command.service == self._own

    def take_in(self, link: Link, command: wire.Ready, now: float) -> list[Service]:
        """Take in an announcement.  Return the services that can no longer be reached over this link."""
        name, hops = command.service, command.hops
        remote = link.remotes.get(name)
        if not hops:
            if remote is None:
                return []
            self.withdraw(remote)
            return [remote.service]
        if remote is None:
            if not self._may_announce(link, name, hops, now):
                return []
            remote = link.remotes[name] = LinkRemote(link, self._directory.service(name))
            self._directory.add_remote(remote)
        credit = min(command.credit, BROKER_CREDIT)
        self._directory.update_remote(remote, credit, min(command.free, credit), hops)
        self.changed(remote.service)
        return []

    def _may_announce(self, link: Link, name: bytes, hops: int, now: float) -> bool:
        """Return whether the other broker may announce a service that it has not announced before."""
        reachable = self._directory.reachable
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

    def withdraw(self, remote: LinkRemote) -> None:
        """Forget that a service can be reached over a link.  Requests that are there go on."""
        del remote.link.remotes[remote.service.name]
        self._directory.remove_remote(remote)
        self.changed(remote.service)

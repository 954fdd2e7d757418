"""Several brokers that are linked to one another, and peers that go from one to the next."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zmdp.mdp.broker.core.outgoing import Event
from zmdp.mdp.broker.core.records import Worker, key_of
from zmdp.mdp.broker.core.roles import Role
from zmdp.mdp.broker.federation.links import CloseLink, OpenLink
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.wire import Message, Route
from zmdp.testing.network import HIGH_WATER, Dealer, Network

from .actors import BrokerShell, Stage, silent
from .crossing import Crossing
from .rules import check

Kind = Literal["peer", "parent"]
ROLES = {
    "b": "brokers",
    "c": "callers",
    "d": "callers",
    "f": "callers",
    "v": "workers",
    "w": "workers",
    "x": "brokers",
    "y": "brokers",
}
"""The role of a connection, by the first letter of its peer's name."""


class NextBroker:
    """Connects a peer to one of several brokers: each time that it connects, to the next one."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = deque(networks)

    def __call__(
        self,
        network: Network,
        owner: str,
        receive: Callable[[Any, Message], None],
        *,
        lost: Callable[[Any, str], None] | None = None,
    ) -> Dealer:
        del network
        dealer = Dealer(self._networks[0], owner, receive, lost=lost)
        self._networks.rotate(-1)
        return dealer


@dataclass(frozen=True)
class Settings:
    """What all brokers of a simulation have in common."""

    limits: Limits
    roles: Mapping[str, Permissions]
    brokers: Sequence[str]
    """The names of all brokers."""
    turn_work: int
    """How much a broker does in one turn of what can go on in the next."""


class LinkedBroker(BrokerShell):
    """A `Broker` with links to others: `links` has the kind of each and the network of the other broker.

    `name` is the one that it gives itself, if not that of its network.  Links to those in `wrong` need not be up.
    """

    def __init__(
        self,
        world: Stage,
        network: Network,
        settings: Settings,
        links: Sequence[tuple[Kind, Network]],
        name: str = "",
        wrong: Sequence[Network] = (),
    ) -> None:
        self.called = name or network.name
        machine = Broker(
            settings.limits, now=world.now, logger=silent, first_address=world.number() * 1_000_000, name=self.called,
            turn_work=settings.turn_work,
        )  # fmt: skip
        if settings.roles:
            machine.grant(settings.roles, world.now)
        self._settings = settings
        role = machine.roles.named("brokers") if settings.roles else None
        self._targets = {machine.add_link(kind, role, to.name): to for kind, to in links}
        self._wrong = wrong
        self._dealers: dict[bytes, Dealer] = {}
        """The connections that this broker has opened, by the identity of the link."""
        self._crossings: dict[bytes, Crossing] = {}
        """Its ends of all connections between brokers, by identity."""
        super().__init__(world, network, machine, machine)
        self.do(self.tick)

    def role_of(self, message: Message) -> Role | None:
        if not self._settings.roles:
            return None
        return self.machine.roles.named("brokers" if message[0] in self._targets else ROLES[message[0][:1].decode()])

    @property
    def well(self) -> bool:
        """Whether it serves, all its links are up, and nothing is under way."""
        links = [
            self.machine.federation.links.at(each)
            for each, target in self._targets.items()
            if target not in self._wrong
        ]
        return not (self.machine.draining or None in links or self.machine.registry.numbered)

    @property
    def given_up(self) -> list[bytes]:
        """The peers that it does not answer, since they did not read."""
        return [key for key in self.machine._clients._given_up._until if isinstance(key, bytes)]

    def reaches(self, services: Iterable[bytes]) -> bool:
        """Return whether it knows a worker of each of these, its own or another broker's."""
        directory = self.machine.directory
        known = {name for name, service in directory.services.items() if service.available} | directory.reachable.keys()
        return known.issuperset(services)

    def worker(self, route: Route) -> Worker | None:
        """Return the registered worker with that route."""
        return self.machine.directory.workers.get(key_of((*route, b"")))

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, message: Message, role: Role | None) -> None:
        crossing = self._crossing(message[0])
        if crossing is not None:
            crossing.received(message[1:])
        super()._receive(message, role)

    def _crossing(self, identity: bytes) -> Crossing | None:
        """Return this broker's end of the connection with that identity, if another broker is at the other end."""
        crossing = self._crossings.get(identity)
        if crossing is None and identity in self.network.routes:
            owner = self.network.routes[identity].owner
            if owner in self._settings.brokers:
                crossing = self._crossings[identity] = Crossing(self.called, owner, self.world.events)
        return crossing

    def _end_turn(self) -> None:
        super()._end_turn()
        check(not self.machine.stats.internal_errors, "{} has a bug, which it logs", self.name)
        self._check_cancelled()
        self._check_services()

    def handle(self, event: Event) -> None:
        if isinstance(event, CloseLink):
            self._close(event.identity)
        elif isinstance(event, OpenLink):
            self._open(event.identity)

    def _close(self, identity: bytes) -> None:
        dealer = self._dealers.pop(identity, None)
        if dealer is not None:
            self.world.note(f"{self.name} closes its link to {dealer.network.name}")
            self.world.events["link closed"] += 1
            dealer.close(flush=True)
            # What has not been read is lost with the socket.
            self._inbox = deque(each for each in self._inbox if each[0][0] != identity)

    def _open(self, identity: bytes) -> None:
        check(identity not in self._dealers, "{} opens a link twice", self.name)
        self.world.events["link opened"] += 1
        target = self._targets[identity]
        self._crossings[identity] = Crossing(self.called, target.name, self.world.events)
        self._dealers[identity] = Dealer(
            target, self.name, partial(self._link_arrived, identity), lost=partial(self._link_lost, identity)
        )
        self.machine.link_opened(identity, self.world.now)
        self._act()

    def _link_arrived(self, identity: bytes, dealer: Dealer, message: Message) -> None:
        if self.alive and self._dealers.get(identity) is dealer:
            self._arrived([identity, *message])

    def _link_lost(self, identity: bytes, dealer: Dealer, reason: str) -> None:
        self.do(partial(self._lose_link, identity, dealer, reason))

    def _lose_link(self, identity: bytes, dealer: Dealer, reason: str) -> None:
        if self._dealers.get(identity) is dealer:
            self.world.note(f"{self.name} loses its link to {dealer.network.name}: {reason}")
            del self._dealers[identity]
            self._gone.setdefault(identity, self.machine.turn)
            self._end_turn()

    def _put(self, message: Message) -> Literal["sent", "gone", "full"]:
        crossing = self._crossing(message[0])
        if crossing is not None:
            crossing.sent(message[1:])
        if message[0] not in self._targets:
            return super()._put(message)
        dealer = self._dealers.get(message[0])
        if dealer is None:
            return "gone"
        if dealer.link is not None and len(dealer.link.to_broker.flying) >= HIGH_WATER:
            return "full"
        dealer.send(message[1:])
        return "sent"

    def die(self) -> None:
        super().die()
        for dealer in self._dealers.values():
            dealer.close(silent=self.world.chance(0.3))

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_cancelled(self) -> None:
        """Check that requests at another broker that have ended here were cancelled, and those cancelled by another."""
        for identity, crossing in self._crossings.items():
            if self.machine.federation.links.at(identity) is None:
                crossing.forget()
            crossing.check_cancelled()
        for link in self.machine.federation.links.by_identity.values():
            crossing = self._crossings.get(link.identity)
            for address, attempt in link.attempts.items():
                if attempt.abandoned and crossing is not None and address in crossing.passed_on:
                    check(crossing.passed_on[address], "C44: {} does not cancel {}", self.name, attempt.request.body)

    def _check_services(self) -> None:
        """Check that there is one service of each name, and that it counts what other brokers may be given."""
        directory = self.machine.directory
        for name, service in {**directory.services, **directory.reachable}.items():
            check(directory.services.get(name, service) is service, "{}: there are two services {!r}", self.name, name)
            beyond = sum(remote.free for remote in service.remotes)
            check(service.beyond == beyond, "{}: wrong count of free credit for {!r}", self.name, name)

    def check_idle(self) -> None:
        """Check that no request is at another broker or came from one."""
        for link in self.machine.federation.links.by_identity.values():
            check(not link.attempts, "{}: {} are at {}", self.name, link.attempts, link.name)
            check(not link.client.numbered, "{}: {} came from {}", self.name, link.client.numbered, link.name)
            crossing = self._crossings.get(link.identity)
            if crossing is not None:
                check(not crossing.passed_on, "{}: {} are at {}", self.name, crossing.passed_on, link.name)
                check(not crossing.came, "{}: {} came from {}", self.name, crossing.came, link.name)

    @property
    def left(self) -> bool:
        """Whether any peer or request is left."""
        directory = self.machine.directory
        return bool(directory.services or directory.workers or directory.clients)

    def check_empty(self) -> None:
        """Check that nothing is left."""
        self.check_idle()
        machine, name = self.machine, self.name
        directory, registry = machine.directory, machine.registry
        check(directory.services == {} and directory.workers == {}, f"{name}: a service or worker is left")
        reachable = [service for service in directory.reachable if not service.startswith(b"mmi.broker.")]
        check(reachable == [], f"{name}: {reachable} can still be reached")
        check(directory.proxies == {}, f"{name}: a connection is left")
        check((registry.queued, registry.request_bytes, registry.running) == (0, 0, 0), f"{name}: a count is not 0")
        check(registry.numbered == [], f"{name}: a number is left")
        check(directory.clients == {}, f"{name}: a client is left")
        buckets = {**machine._workers.beats._buckets, **registry.expiries._buckets}
        check(buckets == {}, f"{name}: a timer's bucket is left")

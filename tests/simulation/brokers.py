"""Several brokers that are linked to one another, and peers that go from one to the next."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.broker.registry import Worker, key_of
from zmdp.mdp.limits import Limits
from zmdp.mdp.testing.network import HIGH_WATER, Dealer, Network
from zmdp.mdp.wire import Message, Route

from .actors import BrokerShell, Stage, silent
from .rules import check

Kind = Literal["peer", "parent"]


class Endpoints:
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


class LinkedBroker(BrokerShell):
    """A `Broker` with links to others: `links` has the kind of each and the network of the other broker."""

    def __init__(self, world: Stage, network: Network, limits: Limits, links: Sequence[tuple[Kind, Network]]) -> None:
        machine = Broker(
            limits, now=world.now, logger=silent, first_address=world.number() * 1_000_000, name=network.name
        )
        self._targets = {machine.add_link(kind, world.now): target for kind, target in links}
        self._dealers: dict[bytes, Dealer] = {}
        """The connections that this broker has opened, by the identity of the link."""
        super().__init__(world, network, machine, machine)
        self.do(self.tick)

    def role_of(self, message: Message) -> None:
        """There is no access control."""

    @property
    def well(self) -> bool:
        """Whether it serves, and nothing is under way."""
        return not self.machine.draining

    @property
    def given_up(self) -> list[bytes]:
        """The peers that it does not answer, since they did not read."""
        return [key for key in self.machine._given_up._until if isinstance(key, bytes)]

    def worker(self, route: Route) -> Worker | None:
        """Return the registered worker with that route."""
        return self.machine.registry.workers.get(key_of((*route, b"")))

    def check_empty(self) -> None:
        """Check that nothing is left."""
        machine, name = self.machine, self.name
        registry = machine.registry
        check(registry.services == {} and registry.workers == {}, f"{name}: a service or worker is left")
        check(registry.proxies == {}, f"{name}: a connection is left")
        check((registry.queued, registry.request_bytes, registry.running) == (0, 0, 0), f"{name}: a count is not 0")
        check(registry.numbered == [], f"{name}: a number is left")
        check(registry.clients == {}, f"{name}: a client is left")
        buckets = {**machine._beats._buckets, **registry.expiries._buckets}
        check(buckets == {}, f"{name}: a timer's bucket is left")

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_turn(self) -> None:
        super()._end_turn()
        now = self.world.now
        for identity in self.machine.links_to_close():
            self.world.note(f"{self.name} closes {identity.decode()}")
            self._dealers.pop(identity).close(flush=True)
        for identity in self.machine.links_due(now):
            assert identity not in self._dealers
            self.world.events["link opened"] += 1
            self._dealers[identity] = Dealer(
                self._targets[identity],
                self.name,
                partial(self._link_arrived, identity),
                lost=partial(self._link_lost, identity),
            )
            self._send(self.machine.link_opened(identity, now))

    def _link_arrived(self, identity: bytes, dealer: Dealer, message: Message) -> None:
        if self.alive and self._dealers.get(identity) is dealer:
            self._arrived([identity, *message])

    def _link_lost(self, identity: bytes, dealer: Dealer, reason: str) -> None:
        self.do(partial(self._lose_link, identity, dealer, reason))

    def _lose_link(self, identity: bytes, dealer: Dealer, reason: str) -> None:
        if self._dealers.get(identity) is dealer:
            self.world.note(f"{self.name} loses {identity.decode()}: {reason}")
            del self._dealers[identity]
            self._gone.setdefault(identity, self.machine.turn)
            self._end_turn()

    def _put(self, message: Message) -> Literal["sent", "gone", "full"]:
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

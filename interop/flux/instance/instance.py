"""The state of a gateway: its place in the tree, its programs, and the services that were found."""

import os
import time
from typing import Final
from uuid import uuid4

from ..wire.messages import NODEID_ANY
from .attributes import attributes
from .departures import Departures
from .pubsub import Subscribers
from .topology import Topology

ANYWHERE: Final = (None,)
MAX_SERVICES: Final = 1000
"""Services that all programs of a gateway may offer."""
MAX_FOUND: Final = 10_000
"""Maximum number of topics whose service is remembered."""


class Instance:
    """The state that the machines of all connections use; they change only `programs` and `found`.

    Args:
        departures: Reports clients that have left.
        uri: Where Flux programs find this gateway.
        max_services: How many services the programs may offer.
    """

    def __init__(self, departures: Departures, uri: str = "", max_services: int = MAX_SERVICES) -> None:
        self.uuid = str(uuid4())
        self.owner = os.getuid()
        """The user to whom the gateway belongs."""
        self.topology = Topology()
        self.broker = ""
        """The name of the broker to which the gateway is connected."""
        self.subscribers = Subscribers()
        self.departures = departures
        self.max_services = max_services
        self.programs: set[str] = set()
        """The services that Flux programs offer here."""
        self.found = Found()
        self._uri = uri
        self._started = time.time()
        self._attributes: dict[int, dict[str, tuple[str, int]]] = {}

    @property
    def rank(self) -> int:
        """The rank of the gateway's broker."""
        return self.topology.rank(self.broker)

    def rank_of(self, broker: str | None) -> int:
        """Return the rank of one of `brokers`."""
        return self.rank if broker is None else self.topology.rank(broker)

    def brokers(self, nodeid: int, *, upstream: bool) -> tuple[str | None, ...]:
        """Return the brokers at which to try a request, in this order; none if its rank cannot be reached.

        None stands for wherever the broker finds the service.
        """
        topology = self.topology
        if nodeid == NODEID_ANY:
            return ANYWHERE
        if upstream:
            if nodeid != self.rank:
                return ANYWHERE  # for Flux: anywhere but at that rank
            return tuple(broker for rank in topology.ancestors(nodeid) if (broker := topology.broker(rank)) is not None)
        broker = topology.broker(nodeid)
        if broker is None:
            return ()
        return ANYWHERE if topology.size == 1 else (broker,)

    def changed(self) -> None:
        """Forget what was derived from the previous tree of brokers."""
        self._attributes.clear()
        self.found.clear()

    def attributes(self, rank: int) -> dict[str, tuple[str, int]]:
        """Return value and flags of each attribute of a rank."""
        found = self._attributes.get(rank)
        if found is None:
            uuid = self.uuid if rank == self.rank else ""
            found = self._attributes[rank] = attributes(
                self.topology, rank, uri=self._uri, uuid=uuid, started=self._started
            )
        return found


class Found:
    """Remembers the topics whose service has the name of their first word.

    For others, a service with the name of the whole topic is looked for first.
    """

    def __init__(self) -> None:
        self._first_word: dict[str, None] = {}

    def services(self, topic: str) -> list[str]:
        """Return the services that may serve `topic`, in the order in which to try them."""
        word = topic.partition(".")[0]
        if word == topic:
            return [topic]
        return [word, topic] if topic in self._first_word else [topic, word]

    def served(self, topic: str, service: str) -> None:
        """Take in that `service` has answered a request for `topic`."""
        if service == topic:
            self._first_word.pop(topic, None)
        elif topic not in self._first_word:
            if len(self._first_word) >= MAX_FOUND:
                self._first_word.clear()
            self._first_word[topic] = None

    def missed(self, topic: str) -> None:
        """Take in that there is no service of the first word."""
        self._first_word.pop(topic, None)

    def clear(self) -> None:
        """Forget everything."""
        self._first_word.clear()

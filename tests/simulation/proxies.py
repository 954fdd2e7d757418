"""A ROUTER–DEALER proxy, through which peers reach the broker over one connection (C36)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Protocol

from zmdp.mdp.wire import Message, Route
from zmdp.testing.network import Dealer, Network

if TYPE_CHECKING:
    from .actors import Stage


class Socket(Protocol):
    """A peer's socket: a `Dealer`, or a socket connected to a proxy."""

    @property
    def path(self) -> Route:
        """The route by which the broker knows its owner; empty while there is no connection."""

    @property
    def whole(self) -> bool:
        """Return whether its connection is intact."""

    def send(self, message: Message) -> None: ...

    def close(self, *, flush: bool = False, silent: bool = False) -> None: ...


class Proxy:
    """Forwards messages with the sender's routing id in front.  It knows no protocol, and never ends."""

    def __init__(self, world: Stage, name: str) -> None:
        self.peers: dict[bytes, Proxied] = {}
        self.dealer = Dealer(world.network, name, self._arrived)
        self._world = world
        self._count = count(1)

    def connect(
        self,
        network: Network,
        owner: str,
        receive: Callable[[Proxied, Message], None],
        *,
        lost: object = None,
    ) -> Proxied:
        """Return a socket connected to this proxy, whose owner does not notice what happens behind the proxy."""
        del network, lost
        name = f"{owner}~{next(self._count)}".encode()
        peer = self.peers[name] = Proxied(self, name, receive)
        self._world.events["connected through a proxy"] += 1
        return peer

    def _arrived(self, _: Dealer, message: Message) -> None:
        peer = self.peers.get(message[0])
        if peer is not None:
            peer.receive(peer, message[1:])


class Proxied:
    """A socket that is connected to a proxy."""

    def __init__(self, proxy: Proxy, name: bytes, receive: Callable[[Proxied, Message], None]) -> None:
        self.receive = receive
        self._proxy = proxy
        self._name = name

    @property
    def path(self) -> Route:
        link = self._proxy.dealer.link
        return () if link is None else (link.identity, self._name)

    @property
    def whole(self) -> bool:
        return self._proxy.dealer.link is not None and self._proxy.dealer.link.whole

    def send(self, message: Message) -> None:
        self._proxy.dealer.send([self._name, *message])

    def close(self, *, flush: bool = False, silent: bool = False) -> None:
        del flush, silent
        self._proxy.peers.pop(self._name, None)

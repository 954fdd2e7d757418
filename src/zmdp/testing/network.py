"""A fake clock and a fake network that behave like ZeroMQ's DEALER and ROUTER, including TCP's failures.

Whole systems of brokers, clients and workers (the machines, or your own) run on it without sockets and without waiting,
while connections break, stall and fail silently.  One `random.Random` makes all decisions, and one heap holds all
events, so a run can be repeated from its seed, message by message.

    world = World(seed=1)
    broker = Broker(now=world.now)

    def listen(message):                              # as `Server` does, for a broker
        broker.receive(message, world.now)
        for each in broker.take_messages():
            world.network.send(each)                  # "sent", "gone" or "full"

    world.network.listener = listen
    dealer = Dealer(world.network, "c1", lambda dealer, message: print(message))
    dealer.send([b"MDPC02", b"\\x01", b"mmi.service", b"echo"])
    world.clock.run(1.0)

A DEALER connects by itself, once or repeatedly; each connection (`NetworkLink`) has its own identity at the ROUTER.
Messages keep their order within each direction of a link (`Pipe`).  Each takes a random time, so peers overtake one
another.

A `Network` is what one broker's ROUTER sees.  `World` has one; with several brokers, each has its own:
`Network(world, "b1")`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Final, Literal

from ..mdp import wire
from ..mdp.wire import Message, Route, x1
from ..mdp.wire.commands import KINDS
from ..mdp.wire.names import show

HIGH_WATER: Final = 20
"""Maximum number of messages in flight to one peer; the ROUTER reports any more as EAGAIN."""
MOST_AT_ONCE: Final = 10_000
"""Maximum number of events at the same time; more are considered an endless loop."""
RECONNECT_DELAY: Final = 0.1
"""Seconds until a DEALER tries to connect again."""
LONGEST_NOTICE: Final = 20.0
"""Maximum time until an end notices that its connection is gone, in seconds."""
LONGEST_SILENCE: Final = 60.0
"""Maximum time until an end notices that its connection has failed silently, in seconds."""
_CLIENT: Final = {
    x1.CLIENT_REQUEST: "REQUEST", x1.CLIENT_PARTIAL: "PARTIAL", x1.CLIENT_FINAL: "FINAL", x1.CLIENT_ERROR: "ERROR",
    x1.CLIENT_CANCEL: "CANCEL", x1.CLIENT_DISCONNECT: "DISCONNECT",
}  # fmt: skip
_WORKER: Final = {
    x1.WORKER_READY: "READY", x1.WORKER_REQUEST: "REQUEST", x1.WORKER_PARTIAL: "PARTIAL", x1.WORKER_FINAL: "FINAL",
    x1.WORKER_DISCONNECT: "DISCONNECT", x1.WORKER_ERROR: "ERROR", x1.WORKER_CANCEL: "CANCEL",
    x1.WORKER_CREDIT: "CREDIT", x1.WORKER_RELEASE: "RELEASE",
}  # fmt: skip
_RECORDS: Final = {wire.CX1: _CLIENT, wire.CL1: _CLIENT, wire.WX1: _WORKER, wire.WL1: _WORKER}
"""The commands of records, by header."""
START: Final = 1000.0
"""The clock's first reading.  Not 0, so that tests catch a machine that uses 0 as the current time."""


class TimeStandsStill(Exception):
    """Too many events happen at one time: something is due again as soon as it was done."""


class Clock:
    """The time, and the events that are scheduled."""

    def __init__(self) -> None:
        self.now = START
        """The time in seconds."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule `call` for the time `when`, or for now if that has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule `call` to run after `seconds`."""
        self.at(self.now + seconds, call)

    def run(self, seconds: float) -> None:
        """Advance the time by `seconds`, running the calls that are due.

        Raises `TimeStandsStill`, and whatever the calls raise.
        """
        end = self.now + seconds
        at_once = 0
        while self._events and self._events[0][0] <= end:
            when, _, call = heapq.heappop(self._events)
            at_once = at_once + 1 if when == self.now else 0
            if at_once >= MOST_AT_ONCE:
                raise TimeStandsStill(f"a deadline does not go away: time stands still at {self.now - START:.3f} s")
            self.now = when
            call()
        self.now = end


class Alarm:
    """Call `ring` at the time that was set last."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._due: float | None = None
        self._event: float | None = None

    def set(self, due: float | None) -> None:
        """Ring at the time `due`, instead of the one set before; None for never."""
        self._due = due
        if due is not None and (self._event is None or due < self._event):
            self._event = due
            self._clock.at(due, partial(self._fire, due))

    def _fire(self, event: float) -> None:
        if event != self._event:
            return  # an earlier event was set since, and replaces this one
        self._event = None
        if self._due is not None and self._due <= self._clock.now:
            self._due = None
            self._ring()
        else:
            self.set(self._due)


class World:
    """What everything in one run shares: the clock, the random numbers, the network, and the trace.

    `trace`, if given, is called with each line of the trace.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)  # noqa: S311 - repeatable, not for cryptography
        self.network = Network(self)
        self.events: Counter[str] = Counter()
        """Counts of noteworthy events."""
        self._numbers = count(1)
        self._trace = trace

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self.clock.now

    def number(self) -> int:
        """Return a number that is unique in this world."""
        return next(self._numbers)

    def chance(self, probability: float) -> bool:
        """Return True with that probability."""
        return self.rng.random() < probability

    def note(self, text: str, message: Message | None = None) -> None:
        """Write a line to the trace: `text`, and `message` if there is one."""
        if self._trace is not None:
            told = text if message is None else f"{text}  {describe(message)}"
            self._trace(f"{self.now - START:9.3f}  {told}")


class Pipe:
    """One direction of a link: delays each message by a random time, keeps their order, and can be cut."""

    def __init__(self, network: Network, arrow: str, deliver: Callable[[Message], None]) -> None:
        self.flying: deque[Message] = deque()
        """The messages in flight."""
        self.last_arrival = 0.0
        """When the last of them arrives."""
        self.stalled_until = 0.0
        """Nothing arrives before this time."""
        self._network = network
        self._arrow = arrow
        self._deliver = deliver
        self._open = True

    def send(self, message: Message) -> None:
        """Send `message`; it is lost if the pipe was cut."""
        if not self._open:
            return  # the other end is gone, but this end has not noticed yet
        clock = self._network.world.clock
        self.last_arrival = max(self.last_arrival, clock.now + self._network.latency(), self.stalled_until)
        self.flying.append(message)
        clock.at(self.last_arrival, self._arrive)

    def _arrive(self) -> None:
        world = self._network.world
        if not self.flying:
            return  # it was cut
        if world.now < self.stalled_until:
            world.clock.at(self.stalled_until, self._arrive)
            return
        message = self.flying.popleft()
        world.note(self._arrow, message)
        self._deliver(message)

    def cut(self, kept: int = 0) -> None:
        """Cut the pipe: the first `kept` messages in flight still arrive, and nothing else."""
        self._open = False
        while len(self.flying) > kept:
            self._network.world.note(f"{self._arrow} LOST", self.flying.pop())


class NetworkLink:
    """One connection between a DEALER and the broker's ROUTER."""

    def __init__(self, network: Network, dealer: Dealer, identity: bytes) -> None:
        self.identity = identity
        """The identity frame by which the ROUTER knows the peer."""
        self.overflowed = False
        """Whether the peer has not read, and so the ROUTER could not send to it."""
        self._network = network
        self._dealer = dealer
        name = identity.decode()
        self.to_broker = Pipe(network, f"{name} → {network.name}", self._arrived_at_broker)
        self.to_peer = Pipe(network, f"{network.name} → {name}", dealer.deliver)

    @property
    def owner(self) -> str:
        """The owner of the DEALER."""
        return self._dealer.owner

    @property
    def whole(self) -> bool:
        """Whether this connection is intact."""
        return self._network.links.get(self.identity) is self

    def _arrived_at_broker(self, message: Message) -> None:
        if self._network.listener is not None:
            self._network.listener([self.identity, *message])

    def fail(self, *, silently: bool = False) -> None:
        """Break the connection: some messages in flight are lost, and each end notices in its own time.

        `silently` is like a host that vanishes: either end takes far longer to notice.
        """
        rng, clock = self._network.world.rng, self._network.world.clock
        for pipe in (self.to_broker, self.to_peer):
            pipe.cut(rng.randint(0, len(pipe.flying)))
        self._network.links.pop(self.identity, None)
        notice = self._network.late_notice if silently else self._network.notice
        clock.after(notice(), partial(self._dealer.disconnected, self))
        clock.after(notice(), self._unroute)

    def close(self, *, flush: bool, silent: bool) -> None:
        """Close the DEALER's end.  `flush`: what it sent still arrives.  `silent`: its whole host is gone."""
        rng, clock = self._network.world.rng, self._network.world.clock
        self.to_broker.cut(len(self.to_broker.flying) if flush else rng.randint(0, len(self.to_broker.flying)))
        self.to_peer.cut()
        self._network.links.pop(self.identity, None)
        noticed = max(self.to_broker.last_arrival, self.to_broker.stalled_until, clock.now + self._network.latency())
        clock.at(noticed + (self._network.notice() if silent else 0.0), self._unroute)

    def _unroute(self) -> None:
        self._network.routes.pop(self.identity, None)
        if self._network.departed is not None:
            self._network.departed(self.identity)

    def broker_died(self) -> None:
        """Close the broker's end, since its process is gone."""
        self.to_broker.cut()
        self.to_peer.cut(self._network.world.rng.randint(0, len(self.to_peer.flying)))
        self._network.world.clock.after(self._network.notice(), partial(self._dealer.disconnected, self))


class Dealer:
    """A peer's socket.  Messages sent before it is connected wait for the connection.

    `owner` is the prefix of its identities, and `receive` is called with this and each message.  It reconnects forever,
    as ZeroMQ does, unless `lost` is given: then it connects once, and `lost` is called with this and the reason if that
    fails, or when it notices that the connection is gone.
    """

    def __init__(
        self,
        network: Network,
        owner: str,
        receive: Callable[[Dealer, Message], None],
        *,
        lost: Callable[[Dealer, str], None] | None = None,
    ) -> None:
        self.link: NetworkLink | None = None
        """The connection, or None."""
        self.owner = owner
        self.network = network
        """The network of the broker that it connects to."""
        self._receive = receive
        self._lost = lost
        self._closed = False
        self._unsent: deque[Message] = deque()
        network.world.clock.after(network.latency(), self._connect)

    def _connect(self) -> None:
        if self._closed:
            return
        self.link = self.network.connect(self)
        if self.link is None:
            self._failed("nothing is listening there")
            return
        while self._unsent:
            self.link.to_broker.send(self._unsent.popleft())

    def _failed(self, reason: str) -> None:
        if self._lost is not None:
            self._lost(self, reason)
        else:
            self.network.world.clock.after(RECONNECT_DELAY, self._connect)

    def disconnected(self, link: NetworkLink) -> None:
        """Report that this end has noticed that `link` is gone."""
        if self.link is link and not self._closed:
            self.network.world.events["connection lost"] += 1
            link.to_peer.cut()  # what has not arrived by now never does
            self.link = None
            self._failed("the connection broke")

    @property
    def path(self) -> Route:
        """The path by which the broker knows this peer; empty while there is no connection."""
        return () if self.link is None else (self.link.identity,)

    @property
    def whole(self) -> bool:
        """Whether there is an intact connection."""
        return self.link is not None and self.link.whole

    def send(self, message: Message) -> None:
        """Send `message` now, or when there is a connection."""
        if self.link is None:
            self._unsent.append(message)
        else:
            self.link.to_broker.send(message)

    def deliver(self, message: Message) -> None:
        """Deliver a message of the broker, unless this was closed in the meantime."""
        if not self._closed:
            self._receive(self, message)

    def close(self, *, flush: bool = False, silent: bool = False) -> None:
        """Close the socket.  `flush`: what was sent still arrives.  `silent`: the broker notices later, if at all."""
        self._closed = True
        if self.link is not None:
            self.link.close(flush=flush, silent=silent)


class Network:
    """All links to one broker, and the ROUTER's side of them.  `name` is the broker's, in the trace."""

    def __init__(self, world: World, name: str = "broker") -> None:
        self.world = world
        self.name = name
        self.listener: Callable[[Message], None] | None = None
        """Receives each message to the broker, with the identity first; None while no broker runs."""
        self.departed: Callable[[bytes], None] | None = None
        """Called with the identity of each peer that the ROUTER finds disconnected."""
        self.links: dict[bytes, NetworkLink] = {}
        """The intact connections, by identity."""
        self.routes: dict[bytes, NetworkLink] = {}
        """The connections that the ROUTER believes to be intact, by identity."""
        self.cut_off: set[str] = set()
        """Owners of DEALERs that cannot connect at present, as during a network partition."""
        self.slowness = 0.0
        """Maximum time that a message takes, in seconds; most take far less."""
        self._count = count(1)

    def latency(self) -> float:
        """Return how long the next message takes, in seconds."""
        return self.slowness * self.world.rng.random() ** 4 + 0.0001

    def notice(self) -> float:
        """Return after how many seconds an end notices that its connection is gone; mostly soon."""
        return float(LONGEST_NOTICE * self.world.rng.random() ** 6)

    def late_notice(self) -> float:
        """Return after how many seconds an end notices that its connection failed silently."""
        return self.world.rng.uniform(LONGEST_NOTICE, LONGEST_SILENCE)

    def connect(self, dealer: Dealer) -> NetworkLink | None:
        """Return a new connection for `dealer`, or None if nothing is listening."""
        if self.listener is None or dealer.owner in self.cut_off:
            return None
        identity = f"{dealer.owner}#{next(self._count)}".encode()
        link = self.links[identity] = self.routes[identity] = NetworkLink(self, dealer, identity)
        return link

    def send(self, message: Message) -> Literal["sent", "gone", "full"]:
        """Send `message` as the ROUTER would; return "sent", "gone" (EHOSTUNREACH), or "full" (EAGAIN)."""
        link = self.routes.get(message[0])
        if link is None:
            self.world.note(f"{self.name} → {message[0].decode(errors='replace')} UNREACHABLE", message[1:])
            return "gone"
        if len(link.to_peer.flying) >= HIGH_WATER:
            self.world.note(f"{self.name} → {message[0].decode()} SLOW READER", message[1:])
            link.overflowed = True
            return "full"
        link.to_peer.send(message[1:])
        return "sent"

    def broker_died(self) -> None:
        """Close all connections, since the broker's process is gone.  Set `listener` for another broker."""
        self.listener = None
        self.routes.clear()
        links, self.links = self.links, {}
        for link in links.values():
            link.broker_died()


def describe(message: Message) -> str:
    """Return a readable form of `message`, which has no identity frame."""
    frames = [show(frame) if frame else '""' for frame in message]
    at = wire.header_at(message, 0)
    if 0 <= at < len(message) - 1:
        header, code = message[at], message[at + 1]
        if code == wire.BATCH and header in _RECORDS and at + 2 < len(message):
            frames[at + 1 : at + 3] = ["batch", f"[{', '.join(_records(message[at + 2], _RECORDS[header]))}]"]
        elif header in KINDS and code in KINDS[header]:
            frames[at + 1] = KINDS[header][code].value
    return " ".join(frames)


def _records(data: bytes, names: Mapping[int, str]) -> Iterator[str]:
    """Yield the commands and ids of a batch."""
    at = 0
    while at + x1.HEAD.size <= len(data):
        size, command, number = x1.HEAD.unpack_from(data, at)
        yield f"{names.get(command, command)} {number}"
        at += x1.SIZE_BYTES + size
    if at != len(data):
        yield "…"

"""A fake clock and a fake network: what the machines can tell of ZeroMQ's DEALER and ROUTER, and of TCP's failures.

All is decided by one `random.Random`, and all that happens is an event in one heap, so a run can be repeated.

A DEALER connects by itself, again and again; each connection (`Link`) has an identity of its own at the ROUTER.  Within
each direction of a link (`Pipe`) messages keep their order; each takes a random time, so peers overtake one another.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from zmdp.mdp import wire
from zmdp.mdp.journal import show
from zmdp.mdp.wire import Message

from .rules import check

HIGH_WATER = 20
"""Messages on the way to one peer past which the broker drops it as a slow reader."""
MOST_AT_ONCE = 10_000
"""Events at the same moment past which something goes round in a circle."""
RECONNECT = 0.1
"""Seconds until a DEALER tries again to connect."""
START = 1000.0
"""The clock's first reading.  Not 0: a machine that takes 0 for "now" is to be found out."""


class Clock:
    """The time, and what happens at which."""

    def __init__(self) -> None:
        self.now = START
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        at_once = 0
        while self._events and self._events[0][0] <= end:
            when, _, call = heapq.heappop(self._events)
            at_once = at_once + 1 if when == self.now else 0
            check(at_once < MOST_AT_ONCE, "a deadline does not go away: time stands still")
            self.now = when
            call()
        self.now = end


class Alarm:
    """Calls `ring` at the time that was set last."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._due: float | None = None
        self._event: float | None = None

    def set(self, due: float | None) -> None:
        self._due = due
        if due is not None and (self._event is None or due < self._event):
            self._event = due
            self._clock.at(due, partial(self._fire, due))

    def _fire(self, event: float) -> None:
        if event != self._event:
            return  # an earlier event was set since, and has taken this one's place
        self._event = None
        if self._due is not None and self._due <= self._clock.now:
            self._due = None
            self._ring()
        else:
            self.set(self._due)


class World:
    """What all that takes part in one simulation shares."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)
        self.network = Network(self)
        self.events: Counter[str] = Counter()
        """How often what is worth counting has happened."""
        self.calm = False
        """No more faults: what runs is to recover."""
        self._numbers = count(1)
        self._trace = trace

    @property
    def now(self) -> float:
        return self.clock.now

    def number(self) -> int:
        """A number that nothing else in this world has."""
        return next(self._numbers)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def note(self, text: str, message: Message | None = None) -> None:
        """A line of the trace."""
        if self._trace is not None:
            told = text if message is None else f"{text}  {describe(message)}"
            self._trace(f"{self.now - START:9.3f}  {told}")


class Pipe:
    """One direction of a link: in order, each message late by a random time, lost from some point on if cut."""

    def __init__(self, network: "Network", arrow: str, deliver: Callable[[Message], None]) -> None:
        self._network = network
        self._arrow = arrow
        self._deliver = deliver
        self._open = True
        self.flying: deque[Message] = deque()
        self.last_arrival = 0.0
        self.stalled_until = 0.0

    def send(self, message: Message) -> None:
        if not self._open:
            return  # the other end is gone, which this end has not noticed yet
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
        """The first `kept` messages on the way still arrive; nothing else ever does."""
        self._open = False
        while len(self.flying) > kept:
            self._network.world.note(f"{self._arrow} LOST", self.flying.pop())


class Link:
    """One connection between a DEALER and the broker's ROUTER."""

    def __init__(self, network: "Network", dealer: "Dealer", identity: bytes) -> None:
        self.identity = identity
        self._network = network
        self._dealer = dealer
        name = identity.decode()
        self.to_broker = Pipe(network, f"{name} → broker", self._arrived_at_broker)
        self.to_peer = Pipe(network, f"broker → {name}", dealer.deliver)

    def _arrived_at_broker(self, message: Message) -> None:
        if self._network.listener is not None:
            self._network.listener([self.identity, *message])

    def fail(self) -> None:
        """The connection breaks: some of what is on the way is lost, and each end notices in its own time."""
        rng, clock = self._network.world.rng, self._network.world.clock
        for pipe in (self.to_broker, self.to_peer):
            pipe.cut(rng.randint(0, len(pipe.flying)))
        self._network.links.pop(self.identity, None)
        clock.after(self._network.notice(), partial(self._dealer.disconnected, self))
        clock.after(self._network.notice(), self._unroute)

    def close(self, *, flush: bool, silent: bool) -> None:
        """The DEALER is closed.  `flush`: what it sent arrives all the same.  `silent`: its whole machine is gone."""
        rng, clock = self._network.world.rng, self._network.world.clock
        self.to_broker.cut(len(self.to_broker.flying) if flush else rng.randint(0, len(self.to_broker.flying)))
        self.to_peer.cut()
        self._network.links.pop(self.identity, None)
        noticed = max(self.to_broker.last_arrival, self.to_broker.stalled_until, clock.now + self._network.latency())
        clock.at(noticed + (self._network.notice() if silent else 0.0), self._unroute)

    def _unroute(self) -> None:
        self._network.routes.pop(self.identity, None)

    def broker_died(self) -> None:
        self.to_broker.cut()
        self.to_peer.cut(self._network.world.rng.randint(0, len(self.to_peer.flying)))
        self._network.world.clock.after(self._network.notice(), partial(self._dealer.disconnected, self))


class Dealer:
    """A peer's socket.  What is sent before there is a connection waits for it."""

    def __init__(self, network: "Network", owner: str, receive: Callable[["Dealer", Message], None]) -> None:
        self.link: Link | None = None
        self.owner = owner
        self._network = network
        self._receive = receive
        self._closed = False
        self._unsent: deque[Message] = deque()
        network.world.clock.after(network.latency(), self._connect)

    def _connect(self) -> None:
        if self._closed:
            return
        self.link = self._network.connect(self)
        if self.link is None:
            self._network.world.clock.after(RECONNECT, self._connect)
            return
        while self._unsent:
            self.link.to_broker.send(self._unsent.popleft())

    def disconnected(self, link: Link) -> None:
        if self.link is link and not self._closed:
            self._network.world.events["connection lost and made again"] += 1
            self.link = None
            self._network.world.clock.after(RECONNECT, self._connect)

    def send(self, message: Message) -> None:
        if self.link is None:
            self._unsent.append(message)
        else:
            self.link.to_broker.send(message)

    def deliver(self, message: Message) -> None:
        if not self._closed:
            self._receive(self, message)

    def close(self, *, flush: bool = False, silent: bool = False) -> None:
        self._closed = True
        if self.link is not None:
            self.link.close(flush=flush, silent=silent)


class Network:
    """All links, and the ROUTER's side of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listener: Callable[[Message], None] | None = None
        """Takes what arrives at the broker; None while no broker runs."""
        self.links: dict[bytes, Link] = {}
        self.routes: dict[bytes, Link] = {}
        """The peers to which the ROUTER believes to be connected."""
        self.slowness = 0.0
        """Seconds that a message takes at most; most take far less."""
        self._count = count(1)

    def latency(self) -> float:
        return self.slowness * self.world.rng.random() ** 4 + 0.0001

    def notice(self) -> float:
        """Seconds until an end notices that its connection is gone: most often soon."""
        return float(20.0 * self.world.rng.random() ** 6)

    def connect(self, dealer: Dealer) -> Link | None:
        if self.listener is None:
            return None
        identity = f"{dealer.owner}#{next(self._count)}".encode()
        link = self.links[identity] = self.routes[identity] = Link(self, dealer, identity)
        return link

    def send(self, message: Message) -> str:
        """What the ROUTER says when `message` is sent: "sent", "gone" (EHOSTUNREACH), or "full"."""
        link = self.routes.get(message[0])
        if link is None:
            self.world.note(f"broker → {message[0].decode(errors='replace')} UNREACHABLE", message[1:])
            return "gone"
        if len(link.to_peer.flying) >= HIGH_WATER:
            self.world.note(f"broker → {message[0].decode()} SLOW READER", message[1:])
            return "full"
        link.to_peer.send(message[1:])
        return "sent"

    def broker_died(self) -> None:
        self.listener = None
        self.routes.clear()
        links, self.links = self.links, {}
        for link in links.values():
            link.broker_died()


def describe(message: Message) -> str:
    """`message`, without its identity frame, for a reader."""
    frames = [show(frame) if frame else '""' for frame in message]
    for at, frame in enumerate(message[: wire.MAX_ENVELOPE + 1]):
        codes = wire.CODES.get(frame)
        if codes is not None and at + 1 < len(message):
            names = {code: kind.value for kind, code in codes.items()}
            frames[at + 1] = names.get(message[at + 1], frames[at + 1])
            break
    return " ".join(frames)

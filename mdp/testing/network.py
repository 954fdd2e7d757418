"""A fake clock and a fake network: what the machines can tell of ZeroMQ's DEALER and ROUTER, and of TCP's failures.

Whole systems run on it without a socket and without waiting: brokers, clients and workers (the machines, or your own),
while connections break, stall and fail silently.  All is decided by one `random.Random`, and all that happens is an
event in one heap, so a run can be repeated by its seed, message by message.

    world = World(seed=1)
    broker = Broker(now=world.now)

    def listen(message):                              # as `Server` does, for a broker
        for each in broker.receive(message, world.now):
            world.network.send(each)                  # "sent", "gone" or "full"

    world.network.listener = listen
    dealer = Dealer(world.network, "c1", lambda dealer, message: print(message))
    dealer.send([b"MDPC02", b"\\x01", b"mmi.service", b"echo"])
    world.clock.run(1.0)

A DEALER connects by itself, again and again, or once; each connection (`Link`) has an identity of its own at the
ROUTER.  Within each direction of a link (`Pipe`) messages keep their order; each takes a random time, so peers overtake
one another.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from struct import Struct
from typing import Final, Literal

from .. import wire
from ..wire import Message, Route
from ..wire.names import show

HIGH_WATER: Final = 20
"""Messages on the way to one peer past which the ROUTER finds it does not keep up."""
MOST_AT_ONCE: Final = 10_000
"""Events at the same moment past which something goes round in a circle."""
RECONNECT: Final = 0.1
"""Seconds until a DEALER tries again to connect."""
LONGEST_NOTICE: Final = 20.0
"""Seconds until an end has noticed that its connection is gone."""
LONGEST_SILENCE: Final = 60.0
"""Seconds until an end has noticed that its connection is gone, if that happened silently."""
_HEAD: Final = Struct(">IBQ")
"""What a record of a batch begins with: its size (of what follows the size), its command and its id."""
_SIZE: Final = 4
"""Bytes of the size."""
START: Final = 1000.0
"""The clock's first reading.  Not 0: a machine that takes 0 for "now" is to be found out."""


class TimeStandsStill(Exception):
    """So much happens at one moment that it will not end: something is due again as soon as it was done."""


class Clock:
    """The time, and what happens at which."""

    def __init__(self) -> None:
        self.now = START
        """The time in seconds."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have `call` called at the time `when`, or now if that has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called in so many seconds."""
        self.at(self.now + seconds, call)

    def run(self, seconds: float) -> None:
        """Let so many seconds pass.

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
    """Calls `ring` at the time that was set last."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._due: float | None = None
        self._event: float | None = None

    def set(self, due: float | None) -> None:
        """Ring at the time `due`, not at the one set before; None for never."""
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
    """What all that takes part in one run shares: the clock, the dice, the network, and a trace if one is wanted.

    `trace` is called with each line of what happens.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)  # noqa: S311 - a game to be repeated, not cryptography
        self.network = Network(self)
        self.events: Counter[str] = Counter()
        """How often what is worth counting has happened."""
        self._numbers = count(1)
        self._trace = trace

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self.clock.now

    def number(self) -> int:
        """A number that nothing else in this world has."""
        return next(self._numbers)

    def chance(self, probability: float) -> bool:
        """Throw the dice: True with that probability."""
        return self.rng.random() < probability

    def note(self, text: str, message: Message | None = None) -> None:
        """A line of the trace: `text`, and `message` if there is one."""
        if self._trace is not None:
            told = text if message is None else f"{text}  {describe(message)}"
            self._trace(f"{self.now - START:9.3f}  {told}")


class Pipe:
    """One direction of a link: in order, each message late by a random time, lost from some point on if cut."""

    def __init__(self, network: Network, arrow: str, deliver: Callable[[Message], None]) -> None:
        self.flying: deque[Message] = deque()
        """The messages on the way."""
        self.last_arrival = 0.0
        """When the last of them arrives."""
        self.stalled_until = 0.0
        """Nothing arrives before this time."""
        self._network = network
        self._arrow = arrow
        self._deliver = deliver
        self._open = True

    def send(self, message: Message) -> None:
        """Put `message` on the way; it is lost if the pipe was cut."""
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

    def __init__(self, network: Network, dealer: Dealer, identity: bytes) -> None:
        self.identity = identity
        """The identity frame by which the ROUTER knows the peer."""
        self._network = network
        self._dealer = dealer
        name = identity.decode()
        self.to_broker = Pipe(network, f"{name} → broker", self._arrived_at_broker)
        self.to_peer = Pipe(network, f"broker → {name}", dealer.deliver)

    @property
    def whole(self) -> bool:
        """Whether nothing has happened to this connection."""
        return self._network.links.get(self.identity) is self

    def _arrived_at_broker(self, message: Message) -> None:
        if self._network.listener is not None:
            self._network.listener([self.identity, *message])

    def fail(self, *, silently: bool = False) -> None:
        """The connection breaks: some of what is on the way is lost, and each end notices in its own time.

        `silently`: as when a host vanishes without a word; it takes far longer until anybody notices.
        """
        rng, clock = self._network.world.rng, self._network.world.clock
        for pipe in (self.to_broker, self.to_peer):
            pipe.cut(rng.randint(0, len(pipe.flying)))
        self._network.links.pop(self.identity, None)
        notice = self._network.late_notice if silently else self._network.notice
        clock.after(notice(), partial(self._dealer.disconnected, self))
        clock.after(notice(), self._unroute)

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
        if self._network.departed is not None:
            self._network.departed(self.identity)

    def broker_died(self) -> None:
        """The broker's process is gone, and its end of the connection with it."""
        self.to_broker.cut()
        self.to_peer.cut(self._network.world.rng.randint(0, len(self.to_peer.flying)))
        self._network.world.clock.after(self._network.notice(), partial(self._dealer.disconnected, self))


class Dealer:
    """A peer's socket.  What is sent before there is a connection waits for it.

    `owner` is the beginning of its identities, and `receive` is called with this and each message.  It connects again
    and again, as ZeroMQ does; unless there is `lost`: then it connects once, and `lost` is called with this and the
    reason when that fails, or when the connection is found to be gone.
    """

    def __init__(
        self,
        network: Network,
        owner: str,
        receive: Callable[[Dealer, Message], None],
        *,
        lost: Callable[[Dealer, str], None] | None = None,
    ) -> None:
        self.link: Link | None = None
        """The connection, or None while there is none."""
        self.owner = owner
        self._network = network
        self._receive = receive
        self._lost = lost
        self._closed = False
        self._unsent: deque[Message] = deque()
        network.world.clock.after(network.latency(), self._connect)

    def _connect(self) -> None:
        if self._closed:
            return
        self.link = self._network.connect(self)
        if self.link is None:
            self._failed("nobody listens there")
            return
        while self._unsent:
            self.link.to_broker.send(self._unsent.popleft())

    def _failed(self, reason: str) -> None:
        if self._lost is not None:
            self._lost(self, reason)
        else:
            self._network.world.clock.after(RECONNECT, self._connect)

    def disconnected(self, link: Link) -> None:
        """This end has noticed that `link` is gone."""
        if self.link is link and not self._closed:
            self._network.world.events["connection lost"] += 1
            self.link = None
            self._failed("the connection broke")

    @property
    def path(self) -> Route:
        """What the broker knows this peer by; empty while there is no connection."""
        return () if self.link is None else (self.link.identity,)

    @property
    def whole(self) -> bool:
        """Whether there is a connection to which nothing has happened."""
        return self.link is not None and self.link.whole

    def send(self, message: Message) -> None:
        """Send `message`, now or when there is a connection."""
        if self.link is None:
            self._unsent.append(message)
        else:
            self.link.to_broker.send(message)

    def deliver(self, message: Message) -> None:
        """Hand out what the broker sent, unless this was closed meanwhile."""
        if not self._closed:
            self._receive(self, message)

    def close(self, *, flush: bool = False, silent: bool = False) -> None:
        """Close it.  `flush`: what was sent arrives all the same.  `silent`: the broker notices later, if at all."""
        self._closed = True
        if self.link is not None:
            self.link.close(flush=flush, silent=silent)


class Network:
    """All links, and the ROUTER's side of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listener: Callable[[Message], None] | None = None
        """Takes what arrives at the broker, the identity first; None while no broker runs."""
        self.departed: Callable[[bytes], None] | None = None
        """Called with the identity of each peer to which the ROUTER has found it is not connected any more."""
        self.links: dict[bytes, Link] = {}
        """The connections that nothing has happened to."""
        self.routes: dict[bytes, Link] = {}
        """The peers to which the ROUTER believes to be connected."""
        self.slowness = 0.0
        """Seconds that a message takes at most; most take far less."""
        self._count = count(1)

    def latency(self) -> float:
        """Seconds that the next message takes."""
        return self.slowness * self.world.rng.random() ** 4 + 0.0001

    def notice(self) -> float:
        """Seconds until an end notices that its connection is gone: most often soon."""
        return float(LONGEST_NOTICE * self.world.rng.random() ** 6)

    def late_notice(self) -> float:
        """Seconds until an end notices that its connection is gone, if that happened silently."""
        return self.world.rng.uniform(LONGEST_NOTICE, LONGEST_SILENCE)

    def connect(self, dealer: Dealer) -> Link | None:
        """A new connection for `dealer`, or None if nobody listens."""
        if self.listener is None:
            return None
        identity = f"{dealer.owner}#{next(self._count)}".encode()
        link = self.links[identity] = self.routes[identity] = Link(self, dealer, identity)
        return link

    def send(self, message: Message) -> Literal["sent", "gone", "full"]:
        """What the ROUTER says when `message` is sent: "sent", "gone" (EHOSTUNREACH), or "full" (EAGAIN)."""
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
        """The broker's process is gone.  Until another sets `listener`, nobody can connect."""
        self.listener = None
        self.routes.clear()
        links, self.links = self.links, {}
        for link in links.values():
            link.broker_died()


def describe(message: Message) -> str:
    """`message`, without its identity frame, for a reader."""
    frames = [show(frame) if frame else '""' for frame in message]
    at = wire.header_at(message, 0)
    if 0 <= at < len(message) - 1 and message[at] in wire.CODES:
        names = {code: kind.value for kind, code in wire.CODES[message[at]].items()}
        if message[at + 1] == wire.BATCH and at + 2 < len(message):
            frames[at + 1 : at + 3] = ["batch", f"[{', '.join(_records(message[at + 2], names))}]"]
        else:
            frames[at + 1] = names.get(message[at + 1], frames[at + 1])
    return " ".join(frames)


def _records(data: bytes, names: dict[bytes, str]) -> Iterator[str]:
    """The commands and ids of a batch."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, command, number = _HEAD.unpack_from(data, at)
        yield f"{names.get(bytes([command]), command)} {number}"
        at += _SIZE + size
    if at != len(data):
        yield "…"

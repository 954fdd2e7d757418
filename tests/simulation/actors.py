"""Those who take part: the real machines, each run as its shell runs it, and peers that know no rules.

Every `Process` can hang (all that arrives meanwhile is dealt with afterwards, first the messages and then the time)
and die (its state is lost; whoever restarts it makes a new one).
"""

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zmdp.clients.session import ClientSession, GiveUp, Resend
from zmdp.mdp import wire
from zmdp.mdp.broker import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Message
from zmdp.workers.session import Request, WorkerSession

from .network import Alarm, Dealer, World
from .referee import EPSILON, Referee
from .rules import check

HANDLER_TIMEOUT = 15.0
"""Seconds after which a worker gives its request back because its handler is stuck."""
MOST_PARTS_01 = 8
"""PARTIALs that a 0.1 worker has at most.  They all go into one REPLY; were that past the broker's `max_frames`, it
would be dropped as invalid, and the worker would count as busy for as long as it lives."""

_silent = logging.getLogger("zmdp.simulation")
_silent.disabled = True


class Process:
    """Something that runs, hangs and dies."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.hangs_until = 0.0
        self._backlog: deque[Callable[[], None]] = deque()
        self._alarm = Alarm(world.clock, self._ring)

    @abstractmethod
    def tick(self) -> None:
        """Do what is due."""

    @abstractmethod
    def deadline(self) -> float | None:
        """When something is due."""

    def do(self, what: Callable[[], None]) -> None:
        """Do `what`, as soon as this process runs."""
        if not self.alive:
            return
        if self.world.now < self.hangs_until:
            self._backlog.append(what)
            return
        what()
        self._alarm.set(self.deadline() if self.alive else None)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.world.clock.after(seconds, partial(self.do, what))

    def hang(self, seconds: float) -> None:
        self.world.note(f"{self.name} hangs for {seconds:.1f} s")
        self.hangs_until = max(self.hangs_until, self.world.now + seconds)
        self.world.clock.at(self.hangs_until, self._wake)

    def die(self) -> None:
        self.world.note(f"{self.name} dies")
        self.alive = False

    def _wake(self) -> None:
        while self._backlog and self.alive and self.world.now >= self.hangs_until:
            self.do(self._backlog.popleft())
        self.do(self.tick)

    def _ring(self) -> None:
        if self.world.now >= self.hangs_until:  # else `_wake` does what is due
            self.do(self.tick)


class BrokerProcess(Process):
    """`Broker` under the referee's eyes, run as `Server` runs it."""

    def __init__(self, world: World, limits: Limits) -> None:
        super().__init__(world, "broker")
        self.machine = Broker(limits, now=world.now, logger=_silent)
        self.referee = Referee(self.machine, world.events)
        world.network.listener = lambda message: self.do(partial(self._arrived, message))

    def _arrived(self, message: Message) -> None:
        self._send(self.referee.receive(message, self.world.now))

    def tick(self) -> None:
        self._send(self.referee.tick(self.world.now))

    def deadline(self) -> float | None:
        return self.machine.deadline()

    def _send(self, messages: list[Message]) -> None:
        todo = deque(messages)
        while todo:
            message = todo.popleft()
            outcome = self.world.network.send(message)
            if outcome == "gone":
                self.world.events["EHOSTUNREACH"] += 1
                todo.extend(self.referee.unreachable(message, self.world.now))
            elif outcome == "full":
                self.world.events["slow reader dropped"] += 1
                todo.extend(self.referee.gone(message[0], self.world.now))

    def die(self) -> None:
        super().die()
        self.count()
        self.world.network.broker_died()

    def stop(self) -> None:
        """End in an orderly way: DISCONNECT to all workers."""
        for message in self.machine.close(self.world.now):
            self.world.network.send(message)
        self.die()

    def count(self) -> None:
        """Add up what this broker has counted."""
        stats = self.machine.stats
        for title, counts in (("dropped", stats.dropped), ("refused", stats.disconnected), ("lost", stats.lost)):
            for reason, number in counts.items():
                self.world.events[f"{title}: {reason}"] += number
        self.world.events["invalid message"] += sum(stats.invalid.values())
        for name in ("requests", "dispatched", "redispatched", "partials", "replies", "mmi"):
            self.world.events[name] += getattr(stats, name)


# ── replies that tell where they come from ───────────────────────────────────────────────────────────────────────────


def part(number: bytes, run: bytes, index: int) -> bytes:
    """The frame of a PARTIAL: the request's number, the run of a handler that made it, and its place."""
    return b"%s|%s|part|%d" % (number, run, index)


def end(number: bytes, run: bytes, parts: int) -> bytes:
    """The frame of a FINAL, and how many PARTIALs went before."""
    return b"%s|%s|end|%d" % (number, run, parts)


@dataclass
class Stream:
    """What has come of one request: the parts of one run in order, then its end."""

    number: bytes
    run: bytes | None = None
    parts: int = 0
    ended: bool = False

    def add(self, frames: list[bytes]) -> None:
        for frame in frames:
            number, run, kind, count = frame.split(b"|")
            check(number == self.number, f"C18: {frame!r} came as a reply to {self.number!r}")
            check(self.run in {None, run}, f"C17: {frame!r} came after parts of the run {self.run!r}")
            check(not self.ended, f"C3: {frame!r} came after the FINAL")
            check(int(count) == self.parts, f"C17: {frame!r} came after {self.parts} parts")
            self.run = run
            self.ended = kind == b"end"
            self.parts += not self.ended


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Habits:
    """How a worker's handler behaves."""

    service_time: float
    parts: int
    """PARTIALs a reply may have at most."""
    crash: float
    """Chance that the process dies in the middle of a request."""
    stuck: float
    """Chance that the handler takes a minute more."""


class WorkerProcess(Process):
    """`WorkerSession` and a handler, run as `Connection` runs them."""

    def __init__(
        self,
        world: World,
        name: str,
        service: bytes,
        *,
        protocol: str,
        heartbeat: float,
        liveness: int,
        habits: Habits,
    ) -> None:
        super().__init__(world, name)
        self.session = WorkerSession(
            service, protocol=protocol, heartbeat=heartbeat, liveness=liveness, rng=world.rng
        )  # fmt: skip
        self.habits = habits
        self._most_parts = min(habits.parts, MOST_PARTS_01) if protocol == "0.1" else habits.parts
        self.handling: Request | None = None
        """What the handler works on; when the connection was lost the handler does not know it yet."""
        self.dealer: Dealer | None = None
        self._stuck_at = 0.0
        self.do(self._open)

    @property
    def identity(self) -> bytes | None:
        """The identity of this worker's connection, if there is one."""
        return self.dealer.link.identity if self.dealer is not None and self.dealer.link is not None else None

    def _open(self) -> None:
        self.dealer = Dealer(self.world.network, self.name, self._arrived)
        self._send(self.session.connected(self.world.now))

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Dealer, message: Message) -> None:
        if dealer is not self.dealer:
            return  # it was closed while this process hung
        heard = self.session.lost is None
        request = self.session.receive(message, self.world.now)
        told_to_go = isinstance(wire.decode_broker(message), wire.Disconnect)
        check(not told_to_go or self.session.lost is not None, f"C9: {self.name} stays connected after DISCONNECT")
        if request is not None:
            self._start(request)
        if heard and self.session.lost is not None:
            check("second request" not in self.session.lost, f"C6: {self.name} got a second request")
            at_once = self.session.retry_at <= self.world.now
            self.world.events[f"DISCONNECT, reconnected {'at once' if at_once else 'after a backoff'}"] += 1
        self._drop_if_lost()

    def tick(self) -> None:
        if self.session.lost is None:
            self._send(self.session.tick(self.world.now))
            if self.session.lost is not None:
                self.world.events["broker silent for a worker"] += 1
            self._drop_if_lost()
        elif self.world.now >= self.session.retry_at and self.handling is None:
            self._open()

    def deadline(self) -> float | None:
        # A worker that has lost its connection does not connect again before its handler has returned.
        return None if self.session.lost is not None and self.handling is not None else self.session.deadline()

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            assert self.dealer is not None
            self.dealer.send(message)

    def _drop_if_lost(self, *, flush: bool = False) -> None:
        if self.session.lost is not None and self.dealer is not None:
            self.world.note(
                f"{self.name}: {self.session.lost}, next try at +{self.session.retry_at - self.world.now:g}"
            )
            self.dealer.close(flush=flush)
            self.dealer = None

    def leave(self) -> None:
        """End in an orderly way."""
        self._send(self.session.disconnect("leaves", self.world.now))
        self._drop_if_lost(flush=True)
        self.die()

    def die(self) -> None:
        super().die()
        if self.dealer is not None:
            self.dealer.close(silent=self.world.chance(0.3))

    # ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, request: Request) -> None:
        self.handling = request
        run = f"{self.name}:{self.world.number()}".encode()
        parts = self.world.rng.randint(0, self._most_parts if not self.world.calm else MOST_PARTS_01)
        self._stuck_at = self.world.now + HANDLER_TIMEOUT
        self._watch(request)
        self._work(request, run, 0, parts)

    def _work(self, request: Request, run: bytes, index: int, parts: int) -> None:
        """Take some time, then go on with part `index`."""
        seconds = self.world.rng.expovariate(1 / self.habits.service_time)
        if not self.world.calm:
            if self.world.chance(self.habits.crash):
                self.world.events["worker died in the middle of a request"] += 1
                self.later(seconds, self.die)
                return
            if self.world.chance(self.habits.stuck):
                self.world.events["handler stuck"] += 1
                seconds += 60.0
        self.later(seconds, partial(self._go_on, request, run, index, parts))

    def _go_on(self, request: Request, run: bytes, index: int, parts: int) -> None:
        number, now = request[0], self.world.now
        if index == parts:
            self._send(self.session.final(request, [end(number, run, parts)], now))
        elif self.session.request is request:
            self._stuck_at = now + HANDLER_TIMEOUT
            self._send(self.session.partial(request, [part(number, run, index)], now))
            self._work(request, run, index + 1, parts)
            return
        else:
            self.world.events["stream broken off by its worker"] += 1
        self.handling = None

    def _watch(self, request: Request) -> None:
        if self.handling is not request or self.session.lost is not None:
            return
        if self.world.now < self._stuck_at:
            self.later(self._stuck_at - self.world.now, partial(self._watch, request))
        else:
            self.world.events["request given back by DISCONNECT"] += 1
            self._send(self.session.disconnect("the handler is stuck", self.world.now))
            self._drop_if_lost(flush=True)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Call:
    """How a client asks."""

    service: bytes
    timeout: float
    retries: int
    stream: bool
    about: bytes = b""
    """What an `mmi.*` service is asked about."""

    @property
    def is_mmi(self) -> bool:
        return self.service.startswith(b"mmi.")


class ClientProcess(Process):
    """`ClientSession`, run as `Client` runs it: one call after the other."""

    def __init__(self, world: World, name: str, protocol: str, choose: Callable[[], Call], pause: float) -> None:
        super().__init__(world, name)
        self.session = ClientSession(protocol)
        self.idle = True
        """Between two calls."""
        self.replies = 0
        self._choose = choose
        self._pause = pause
        self._dealer: Dealer | None = None
        self._call: Call | None = None
        self._heard_at = 0.0
        """When the call was sent, or something of its reply came."""
        self._came = Stream(b"")
        """What came on this connection of the request sent there last."""
        self._handed_out = Stream(b"")
        """What the caller has got of the call."""
        self.later(world.rng.expovariate(1 / pause), self._next)

    def _next(self) -> None:
        if not self.world.calm and self.idle:
            self.begin(self._choose())

    def begin(self, call: Call) -> None:
        self.idle = False
        self._call = call
        self._heard_at = self.world.now
        number = f"{self.name}.{self.world.number()}".encode()
        body = [call.about] if call.is_mmi else [number, b"please"]
        self._came, self._handed_out = Stream(number), Stream(number)
        message = self.session.request(
            call.service, body, self.world.now, timeout=call.timeout, retries=call.retries, stream=call.stream
        )
        if self._dealer is None:
            self._dealer = Dealer(self.world.network, self.name, self._arrived)
        self._dealer.send(message)

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Dealer, message: Message) -> None:
        if dealer is not self._dealer:
            return  # it was closed while this process hung
        answer = wire.decode_broker(message)
        call = self._call
        check(isinstance(answer, wire.Answer) and call is not None, f"{self.name} got {message}, which is no reply")
        assert isinstance(answer, wire.Answer)
        assert call is not None
        check(not self.idle, f"C3: {self.name} got {message}, but waits for nothing")
        check(answer.service == call.service, f"C18: {self.name} asked {call.service!r} and got {message}")
        if not call.is_mmi:
            self._came.add(answer.body)
            check(self._came.ended == answer.final, f"C3: {message} is not what the worker sent")
        self._heard_at = self.world.now
        reply = self.session.receive(message, self.world.now)
        check((reply is not None) == (answer.final or call.stream), f"C5: handed out {reply} for {message}")
        if reply is None:
            return
        if not call.is_mmi:
            self._handed_out.add(reply)
            check(self._handed_out.ended == reply.final, f"C5: handed out {reply}")
        if reply.final:
            self.replies += 1
            self.world.events["client got its reply"] += 1
            self._ended()

    def tick(self) -> None:
        step = self.session.tick(self.world.now)
        if step is not None:
            assert self._call is not None
            silence = self.world.now - self._heard_at
            check(silence >= self._call.timeout - EPSILON, f"C5: {self.name} waited for {silence} s only")
            self._heard_at = self.world.now
        match step:
            case Resend(message):
                self.world.events["client sent again"] += 1
                assert self._dealer is not None
                self._dealer.close()
                self._dealer = Dealer(self.world.network, self.name, self._arrived)
                self._came = Stream(self._came.number)
                self._dealer.send(message)
            case GiveUp(_, streamed):
                self.world.note(f"{self.name} gives up")
                self.world.events["stream interrupted" if streamed else "client gave up"] += 1
                assert self._dealer is not None
                self._dealer.close()
                self._dealer = None
                self._ended()

    def _ended(self) -> None:
        self.idle = True
        check(not self.session.waiting, f"C4: {self.name}'s call has ended, but its session waits")
        self.later(self.world.rng.expovariate(1 / self._pause), self._next)

    def deadline(self) -> float | None:
        return self.session.deadline()

    def die(self) -> None:
        super().die()
        if self._dealer is not None:
            self._dealer.close(silent=self.world.chance(0.3))


class BurstProcess(Process):
    """A client that sends many requests at once and takes the replies as they come; nothing is sent again."""

    def __init__(self, world: World, name: str, protocol: str, choose: Callable[[], Call], pause: float) -> None:
        super().__init__(world, name)
        self.session = ClientSession(protocol)
        self._choose = choose
        self._pause = pause
        self._dealer = Dealer(world.network, name, self._arrived)
        self._asked: dict[bytes, tuple[bytes, Stream]] = {}
        self._next()

    def _next(self) -> None:
        if self.world.calm:
            return
        call = self._choose()
        for _ in range(0 if call.is_mmi else self.world.rng.randint(1, 12)):
            number = f"{self.name}.{self.world.number()}".encode()
            self._asked[number] = (call.service, Stream(number))
            self._dealer.send(self.session.encode(call.service, [number, b"please"]))
        self.later(self.world.rng.expovariate(1 / (8 * self._pause)), self._next)

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        self.do(partial(self._receive, message))

    def _receive(self, message: Message) -> None:
        reply = self.session.decode(message)
        check(reply is not None, f"{self.name} got {message}, which is no reply")
        assert reply is not None
        number = reply[0].partition(b"|")[0]
        check(number in self._asked, f"C3: {self.name} got {message}, which it did not ask for")
        service, stream = self._asked[number]
        check(reply.service.encode() == service, f"C18: {self.name} asked {service!r} and got {message}")
        stream.add(reply)
        check(stream.ended == reply.final, f"C3: {message} is not what the worker sent")
        if reply.final:
            self.world.events["client got its reply"] += 1

    def tick(self) -> None:
        pass

    def deadline(self) -> float | None:
        return None

    def die(self) -> None:
        super().die()
        self._dealer.close(silent=self.world.chance(0.3))


# ── peers that know no rules ─────────────────────────────────────────────────────────────────────────────────────────


class Rogue(Process):
    """Sends whatever it likes: noise, broken commands, and valid ones that nobody expects.

    One that registers as a worker (`registers`) takes requests and never answers them, but leaves the clients alone;
    any other answers requests that it was never given.
    """

    def __init__(
        self,
        world: World,
        name: str,
        services: list[bytes],
        clients: Callable[[], list[bytes]],
        *,
        registers: bool,
        pause: float,
    ) -> None:
        super().__init__(world, name)
        self._services = services
        self._clients = clients
        self._registers = registers
        self._pause = pause
        self._dealer = Dealer(world.network, name, self._arrived)
        self._next()

    def _next(self) -> None:
        if self.world.calm:
            self.die()
            return
        message = self._spoil(self._message()) if self.world.chance(0.3) else self._message()
        command = wire.decode_peer([b"?", *message], max_message=1 << 30, max_frames=1 << 30)
        if isinstance(command, wire.Request) and not command.service.startswith(b"mmi."):
            # With a number, so that the referee can tell it from others.
            body = [f"{self.name}.{self.world.number()}".encode()]
            message = wire.request(command.route[1:], command.header, command.service, body)
        if self._registers or not isinstance(command, wire.Ready):
            self._dealer.send(message)
        if self.world.chance(0.1):
            self._dealer.close(flush=True)  # while the broker may have an answer for it
            self._dealer = Dealer(self.world.network, self.name, self._arrived)
        self.later(self.world.rng.expovariate(1 / self._pause), self._next)

    def _message(self) -> Message:
        rng = self.world.rng
        route = rng.choice([(), (), (b"",), (b"a", b""), (b"x",) * rng.randint(1, 20) + (b"",)])
        service = rng.choice([*self._services, rng.randbytes(2).hex().encode(), b"mmi.service", b"mmi.what"])
        worker = rng.choice([wire.W01, wire.W02])
        address = b"nobody" if self._registers else rng.choice([b"nobody", *self._clients()])
        kinds = (wire.Kind.FINAL,) if worker == wire.W01 else (wire.Kind.PARTIAL, wire.Kind.FINAL)
        return rng.choice(
            [
                wire.request(route, rng.choice([wire.C01, wire.C02]), service, [b"?"]),
                wire.ready(route, worker, service),
                wire.reply(route, worker, rng.choice(kinds), address, [b"a reply that nobody asked for"]),
                wire.heartbeat(route, worker),
                wire.disconnect(route, worker),
                [rng.randbytes(rng.randint(0, 8)) for _ in range(rng.randint(1, 6))],
            ]
        )

    def _spoil(self, message: Message) -> Message:
        """Lose, double, empty or change a frame."""
        at = self.world.rng.randrange(len(message))
        changed = self.world.rng.choice([[], [message[at]] * 2, [b""], [self.world.rng.randbytes(3)]])
        return [*message[:at], *changed, *message[at + 1 :]] or [b""]

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        pass

    def tick(self) -> None:
        pass

    def deadline(self) -> float | None:
        return None

    def die(self) -> None:
        super().die()
        self._dealer.close()

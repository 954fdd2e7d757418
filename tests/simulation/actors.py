"""Those who take part: brokers and workers, the real machines, each run as its shell runs it.

Every `Process` can hang (all that arrives meanwhile is dealt with afterwards, first the messages and then the time)
and die (its state is lost; whoever restarts it makes a new one).
"""

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zmdp.mdp import wire
from zmdp.mdp.broker import Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.fake_network import Alarm, Dealer, World
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Message, Route
from zmdp.workers.request import Request
from zmdp.workers.session import WorkerSession

from .referee import Referee
from .rules import check

HANDLER_TIMEOUT = 15.0
"""Seconds after which a worker gives its request back because its handler is stuck."""
MILLISECOND = 0.001
"""The unit of a ttl, and so the error it may have."""
MOST_PARTS_01 = 8
"""PARTIALs that a 0.1 worker has at most.  They all go into one REPLY; were that past the broker's `max_frames`, it
would be dropped as invalid, and the worker would count as busy for as long as it lives."""

_silent = logging.getLogger("zmdp.simulation")
_silent.disabled = True


class Stage(World):
    """The world in which all this happens."""

    calm = False
    """No more faults: what runs is to recover."""


class Process:
    """Something that runs, hangs and dies."""

    def __init__(self, world: Stage, name: str) -> None:
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

    def __init__(self, world: Stage, limits: Limits) -> None:
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
        """End in an orderly way: ERROR for all X1 requests, DISCONNECT to all workers."""
        for message in self.referee.close(self.world.now):
            self.world.network.send(message)
        self.die()

    def count(self) -> None:
        """Add up what this broker has counted."""
        stats = self.machine.stats
        for title, counts in (("dropped", stats.dropped), ("refused", stats.disconnected), ("lost", stats.lost)):
            for reason, number in counts.items():
                self.world.events[f"{title}: {reason}"] += number
        for reason, number in stats.invalid.items():
            self.world.events[f"invalid: {reason}"] += number
        for name in ("requests", "dispatched", "redispatched", "partials", "replies", "errors", "heartbeats", "mmi"):
            self.world.events[name] += getattr(stats, name)


# ── replies that tell where they come from ───────────────────────────────────────────────────────────────────────────


def part(number: bytes, run: bytes, index: int) -> bytes:
    """The frame of a PARTIAL: the request's number, the run of a handler that made it, and its place."""
    return b"%s|%s|part|%d" % (number, run, index)


def end(number: bytes, run: bytes, parts: int) -> bytes:
    """The frame of a FINAL, and how many PARTIALs went before."""
    return b"%s|%s|end|%d" % (number, run, parts)


def failure(number: bytes, run: bytes, parts: int) -> bytes:
    """The text of a handler's ERROR, and how many PARTIALs went before."""
    return b"%s|%s|failure|%d" % (number, run, parts)


def tells_failure(frames: list[bytes]) -> bool:
    """Whether a reply ends with what a worker that has no ERROR sends in its place."""
    return frames[-3:-2] == [wire.ERROR_MARK]


@dataclass
class Stream:
    """What has come of one request: the parts of one run in order, then its end."""

    number: bytes
    run: bytes | None = None
    parts: int = 0
    ended: bool = False

    def add(self, frames: list[bytes]) -> None:
        if tells_failure(frames):
            frames = [*frames[:-3], frames[-1]]
        for frame in frames:
            number, run, kind, count = frame.split(b"|")
            check(number == self.number, f"C18: {frame!r} came as a reply to {self.number!r}")
            check(self.run in {None, run}, f"C17: {frame!r} came after parts of the run {self.run!r}")
            check(not self.ended, f"C3: {frame!r} came after the FINAL")
            alone = kind == b"failure" and not self.parts  # a 0.1 worker's failure comes without the parts before it
            check(int(count) == self.parts or alone, f"C17: {frame!r} came after {self.parts} parts")
            self.run = run
            self.ended = kind != b"part"
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
    fails: float
    """Chance that the handler fails instead of going on."""
    looks: bool
    """Whether the handler ends early when nobody waits any more, or the time has passed."""


@dataclass(eq=False)
class Slot:
    """One of the workers that share a connection."""

    session: WorkerSession
    handling: Request | None = None
    """What the handler works on; when the connection was lost the handler does not know it yet."""
    stuck_at: float = 0.0


class WorkerProcess(Process):
    """`WorkerSession`s and a handler each, on one connection, run as `Link` runs them, or `Connection` the one."""

    def __init__(
        self,
        world: Stage,
        name: str,
        service: bytes,
        *,
        protocol: str,
        heartbeat: float,
        liveness: int,
        habits: Habits,
        slots: int = 1,
    ) -> None:
        super().__init__(world, name)
        self.service = service
        session = WorkerSession(service, protocol=protocol, heartbeat=heartbeat, liveness=liveness, rng=world.rng)
        self.slots = [Slot(session), *[Slot(session.sibling()) for _ in range(1, slots)]]
        self.habits = habits
        self._most_parts = min(habits.parts, MOST_PARTS_01) if protocol == "0.1" else habits.parts
        self.dealer: Dealer | None = None
        self._registered: dict[Route, Slot] = {}
        self._joined = 0
        self._retry_at = 0.0
        self.do(self._open)

    @property
    def identity(self) -> bytes | None:
        """The identity of this worker's connection, if there is one."""
        return self.dealer.link.identity if self.dealer is not None and self.dealer.link is not None else None

    @property
    def routes(self) -> list[Route]:
        """Where the broker is to have its slots registered."""
        return [(self.identity or b"", *slot.session.route) for slot in self.slots]

    @property
    def well(self) -> bool:
        """Whether all slots are there, as far as they know, and idle."""
        return all(slot.session.lost is None and slot.handling is None for slot in self.slots)

    def _open(self) -> None:
        self.dealer = Dealer(self.world.network, self.name, self._arrived)
        self._registered, self._joined = {}, 0
        for slot in self.slots:
            if slot.handling is None:
                self._join(slot)

    def _join(self, slot: Slot) -> None:
        ready = slot.session.connected(self.world.now, b"%d" % self._joined if self._joined else None)
        self._joined += 1
        self._registered[slot.session.route] = slot
        self._send(ready)

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Dealer, message: Message) -> None:
        if dealer is not self.dealer:
            return  # it was closed while this process hung
        command = wire.decode_broker(message)
        slot = self._registered.get(command.route)
        if slot is None:
            self.world.events["message for a slot that has left"] += 1
            return
        session = slot.session
        heard = session.lost is None
        request = session.take(command, self.world.now)
        told_to_go = isinstance(command, wire.Disconnect)
        check(not told_to_go or session.lost is not None, f"C9: {self.name} stays connected after DISCONNECT")
        if isinstance(command, wire.Withdraw):
            self._cancelled(session, command)
        if request is not None:
            self._check(request)
            self._start(slot, request)
        if heard and session.lost is not None:
            check("second request" not in session.lost, f"C6: {self.name} got a second request")
            at_once = session.retry_at <= self.world.now
            self.world.events[f"DISCONNECT, reconnected {'at once' if at_once else 'after a backoff'}"] += 1
            self._lose(slot)

    def _check(self, request: Request) -> None:
        """What an X1 client sent with a request has come as well, if this worker speaks X1."""
        until = request.headers.get("until")
        if until is not None:
            check(request.headers["number"].encode() == request[0], f"X1: {request!r} has another's headers")
            check(request.deadline is not None, f"X1: {request!r} came without its ttl")
            assert request.deadline is not None
            check(request.deadline >= float(until) - MILLISECOND, f"X1: the ttl of {request!r} is too short")

    def _cancelled(self, session: WorkerSession, command: wire.Withdraw) -> None:
        request = session.request
        if request is None:
            self.world.events["CANCEL met the FINAL on the way"] += 1  # nothing else has crossed it
        elif session.lost is None:
            check(request.client == command.client and request.cancelled, f"X1: {self.name} missed a CANCEL")
            self.world.events["CANCEL reached a worker"] += 1

    def tick(self) -> None:
        now = self.world.now
        if self.dealer is None:
            if now >= self._retry_at and not all(slot.handling for slot in self.slots):
                self._open()
            return
        for slot in self.slots:
            session = slot.session
            if session.alive:
                self._send(session.tick(now))
                if not session.alive:
                    self.world.events["broker silent for a worker"] += 1
                    self._lose(slot)
                    return
            elif now >= session.retry_at and slot.handling is None:
                self.world.events["slot registered again on the same connection"] += 1
                self._join(slot)

    def deadline(self) -> float | None:
        # A slot that was lost does not register again before its handler has returned.
        slots = [slot for slot in self.slots if slot.session.alive or slot.handling is None]
        if self.dealer is None:
            return self._retry_at if slots else None
        return min((slot.session.deadline() for slot in slots), default=None)

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            assert self.dealer is not None
            self.dealer.send(message)

    def _lose(self, slot: Slot) -> None:
        """The session of `slot` is lost: with the connection, or because the broker does not want it."""
        if slot.session.heard or "silent" in str(slot.session.lost):
            for other in self.slots:
                if other is not slot:
                    other.session.lose_with(slot.session)
            self._close(slot)
        else:
            self._part(slot, flush=False)

    def _part(self, slot: Slot, *, flush: bool) -> None:
        """`slot` is not there any more, to the broker."""
        del self._registered[slot.session.route]
        if not self._registered:
            self._close(slot, flush=flush)
        else:
            self.world.events["slot left, others stayed"] += 1

    def _close(self, slot: Slot, *, flush: bool = False) -> None:
        session = slot.session
        self.world.note(f"{self.name}: {session.lost}, next try at +{session.retry_at - self.world.now:g}")
        assert self.dealer is not None
        self._retry_at = session.retry_at
        self._registered = {}
        self.dealer.close(flush=flush)
        self.dealer = None

    def leave(self) -> None:
        """End in an orderly way."""
        for slot in self.slots:
            if slot.session.alive:
                self._send(slot.session.disconnect("leaves", self.world.now))
                self._part(slot, flush=True)
        self.die()

    def die(self) -> None:
        super().die()
        if self.dealer is not None:
            self.dealer.close(silent=self.world.chance(0.3))

    # ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, slot: Slot, request: Request) -> None:
        slot.handling = request
        run = f"{self.name}:{self.world.number()}".encode()
        parts = self.world.rng.randint(0, self._most_parts if not self.world.calm else MOST_PARTS_01)
        slot.stuck_at = self.world.now + HANDLER_TIMEOUT
        self._watch(slot, request)
        self._work(slot, request, run, 0, parts)

    def _work(self, slot: Slot, request: Request, run: bytes, index: int, parts: int) -> None:
        """Take some time, then go on with part `index`."""
        time = self.habits.service_time
        seconds = self.world.rng.expovariate(1 / (min(time, 0.1) if self.world.calm else time))
        if not self.world.calm:
            if self.world.chance(self.habits.crash):
                self.world.events["worker died in the middle of a request"] += 1
                self.later(seconds, self.die)
                return
            if self.world.chance(self.habits.stuck):
                self.world.events["handler stuck"] += 1
                seconds += 60.0
        self.later(seconds, partial(self._go_on, slot, request, run, index, parts))

    def _go_on(self, slot: Slot, request: Request, run: bytes, index: int, parts: int) -> None:
        number, now, session = request[0], self.world.now, slot.session
        passed = request.deadline is not None and now >= request.deadline
        if self.habits.looks and session.request is request and (request.cancelled or passed):
            code = Code.CANCELLED if request.cancelled else Code.TIME_PASSED
            self.world.events[f"worker ended a request early: {code}"] += 1
            self._send(session.error(request, code, "nobody waits any more", now))
        elif not self.world.calm and self.world.chance(self.habits.fails):
            self.world.events["handler failed"] += 1
            code, detail = self.world.rng.choice([(500, []), (418, [b"a detail"])])
            self._send(session.error(request, code, failure(number, run, index).decode(), now, detail))
        elif index == parts:
            self._send(session.final(request, [end(number, run, parts)], now))
        elif session.request is request:
            slot.stuck_at = now + HANDLER_TIMEOUT
            self._send(session.partial(request, [part(number, run, index)], now))
            self._work(slot, request, run, index + 1, parts)
            return
        else:
            self.world.events["stream broken off by its worker"] += 1
        slot.handling = None

    def _watch(self, slot: Slot, request: Request) -> None:
        if slot.handling is not request or not slot.session.alive:
            return
        if self.world.now < slot.stuck_at:
            self.later(slot.stuck_at - self.world.now, partial(self._watch, slot, request))
        else:
            self.world.events["request given back by DISCONNECT"] += 1
            self._send(slot.session.disconnect("the handler is stuck", self.world.now))
            self._part(slot, flush=True)

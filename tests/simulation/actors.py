"""Brokers and workers of a simulation: the real machines, each driven as its shell drives it.

Every `Process` can hang (all that arrives meanwhile is dealt with afterwards, first the messages and then the time)
and die (its state is lost; whoever restarts it makes a new one).
"""

import logging
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zmdp.mdp import wire
from zmdp.mdp.broker.core.outgoing import Event
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.service_limits import ServiceLimits
from zmdp.mdp.wire import Message, Route, batch
from zmdp.testing.network import Alarm, Dealer, Network, World
from zmdp.workers.session.held import CreditController
from zmdp.workers.session.request import Request
from zmdp.workers.session.session import WorkerSession
from zmdp.workers.session.states import CLOSED, ConnectionEnded, HandlerStuck, SessionSettings

from .probing import Probe
from .proxies import Socket
from .referee import Referee
from .rules import check

HANDLER_TIMEOUT = 15.0
"""Seconds after which a worker gives up a request whose handler is stuck."""
MILLISECOND = 0.001
"""Resolution of a ttl, and thus its maximum error."""
MOST_PARTS_01 = 8
"""PARTIALs that a 0.1 worker has at most.  They all go into one REPLY, which must not be past the broker's
`max_frames`."""
TURN = 100
"""Maximum number of messages that the broker handles in one turn."""
LONGEST_TURN = 0.005
"""Seconds for which a worker or client collects commands, to send them together."""

silent = logging.getLogger("zmdp.simulation")
silent.disabled = True


class Stage(World):
    """The simulated world: clock, network, randomness and events."""

    calm = False
    """Whether faults have ended, so that everything must recover."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, trace)
        self.runs: defaultdict[bytes, list[str]] = defaultdict(list)
        """The names of the workers whose handlers have begun each request."""
        self.user: str | None = None
        """On whose behalf all requests must be made; None if that is checked elsewhere."""


class Process:
    """A process, which can hang and die."""

    def __init__(self, world: Stage, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.hangs_until = 0.0
        self._backlog: deque[Callable[[], None]] = deque()
        self._alarm = Alarm(world.clock, self._ring)

    def tick(self) -> None:
        """Perform whatever is due, by default nothing."""

    def deadline(self) -> float | None:
        """Return when something is due, by default never."""
        return None

    def do(self, what: Callable[[], None]) -> None:
        """Call `what` as soon as this process runs."""
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


ROLES = {"b": "callers", "c": "callers", "d": "callers", "p": "both", "r": "rogues", "v": "workers", "w": "workers"}
"""The role of a connection, by the first letter of its peer's name."""


class BrokerShell(Process):
    """A `Broker`, driven as `Server` drives it, at the ROUTER of `network`.

    `driven` is the machine, or what stands in for it.
    """

    def __init__(self, world: Stage, network: Network, machine: Broker, driven: Any) -> None:
        super().__init__(world, network.name)
        self.machine = machine
        self.network = network
        self._driven = driven
        self._inbox: deque[tuple[Message, Any]] = deque()
        """What has arrived, each with the role of its connection's key."""
        self._turn_due = False
        self._slow = world.rng.choice([0.0, 0.001, 0.05])
        """Maximum seconds until the broker handles messages that have arrived."""
        self._gone: dict[bytes, int] = {}
        """Peers that are no longer connected, and the first turn whose messages they did not receive."""
        network.listener = self._arrived
        network.departed = self._departed

    @abstractmethod
    def role_of(self, message: Message) -> Any:
        """Return the role under which `message` is taken in."""

    def _arrived(self, message: Message) -> None:
        self._inbox.append((message, self.role_of(message)))
        self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.later(self.world.rng.uniform(0, self._slow), self._turn)

    def _turn(self) -> None:
        """Handle the messages that have arrived, and send the results."""
        self._take_in()
        self._end_turn()

    def _take_in(self) -> None:
        self._turn_due = False
        most = self.world.rng.choice([2, TURN])
        taken = 0
        while self._inbox and taken < most:
            message, role = self._inbox.popleft()
            self._receive(message, role)
            taken += 1
        self.world.events["turn of several messages"] += taken > 1

    def _receive(self, message: Message, role: Any) -> None:
        self._driven.receive(message, self.world.now, role)

    def _end_turn(self) -> None:
        """Do what the machine says.  Give up peers that are gone, once everything that they sent before was handled."""
        self._act()
        while self._gone and not self._inbox:
            identity, turn = self._gone.popitem()
            self._driven.disconnected(identity, turn, self.world.now)
            self._act()
        if self._inbox:
            self._plan_turn()

    def _act(self) -> None:
        """End the machine's turn, and do what it says."""
        self._send(self._driven.take_messages())
        self.world.events["turn left something for the next"] += self.machine.work_left
        for event in self._driven.take_events():
            self.handle(event)

    def handle(self, event: Event) -> None:
        """Do what the machine asks for."""

    def _departed(self, identity: bytes) -> None:
        """Handle an event of libzmq's monitor: a connection may have ended."""
        if self.world.chance(0.7):
            self.later(self.world.rng.choice([0.0, 0.02]), partial(self.probe, identity))

    def probe(self, identity: bytes) -> None:
        self._driven.probe(identity, self.world.now)
        self._end_turn()

    def tick(self) -> None:
        self._take_in()
        if self.machine.turn % 2:  # half of the times, what is due is done in the turn of the messages
            self._end_turn()
        self._driven.tick(self.world.now)
        self._end_turn()

    def deadline(self) -> float | None:
        return self.machine.deadline()

    def _send(self, messages: list[Message]) -> None:
        turn = self.machine.turn - 1
        dropped: list[bytes] = []
        for message in messages:
            if message[0] in dropped:
                continue  # a stream ends where it breaks
            outcome = self._put(message)
            if outcome == "gone":
                self.world.events["EHOSTUNREACH"] += 1
                self._gone.setdefault(message[0], turn)
            elif outcome == "full":
                self.world.events["slow reader dropped"] += 1
                dropped.append(message[0])
        for identity in dropped:
            self._driven.give_up(identity, self.world.now)
            self._act()

    def _put(self, message: Message) -> Literal["sent", "gone", "full"]:
        return self.network.send(message)

    def die(self) -> None:
        super().die()
        self.count()
        self.network.departed = None
        self.network.broker_died()

    def drain(self) -> None:
        self._driven.drain(self.world.now)
        self._end_turn()

    def stop(self) -> None:
        """Stop gracefully: ERROR for all X1 requests, DISCONNECT to all workers."""
        self._driven.close(self.world.now)
        messages = self._driven.take_messages()
        while not self.machine.closed:
            self._driven.tick(self.world.now)
            messages += self._driven.take_messages()
        for message in messages:
            self._put(message)
        self.die()

    def count(self) -> None:
        """Add this broker's counts to the events."""
        stats = self.machine.stats
        for title, counts in (("dropped", stats.dropped), ("refused", stats.disconnected), ("lost", stats.lost)):
            for reason, number in counts.items():
                self.world.events[f"{title}: {reason}"] += number
        for reason, number in stats.invalid.items():
            self.world.events[f"invalid: {reason}"] += number
        for name in ("requests", "dispatched", "redispatched", "partials", "replies", "errors", "late", "heartbeats"):
            self.world.events[name] += getattr(stats, name)
        self.world.events["mmi"] += stats.mmi


class BrokerProcess(BrokerShell):
    """A `Broker` that the referee watches."""

    def __init__(
        self,
        world: Stage,
        limits: Limits,
        roles: dict[str, Permissions],
        throttled: dict[str, ServiceLimits],
        *,
        federation: bool,
    ) -> None:
        first = world.number() * 1_000_000
        machine = Broker(limits, now=world.now, logger=silent, first_address=first, federation=federation)
        self.referee = Referee(machine, world.events)
        self._roles = roles
        if roles:
            self.referee.grant(roles, world.now)
        if throttled:
            self.referee.limit(throttled, world.now)
        super().__init__(world, world.network, machine, self.referee)

    def role_of(self, message: Message) -> str:
        return ROLES[message[0][:1].decode()] if self._roles else ""

    def take_forged(self, message: Message) -> None:
        """Take in a message about a peer that is there, from a connection of another role."""
        self.referee.receive(message, self.world.now, "impostors")
        self._end_turn()


# ── replies that tell where they come from ───────────────────────────────────────────────────────────────────────────


def part(number: bytes, run: bytes, index: int) -> bytes:
    """Return the frame of a PARTIAL: the request's number, the handler's run and the part's index."""
    return b"%s|%s|part|%d" % (number, run, index)


def end(number: bytes, run: bytes, parts: int) -> bytes:
    """Return the frame of a FINAL, with the number of PARTIALs before it."""
    return b"%s|%s|end|%d" % (number, run, parts)


def failure(number: bytes, run: bytes, parts: int) -> bytes:
    """Return the text of a handler's ERROR, with the number of PARTIALs before it."""
    return b"%s|%s|failure|%d" % (number, run, parts)


def tells_failure(frames: list[bytes]) -> bool:
    """Return whether a reply ends with the frame that a worker without ERROR sends instead."""
    return frames[-3:-2] == [wire.ERROR_MARK]


@dataclass
class Stream:
    """What has arrived for one request: the parts of one run in order, then its end."""

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
    """How a worker's handlers behave."""

    service_time: float
    parts: int
    """Maximum number of PARTIALs of a reply."""
    crash: float
    """Chance that the process dies in the middle of a request."""
    stuck: float
    """Chance that a handler takes an additional minute."""
    fails: float
    """Chance that a handler fails at a step."""
    looks: bool
    """Whether handlers end early once their request is cancelled or its time has passed."""
    too_large: int = 0
    """Number of frames of replies over the broker's limits, or 0 for none."""


@dataclass(eq=False)
class Run:
    """A running handler."""

    request: Request
    name: bytes
    parts: int
    step: int = 0
    """Counts steps, so that a step planned before the handler was cancelled is skipped."""


class WorkerProcess(Process):
    """`WorkerSession`, run as `WorkerConnection` runs it, and its handlers.

    `kind` is "threads" (they block, and only look whether they are cancelled), "asyncio" (they are cancelled, and may
    block the event loop), or "fixed" (a constant credit).
    """

    def __init__(
        self,
        world: Stage,
        name: str,
        service: bytes,
        *,
        protocol: str,
        kind: str,
        concurrency: int,
        heartbeat: float,
        liveness: int,
        habits: Habits,
        connect: Callable[..., Socket] = Dealer,
        networks: Sequence[Network] = (),
    ) -> None:
        super().__init__(world, name)
        self._networks = {network.name: network for network in networks}
        """The brokers among which the session chooses; if there are none, `connect` chooses."""
        self.service = service
        self._awaits = kind == "asyncio"
        controller = CreditController(concurrency, prefetch=kind == "threads") if protocol == "X1" else None
        endpoints = [network.name for network in networks] or [world.network.name]
        settings = SessionSettings(protocol, heartbeat, liveness, HANDLER_TIMEOUT, endpoints)
        options = b'{"name":"%s"}' % name.encode()
        self.session = WorkerSession(service, settings, options=options, controller=controller, rng=world.rng)
        self._end = ConnectionEnded("")
        """How the last connection ended."""
        self.habits = habits
        self._x1 = protocol == "X1"
        self._short = kind == "threads" and world.chance(0.7)
        """Whether almost all of its handlers take less than a millisecond."""
        self._most_parts = min(habits.parts, MOST_PARTS_01) if protocol == "0.1" else 0 if self._short else habits.parts
        self._connect = connect
        self.dealer: Socket | None = None
        self.runs: dict[int, Run] = {}
        """The running handlers, by the id() of their requests."""
        self._flush_due = False
        self._leaving = False
        self.do(self._step)

    @property
    def route(self) -> Route:
        """The route under which the broker should have it registered."""
        return self.dealer.path if self.dealer is not None else ()

    @property
    def well(self) -> bool:
        """Return whether it believes to be connected and is idle."""
        session = self.session
        return session.state.connected and not session.held and not self.runs

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Perform what is due: connect, start handlers, and send, now or soon."""
        session, now = self.session, self.world.now
        due = session.deadline()
        if self.dealer is None and due is not None and now >= due:
            self.dealer = self._open()
            session.connected(now)
        session.tick(now)
        endpoint = session.take_probe(now)
        if endpoint is not None:
            self.world.events["worker: probe"] += 1
            Probe(self._networks[endpoint], self.name, lambda answered: self.do(partial(self._probed, answered)))
        self._look()
        while self.alive and (request := session.begin(now)) is not None:
            self._begin(request)
        if not session.state.connected or self.world.chance(0.5):
            self._flush()
        elif session.unsent and not self._flush_due:
            self._flush_due = True
            self.later(self.world.rng.uniform(0, LONGEST_TURN), self._flush_later)
        if session.state is CLOSED and self.alive:
            self.world.note(f"{self.name} has left")
            self.world.events["worker process left"] += 1
            self.alive = False

    def _open(self) -> Socket:
        if not self._networks:
            return self._connect(self.world.network, self.name, self._arrived)
        network = self._networks[self.session.failover.endpoint]
        lost = self._lost if self.session.failover.several else None
        return Dealer(network, self.name, self._arrived, lost=lost)

    def _lost(self, dealer: Socket, reason: str) -> None:
        self.do(partial(self._connection_lost, dealer, reason))

    def _connection_lost(self, dealer: Socket, reason: str) -> None:
        if dealer is self.dealer and self.session.state.connected:
            self.world.events["worker moves on"] += 1
            self.session.lose(reason, self.world.now)
            self._step()

    def _probed(self, answered: bool) -> None:
        self.world.events["worker returns"] += answered
        self.session.probed(answered, self.world.now)
        self._step()

    def _flush_later(self) -> None:
        self._flush_due = False
        self._flush()

    def _flush(self) -> None:
        session = self.session
        if self.dealer is None:
            return
        for message in session.take_messages():
            self.dealer.send(message)
        if not session.state.connected:
            seconds = session.failover.retry_at - self.world.now
            self.world.note(f"{self.name}: {self._end.reason}, next try at +{seconds:g}")
            self.dealer.close(flush=self._end.keep_messages)
            self.dealer = None

    def _arrived(self, dealer: Socket, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Socket, message: Message) -> None:
        if dealer is not self.dealer:
            return  # it was closed while this process hung
        session, now = self.session, self.world.now
        found = wire.decode_broker(message)
        packed = isinstance(found, wire.Batched) and not found.bare
        commands = batch.to_worker(message, found.at) if packed else [found]
        held = dict(session.held)
        session.receive(message, now)
        for command in commands:
            if isinstance(command, wire.Disconnect):
                check(not session.state.connected, f"C9: {self.name} stays connected after DISCONNECT")
                at_once = session.failover.retry_at <= now
                self.world.events[f"DISCONNECT, reconnected {'at once' if at_once else 'after a backoff'}"] += 1
            elif isinstance(command, wire.Request):
                check(command.id not in held, f"C32: {self.name} got the address {command.id} twice")
                request = session.held.get(command.id)
                if request is not None:
                    self._check(request)
                held[command.id] = request
                self.world.events["REQUEST crossed DISCONNECT"] += request is None
            elif isinstance(command, wire.Cancel):
                self._cancelled(held.get(command.id), command)
        self._step()

    def _check(self, request: Request) -> None:
        """Check that the options of an X1 client have arrived, if this worker speaks X1."""
        until = request.headers.get("until")
        if until is not None:
            check(request.headers["number"].encode() == request[0], f"X1: {request!r} has another's headers")
            check(request.deadline is not None, f"X1: {request!r} came without its ttl")
            assert request.deadline is not None
            check(request.deadline >= float(until) - MILLISECOND, f"X1: the ttl of {request!r} is too short")
            user = self.world.user
            check(user in {None, request.user}, f"X1: {request!r} is on behalf of {request.user!r}, not of {user!r}")

    def _cancelled(self, request: Request | None, command: wire.Cancel) -> None:
        if request is None:
            self.world.events["CANCEL met the FINAL on the way"] += 1
        elif self.session.state.connected:
            here = self.session.held.get(command.id)
            check(here is None or request.cancelled, f"X1: {self.name} missed a CANCEL")
            reached = "before the request began" if here is None else "a worker"
            self.world.events[f"CANCEL reached {reached}"] += 1

    def tick(self) -> None:
        self._step()

    def deadline(self) -> float | None:
        return self.session.deadline()

    def leave(self) -> None:
        """Accept no more requests, and end when the running ones are done."""
        if not self._leaving:
            self.world.note(f"{self.name} leaves")
            self._leaving = True
            self.session.leave(self.world.now)
            self._step()

    def die(self) -> None:
        super().die()
        self.world.events["worker killed that held many"] += len(self.session.held) > 3
        if self.dealer is not None:
            self.dealer.close(silent=self.world.chance(0.3))

    # ── the handlers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, request: Request) -> None:
        parts = self.world.rng.randint(0, self._most_parts if not self.world.calm else MOST_PARTS_01)
        run = Run(request, f"{self.name}:{self.world.number()}".encode(), parts)
        self.world.events["held ahead"] += self.session.waiting > 0
        self.runs[id(request)] = run
        self.world.runs[request[0]].append(self.name)
        check(len(self.runs) <= self.session.controller.concurrency, f"{self.name} runs too many handlers")
        self._work(run, 0)

    def _look(self) -> None:
        """Act on what has happened in the session."""
        for event in self.session.take_events():
            if isinstance(event, ConnectionEnded):
                self.world.events["broker silent for a worker"] += "silent" in event.reason
                self._end = event
            else:
                self.world.events["handler given up"] += isinstance(event, HandlerStuck)
                self._cancel_task(event.request)

    def _cancel_task(self, request: Request) -> None:
        run = self.runs.get(id(request))
        if self._awaits and run is not None:
            run.step += 1
            self.later(self.world.rng.choice([0.0, 0.01, 1.0]), partial(self._end_task, run))

    def _end_task(self, run: Run) -> None:
        """Handle the end of a cancelled task."""
        if self.runs.pop(id(run.request), None) is None:
            return  # it was cancelled twice
        if run.request.cancelled:
            self.session.error(run.request, Code.CANCELLED, "cancelled", self.world.now)
        else:
            self.session.abandon(run.request, self.world.now, ended=True)
            self.world.events["task ended without a reply"] += 1
        self._step()

    def _work(self, run: Run, index: int) -> None:
        """Wait for a while, then continue with part `index`."""
        rng, time = self.world.rng, self.habits.service_time
        if self._short and self.world.chance(0.97):
            time = 0.0001  # so that the credit grows, until another takes longer
        seconds = rng.expovariate(1 / (min(time, 0.1) if self.world.calm else time))
        if not self.world.calm:
            if self.world.chance(self.habits.crash):
                self.world.events["worker died in the middle of a request"] += 1
                self.later(seconds, self.die)
                return
            if self.world.chance(self.habits.stuck):
                self.world.events["handler stuck"] += 1
                seconds += 60.0
        run.step += 1
        self.later(seconds, partial(self._go_on, run, run.step, index))

    def _go_on(self, run: Run, step: int, index: int) -> None:
        if step != run.step:
            return  # it was cancelled meanwhile
        request, now, session, calm = run.request, self.world.now, self.session, self.world.calm
        number = request[0]
        passed = request.deadline is not None and now >= request.deadline
        if self.habits.looks and (request.cancelled or passed):
            code = Code.CANCELLED if request.cancelled else Code.TIME_PASSED
            self.world.events[f"worker ended a request early: {code}"] += 1
            accepted = session.error(request, code, "nobody waits any more", now)
        elif not calm and self.world.chance(self.habits.fails):
            self.world.events["handler failed"] += 1
            code, detail = self.world.rng.choice([(500, []), (418, [b"a detail"]), (404, [b""])])
            accepted = session.error(request, code, failure(number, run.name, index).decode(), now, detail)
        elif not calm and self._x1 and self.habits.too_large and self.world.chance(0.02):
            self.world.events["reply too large"] += 1
            accepted = session.final(request, [b"|"] * self.habits.too_large, now)
        elif index == run.parts:
            accepted = session.final(request, [end(number, run.name, run.parts)], now)
        elif session.partial(request, [part(number, run.name, index)], now):
            self._work(run, index + 1)
            self._step()
            return
        else:
            self.world.events["stream broken off by its worker"] += 1
            accepted = session.error(request, Code.CANCELLED, "cancelled", now)
        self.world.events["reply too late for its worker"] += not accepted
        del self.runs[id(request)]
        self._step()

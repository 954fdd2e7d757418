"""The rules, as somebody sees them who stands at the broker's socket and notes down what goes in and what comes out.

`Referee` stands in for a `Broker`: it hands each call on and judges what came of it; `Broken` says which rule was
broken.  It knows the rules of CONFORMANCE.md and of X1, and nothing of how the broker keeps them, except in `_books`,
which compares what the referee knows with the broker's registry.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from zmdp.mdp import wire
from zmdp.mdp.broker import GIVEN_UP, Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.journal import Drop
from zmdp.mdp.registry import REQUEST_OVERHEAD, Request
from zmdp.mdp.wire import MMI, FromPeer, Invalid, Message, Route

from .rules import Broken, check

Key = tuple[bytes, bytes]
"""A request: the connection it came from, and the first frame of its body, which no other request there has."""

EPSILON = 1e-6
GRAIN = 0.01
"""Seconds by which a timer may be late."""
CODES = {
    Drop.CANCELLED: Code.CANCELLED,
    Drop.CLOSING: Code.DRAINING,
    Drop.DRAINING: Code.DRAINING,
    Drop.EXPIRED: Code.TIME_PASSED,
    Drop.LOST_AFTER_PARTIAL: Code.WORKER_LOST,
    Drop.MEMORY_FULL: Code.QUEUE_FULL,
    Drop.NO_WORKER: Code.NO_WORKER,
    Drop.QUEUE_FULL: Code.QUEUE_FULL,
    Drop.TOO_MANY_SERVICES: Code.QUEUE_FULL,
    Drop.TTL_PASSED: Code.TIME_PASSED,
    Drop.WORKERS_LOST: Code.WORKER_LOST,
}
"""What an X1 client is told of each reason to drop its request.  One whose client is gone is told to nobody."""
HEADERS = {wire.CX1, wire.WX1, wire.C02, wire.W02, wire.C01, wire.W01}


@dataclass(eq=False)
class Ticket:
    """A request that the broker was given and has not ended."""

    key: Key
    route: Route
    header: bytes
    service: bytes
    size: int
    """Bytes it takes while it waits."""
    options: wire.Options = field(default_factory=wire.Options)
    deadline: float = math.inf
    """When its ttl has passed."""
    waited: bool = False
    """It has waited, so its ttl is not what it was."""
    deaths: int = 0
    """Workers that were lost while they had it."""
    attempts: int = 0
    """Those of them that count for certain: they were alive when they got it (C17)."""
    holder: Route | None = None
    """The seat of the worker that has it."""
    orphaned: bool = False
    """Its worker was lost in this step."""
    queued: bool = False
    since: int = 0
    """When it began to wait, as a number in the order of events."""
    since_time: float = 0.0
    returned: bool = False
    """It waits for the second time or more (C17)."""
    streamed: bool = False
    """A PARTIAL of it has gone to the client."""
    abandoned: bool = False
    collected: list[bytes] = field(default_factory=list)
    """For a 0.1 client, the frames of the PARTIALs so far."""

    @property
    def client(self) -> bytes:
        return self.key[0]

    @property
    def numbered(self) -> bool:
        """It is X1's: it ends in exactly one FINAL or ERROR, and its route is its number."""
        return self.header == wire.CX1

    @property
    def rank(self) -> tuple[int, int]:
        """The order among the waiting requests of one client: those that came back first, the latest of them first."""
        return (0, -self.since) if self.returned else (1, self.since)


@dataclass(eq=False)
class Seat:
    """A registered worker."""

    route: Route
    header: bytes
    service: bytes
    idle_since: int
    last_seen: float
    last_sent: float
    began: float = 0.0
    """When it got what it holds."""
    held: Ticket | None = None
    round: int = 0
    """Which call from outside had it given what it holds: what is sent because of one is sent in order."""
    reached: bool = True
    """What it holds has not failed to reach it."""
    alive: bool = True
    """It was heard within the interval before it got what it holds."""


@dataclass
class Step:
    """One call of the broker: what it was about, and what must have come of it."""

    now: float
    tick: bool = False
    sender: Route | None = None
    """The seat of the worker that sent a command that is in order."""
    leavers: frozenset[Route] = frozenset()
    """The seats of those that are to be forgotten."""
    gone: bytes | None = None
    """The peer that is not connected any more."""
    answer: Message | None = None
    """What a client is to get."""
    complaint: tuple[Route, int] | None = None
    """The number and code of the ERROR that a client is to get for what it sent."""
    cancelled: Ticket | None = None
    """The request that its client has cancelled."""
    failed: Ticket | None = None
    """The request of a 0.2 or 0.1 client that a worker has just ended with ERROR."""
    told: list[tuple[Route, bytes, int]] = field(default_factory=list)
    """Number, service and code of each ERROR that the broker has sent of its own accord."""
    withdrawn: list[tuple[Route, bytes]] = field(default_factory=list)
    """Seat and client of each CANCEL that it has sent."""
    refusal: Message | None = None
    """The DISCONNECT that the sender is to get."""
    fresh: Ticket | None = None
    """The request that has just come."""
    ended: Ticket | None = None
    """The request whose FINAL has just come."""
    lost: dict[Route, Seat] = field(default_factory=dict)


class Referee:
    """A broker under watch."""

    def __init__(self, broker: Broker, events: Counter[str]) -> None:
        self.broker = broker
        self.limits = broker.limits
        self.tickets: dict[Key, Ticket] = {}
        self.seats: dict[Route, Seat] = {}
        """The workers, by what tells them apart: `_place`."""
        self.numbers: dict[Route, Ticket] = {}
        """The X1 requests among the tickets."""
        self._over: set[Route] = set()
        """The numbers of those that have ended."""
        self.given_up: dict[bytes, float] = {}
        """Peers that were dropped though they may be there: X1 clients among them are to hear no more."""
        self._turns: dict[tuple[bytes, bytes], int] = {}
        """When a client last had its turn at a service."""
        self._in_front: set[tuple[bytes, bytes]] = set()
        """Services and clients whose request had come back and ended there: the place in front is theirs still."""
        self._round = 0
        self._order = count(1)
        self._dropped: Counter[str] = Counter()
        self._events = events

    # ── the broker's own calls ───────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> list[Message]:
        command = wire.decode_peer(message, max_message=self.limits.max_message, max_frames=self.limits.max_frames)
        self._round += 1
        sends = self.broker.receive(message, now)
        step = Step(now)
        self._took(message, command, sends, step)
        self._judge(sends, step)
        return sends

    def tick(self, now: float) -> list[Message]:
        self._round += 1
        sends = self.broker.tick(now)
        self._judge(sends, Step(now, tick=True))
        self._punctual(now)
        return sends

    def unreachable(self, message: Message, now: float) -> list[Message]:
        command = wire.decode_broker(message[1:])
        for place in self._at(message[0]):
            seat = self.seats[place]
            is_work = isinstance(command, wire.Work) and (message[0], *command.route) == seat.route
            if seat.held is not None and (is_work or seat.round == self._round):
                seat.reached = False
                self._events["REQUEST to a worker that is gone"] += 1
        self.given_up.pop(message[0], None)
        return self._gone(message[0], self.broker.unreachable(message, now), now)

    def gone(self, identity: bytes, now: float) -> list[Message]:
        self.given_up[identity] = now + GIVEN_UP
        return self._gone(identity, self.broker.gone(identity, now), now)

    def _gone(self, identity: bytes, sends: list[Message], now: float) -> list[Message]:
        places = self._at(identity)
        self._events["connection with several slots lost"] += len(places) > 1
        self._judge(sends, Step(now, gone=identity, leavers=places))
        return sends

    def close(self, now: float) -> list[Message]:
        sends = self.broker.close(now)
        told, disconnects = [], []
        for message in sends:
            match wire.decode_broker(message[1:]):
                case wire.Error(route, _, service, code):
                    told.append(((message[0], *route), service, code))
                case wire.Disconnect():
                    disconnects.append(message)
                case wire.Withdraw(route):
                    place = self._place((message[0], *route), wire.WX1)
                    check(self.seats[place].header == wire.WX1, f"X1: CANCEL to {place!r}")
                case _:
                    raise Broken(f"the broker ends and sends {message}")
        expected = [(ticket.route, ticket.service, Code.DRAINING) for ticket in self.numbers.values()]
        check(Counter(told) == Counter(expected), f"X1: the broker ends and tells {told}, not {expected}")
        seats = [wire.disconnect(seat.route, seat.header) for seat in self.seats.values()]
        check(sorted(disconnects) == sorted(seats), f"C16: the broker ends and sends {disconnects}")
        self._events["X1: the broker ended first"] += len(told)
        return sends

    def _at(self, identity: bytes) -> frozenset[Route]:
        """The seats of all workers of a connection."""
        return frozenset(place for place in self.seats if place[0] == identity)

    def _place(self, route: Route, header: bytes) -> Route:
        """The seat of who says that: in X1 one for each envelope of a connection, else one for each connection."""
        for place in (route, route[:1]):
            if place in self.seats and self.seats[place].route == route:
                return place  # under that envelope there is only one, whatever it speaks
        return route if header == wire.WX1 else route[:1]

    def _judge(self, sends: list[Message], step: Step) -> None:
        self._forgot(step)
        beats = self._sent(sends, step)
        about = (step.fresh, step.ended, step.cancelled, step.failed, step.complaint, step.leavers, step.gone)
        quiet = beats == len(sends) and not any(about) and not step.lost
        if not quiet or not dict.__eq__(self.broker.stats.dropped, self._dropped):
            self._books(step)
        # else nothing is to have changed: most steps are heartbeats.  If something has, the next step tells.

    # ── what came in ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _took(self, message: Message, command: FromPeer | Invalid, sends: list[Message], step: Step) -> None:
        """The broker has dealt with `command`: what must have come of it."""
        if isinstance(command, Invalid):
            self._malformed(message, step)  # C15
        elif isinstance(command, wire.Request | wire.Cancel) or command.header == wire.CX1:
            if command.header == wire.CX1 and self._is_given_up(command.route[0], step.now):
                self._events["X1: slow reader ignored"] += 1
            else:
                self._client_sent(command, sends, step)
        else:
            self._worker_sent(command, step)

    def _is_given_up(self, identity: bytes, now: float) -> bool:
        if now >= self.given_up.get(identity, 0.0):
            return False
        self.given_up[identity] = now + GIVEN_UP  # what it has just said is not answered either
        return True

    def _malformed(self, message: Message, step: Step) -> None:
        route = answerable(message)
        if route is not None and not self._is_given_up(route[0], step.now):
            oversized = len(message) > self.limits.max_frames or sum(map(len, message)) > self.limits.max_message
            step.complaint = route, Code.TOO_LARGE if oversized else Code.MALFORMED
            self._events["X1: malformed"] += 1

    def _client_sent(self, command: FromPeer, sends: list[Message], step: Step) -> None:
        match command:
            case wire.Request(route, wire.CX1) if route in self.numbers:
                step.complaint = route, Code.MALFORMED
                self._events["X1: number used twice"] += 1
            case wire.Request(route, header, service, body) if service.startswith(MMI):
                step.answer = wire.answer(route, header, True, service, self._mmi(service, body, sends))
                if header == wire.CX1:
                    self._over.add(route)
            case wire.Request():
                self._requested(command, step)
            case wire.Cancel(route, _, service):
                ticket = self.numbers.get(route)
                if ticket is not None and ticket.service == service:
                    step.cancelled = ticket
                elif ticket is not None or route not in self._over:
                    step.complaint = route, Code.MALFORMED
                    self._events["X1: CANCEL of nothing"] += 1
                else:
                    self._events["X1: CANCEL met the end of the request"] += 1
            case wire.Heartbeat(route):
                step.answer = wire.heartbeat(route, wire.CX1)
                self._events["X1: heartbeat answered"] += 1

    def _worker_sent(self, command: FromPeer, step: Step) -> None:
        place = self._place(command.route, command.header)
        match command:
            case wire.Disconnect():
                step.leavers = frozenset([place])
            case wire.Ready() if self._seat(command, place, step.now):
                step.sender = place
            case wire.Heartbeat() | wire.Reply() | wire.Failure() if self._expected(command, place):
                step.sender = place
                self.seats[place].last_seen = step.now
                if isinstance(command, wire.Reply):
                    self._replied(command, step)
                elif isinstance(command, wire.Failure):
                    self._failed(command, step)
            case _:
                step.leavers = frozenset([place])
                step.refusal = wire.disconnect(command.route, command.header)
                self._events["late or stray FINAL dropped"] += isinstance(command, wire.Reply) and command.final
                self._events["late or stray ERROR dropped"] += isinstance(command, wire.Failure)

    def _requested(self, command: wire.Request, step: Step) -> None:
        route, header, service, body, options = command
        size = sum(map(len, (*route, *body, options.raw))) + REQUEST_OVERHEAD
        step.fresh = ticket = Ticket((route[0], body[0]), route, header, service, size, options)
        if options.ttl is not None:
            ticket.deadline = step.now + options.ttl
        check(ticket.key not in self.tickets, "the simulation sent a request twice on one connection")
        self.tickets[ticket.key] = ticket
        if ticket.numbered:
            self.numbers[route] = ticket
            self._events["X1: request"] += 1

    def _mmi(self, service: bytes, body: list[bytes], sends: list[Message]) -> list[bytes]:
        """What the broker is to answer itself (C25, C26)."""
        if service == b"mmi.service":
            return [b"200" if any(seat.service == body[0] for seat in self.seats.values()) else b"404"]
        check(len(sends) == 1, f"C25: not one answer to {service!r} but {sends}")
        return sends[0][-1:]  # what it tells is no matter of the protocol

    def _seat(self, command: wire.Ready, place: Route, now: float) -> bool:
        """Register a worker; False if the broker may refuse it, and did."""
        if place in self.seats or command.service.startswith(MMI):
            return False  # C14, C25
        if command.route not in self.broker.registry.workers:
            names = {ticket.service for ticket in self.tickets.values()} | {
                seat.service for seat in self.seats.values()
            }
            names |= {seat.held.service for seat in self.seats.values() if seat.held is not None}
            full = len(self.seats) >= self.limits.max_workers
            full = full or (command.service not in names and len(names) >= self.limits.max_services)
            check(full, f"C7: READY of {place!r} was refused though there is room")
            return False
        self.seats[place] = Seat(command.route, command.header, command.service, next(self._order), now, now)
        return True

    def _expected(self, command: wire.Heartbeat | wire.Reply | wire.Failure, place: Route) -> bool:
        """Whether a valid command is expected too (C14, C18)."""
        seat = self.seats.get(place)
        if seat is None or seat.header != command.header:
            return False
        return isinstance(command, wire.Heartbeat) or (seat.held is not None and seat.held.client == command.client)

    def _replied(self, command: wire.Reply, step: Step) -> None:
        """A PARTIAL or FINAL of the request that the worker has: what its client is to get."""
        seat = self.seats[self._place(command.route, command.header)]
        ticket = seat.held
        assert ticket is not None
        if command.final:
            self._done(seat, ticket)
        if ticket.abandoned:
            self._events["FINAL of an abandoned request goes nowhere"] += command.final
            return
        body = command.body
        if ticket.header == wire.C01:
            ticket.collected += body
            body = ticket.collected
            if self._too_large(ticket) or not command.final:
                return
        ticket.streamed = not command.final
        step.answer = wire.answer(ticket.route, ticket.header, command.final, ticket.service, body)
        step.ended = ticket if command.final else None
        dialects = f"{wire.DIALECTS[ticket.header]} client by {wire.DIALECTS[seat.header]} worker"
        self._events[f"served: {dialects}"] += command.final

    def _failed(self, command: wire.Failure, step: Step) -> None:
        """An ERROR of the request that the worker has: only an X1 client is to get it."""
        seat = self.seats[self._place(command.route, command.header)]
        ticket = seat.held
        assert ticket is not None
        self._done(seat, ticket)
        if ticket.abandoned:
            self._events["ERROR of an abandoned request goes nowhere"] += 1
        elif ticket.numbered:
            step.answer = wire.error(ticket.route, ticket.service, command.code, command.text, command.detail)
            step.ended = ticket
            self._events["X1: ERROR of a worker"] += 1
        else:
            step.failed = ticket

    def _done(self, seat: Seat, ticket: Ticket) -> None:
        """The worker is free again."""
        seat.held = ticket.holder = None
        seat.idle_since = next(self._order)

    def _too_large(self, ticket: Ticket) -> bool:
        frames = ticket.collected
        return len(frames) > self.limits.max_frames or sum(map(len, frames)) > self.limits.max_message

    # ── what went out ────────────────────────────────────────────────────────────────────────────────────────────────

    def _forgot(self, step: Step) -> None:
        """The workers that the broker has forgotten in this step, which has to be for a reason."""
        workers = self.broker.registry.workers
        step.lost = {place: seat for place, seat in self.seats.items() if seat.route not in workers}
        for place, seat in step.lost.items():
            silent = step.tick and step.now >= seat.last_seen + self.limits.patience - EPSILON
            check(place in step.leavers or silent, f"C13: worker {place!r} was forgotten though it is alive")
            del self.seats[place]
            if seat.held is not None:
                seat.held.holder = None
                seat.held.orphaned = True
                seat.held.deaths += seat.reached
                crossed = len(seat.route) > 1 and step.now - seat.began < self.limits.heartbeat
                seat.held.attempts += seat.reached and (seat.alive or not silent) and (silent or not crossed)
        left = step.leavers & self.seats.keys()
        check(not left, f"C10, C14: workers {left} are gone but not forgotten")

    def _sent(self, sends: list[Message], step: Step) -> int:
        """Judge each message; returns how many are heartbeats."""
        answers, disconnects, beats = [], [], 0
        for message in sends:
            match wire.decode_broker(message[1:]):
                case wire.Error(route, _, service, code) if message != step.answer:
                    step.told.append(((message[0], *route), service, code))
                case wire.Heartbeat(_, wire.CX1):
                    answers.append(message)
                    beats += 1
                case wire.Answer() | wire.Error():
                    answers.append(message)
                case wire.Disconnect():
                    disconnects.append(message)
                case wire.Heartbeat(route, header):
                    self._beat(self._place((message[0], *route), header), step)
                    beats += 1
                case wire.Withdraw(route, header, client):
                    place = self._place((message[0], *route), header)
                    step.withdrawn.append((place, client))
                    if place in self.seats:
                        self.seats[place].last_sent = step.now
                case wire.Work(route, header) as work:
                    self._dispatched(self._place((message[0], *route), header), work, step)
                case wire.Invalid():
                    raise Broken(f"the broker sent an invalid message: {message}")
        if answers != ([step.answer] if step.answer else []):
            raise Broken(f"C3, C18, C22, C24: {answers}, not {step.answer}")
        if disconnects != ([step.refusal] if step.refusal else []):
            raise Broken(f"C14, C16: {disconnects}, not {step.refusal}")
        return beats

    def _beat(self, place: Route, step: Step) -> None:
        seat = self.seats.get(place)
        check(seat is not None, f"C16: HEARTBEAT to {place!r}, which is no worker")
        assert seat is not None
        check(step.now >= seat.last_sent + self.limits.heartbeat - EPSILON, "C13: HEARTBEAT within the interval")
        seat.last_sent = step.now

    def _dispatched(self, place: Route, work: wire.Work, step: Step) -> None:
        """A REQUEST goes to a worker."""
        seat = self.seats.get(place)
        ticket = self.tickets.get((work.client, work.body[0]))
        check(seat is not None, f"C16: REQUEST to {place!r}, which is no worker")
        check(ticket is not None, f"C17, C18: {work.body!r} of {work.client!r} was dispatched after its end")
        assert seat is not None
        assert ticket is not None
        check(seat.held is None, f"C6: a second REQUEST to {place!r}")
        check(work.route == seat.route[1:], f"C22: a REQUEST to {place!r} is behind the envelope {work.route}")
        check(seat.service == ticket.service, f"C7: a REQUEST for {ticket.service!r} to a worker of {seat.service!r}")
        check(ticket.holder is None, f"C17: {ticket.key} is with {ticket.holder!r} and goes to {place!r} as well")
        check(not ticket.streamed, f"C17: {ticket.key} goes to a second worker after a PARTIAL")
        check(ticket.attempts < self.limits.max_attempts, f"C17: {ticket.key} is tried too often")
        check(step.now < ticket.deadline, f"X1: {ticket.key} is dispatched after its time has passed")
        if seat.header == wire.WX1:
            self._check_options(ticket, work.options, step.now)
        if ticket.queued:
            check(place == step.sender, f"C21: {ticket.key} waited, but {place!r} was idle")
            # Those whose turn it was before have had it, though their time had passed.
            passed = {route[0] for route, service, code in step.told if (service, code) == (ticket.service, 408)}
            for client in passed:
                self._turns[ticket.service, client] = next(self._order)
            self._in_turn(ticket, passed, step.now)
            self._turns[ticket.service, ticket.client] = next(self._order)
            self._in_front.discard((ticket.service, ticket.client))
        else:
            check(ticket is step.fresh or ticket.orphaned, f"{ticket.key} came from nowhere")
            self._longest_idle(place, seat)
        if ticket.orphaned:
            ticket.collected = []
            self._events["request of a lost worker given to another"] += 1
        ticket.queued = ticket.orphaned = False
        ticket.holder, seat.held, seat.last_sent, seat.began = place, ticket, step.now, step.now
        seat.round = self._round
        seat.reached, seat.alive = True, step.now < seat.last_seen + self.limits.heartbeat - EPSILON

    def _check_options(self, ticket: Ticket, given: wire.Options, now: float) -> None:
        """The client's own, byte for byte; if some of its time is gone, or it is not the first worker, that is told."""
        if not ticket.deaths and (not ticket.waited or ticket.options.ttl is None):
            check(given.raw == ticket.options.raw, f"X1: {ticket.key} had {ticket.options.raw!r} and has {given.raw!r}")
            return
        expected, told = json.loads(ticket.options.raw or b"{}"), json.loads(given.raw or b"{}")
        if ticket.deaths:
            expected["attempt"] = ticket.deaths + 1
        if ticket.options.ttl is not None:
            del expected["ttl"]
            late = told.pop("ttl", math.inf) / 1000 - (ticket.deadline - now)
            check(-EPSILON < late <= 0.001 + EPSILON, f"X1: {ticket.key} has {given.raw!r}, but {late} s less are left")
            self._events["X1: dispatched with what is left of its ttl"] += 1
        check(told == expected, f"X1: {ticket.key} has {told}, not {expected}")
        self._events["X1: dispatched with its attempt"] += "attempt" in told

    def _offered(self, service: bytes) -> bool:
        return any(seat.service == service for seat in self.seats.values())

    def _waiting(self, service: bytes) -> Iterator[Ticket]:
        return (ticket for ticket in self.tickets.values() if ticket.queued and ticket.service == service)

    def _in_turn(self, ticket: Ticket, passed: set[bytes], now: float) -> None:
        """No other request of the service may have gone before `ticket`, but for those of clients that were passed."""
        turn = self._turns.get((ticket.service, ticket.client), 0)
        for other in self._waiting(ticket.service):
            if other is ticket or now >= other.deadline or (other.client in passed and other.client != ticket.client):
                continue
            others = self._turns.get((other.service, other.client), 0)
            if other.client == ticket.client:
                check(ticket.rank <= other.rank, f"C17, C20: {ticket.key} overtook {other.key} of the same client")
            elif (ticket.service, ticket.client) in self._in_front:
                continue
            elif other.returned and others < other.since:
                check(ticket.rank <= other.rank, f"C17: {ticket.key} overtook {other.key}, which had come back")
            elif not ticket.returned:
                since = max(other.since, others)
                check(turn <= since, f"C20: {ticket.key} takes a second turn while {other.key} waits for its first")

    def _longest_idle(self, place: Route, seat: Seat) -> None:
        for other in self.seats.values():
            if other is not seat and other.held is None and other.service == seat.service:
                check(other.idle_since > seat.idle_since, f"C21: {place!r} was not idle longest")

    # ── after each step ──────────────────────────────────────────────────────────────────────────────────────────────

    def _books(self, step: Step) -> None:
        """Each request is in exactly one place: with a worker, in the queue, answered, or dropped and counted."""
        registry = self.broker.registry
        running: dict[Key, Route] = {}
        for worker in registry.workers.values():
            if worker.request is not None and not worker.request.abandoned:
                running[_key(worker.request)] = self._place(worker.route, worker.header)
        requests = [request for client in registry.clients for request in registry.waiting_for(client)]
        queued = {_key(request) for request in requests}
        counted = self._counted()
        dropped: Counter[str] = Counter()
        gone: list[tuple[Ticket, Drop]] = []
        order = next(self._order)  # one for all: which of two workers was lost first in this step cannot be seen
        for key, ticket in list(self.tickets.items()):
            if key in queued:
                if ticket.holder is not None or key in running:
                    raise Broken(f"{key} is in two places")
                if not ticket.queued or ticket.streamed or ticket is step.ended:
                    self._queued(ticket, step, order)
            elif key in running:
                if ticket.holder != running[key]:
                    raise Broken(f"{key} is with {running[key]!r}, not with {ticket.holder!r}")
            else:
                self._remove(ticket)
                if ticket is not step.ended:
                    reason = self._reason(ticket, step, counted - dropped)
                    dropped[reason] += 1
                    gone.append((ticket, reason))
                    ticket.abandoned = True
            ticket.orphaned = False
        check(len(queued) + len(running) == len(self.tickets), "a request lives on after its end")
        if step.gone is not None:
            check(
                all(ticket.client != step.gone for ticket in self.tickets.values()), "a client is gone, a request not"
            )
        check(step.cancelled is None or step.cancelled.abandoned, "X1: a request goes on after its CANCEL")
        if counted or dropped:
            check(counted == dropped, f"requests were dropped for {dict(dropped)}, but {dict(counted)} were counted")
        self._told(gone, step)
        self._withdrawn(gone, step)
        self._registry(step, requests)

    def _counted(self) -> Counter[str]:
        """How many requests the broker has dropped in this step, by reason."""
        dropped = self.broker.stats.dropped
        if dict.__eq__(dropped, self._dropped):
            return Counter()
        before, self._dropped = self._dropped, dropped.copy()
        return dropped - before

    def _queued(self, ticket: Ticket, step: Step, order: int) -> None:
        """The broker lets `ticket` wait."""
        check(ticket is not step.ended, f"{ticket.key} waits after its FINAL")
        check(not ticket.streamed, f"C17: {ticket.key} waits for a second worker after a PARTIAL")
        check(ticket is step.fresh or ticket.orphaned, f"{ticket.key} went back to the queue without a loss")
        ticket.returned = ticket.orphaned
        ticket.queued = ticket.waited = True
        ticket.since, ticket.since_time = order, step.now
        ticket.collected = []
        self._events["request of a lost worker back in the queue"] += ticket.orphaned

    def _remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.key]
        if ticket.queued and ticket.returned:
            self._in_front.add((ticket.service, ticket.client))
        if ticket.numbered:
            del self.numbers[ticket.route]
            self._over.add(ticket.route)

    def _told(self, gone: list[tuple[Ticket, Drop]], step: Step) -> None:
        """Each X1 client is told of the end of each of its requests, and of what it did wrong, and nobody else."""
        expected = []
        for ticket, reason in gone:
            if ticket.numbered and reason is not Drop.CLIENT_GONE:
                expected.append((ticket.route, ticket.service, CODES[reason]))
                where = "with a worker" if ticket.holder else "waiting" if ticket.queued else "at once"
                self._events[f"X1: {reason}, {where}"] += 1
        if not step.told and not expected and step.complaint is None:
            return
        told = list(step.told)
        if step.complaint is not None:
            complaints = [each for each in told if (each[0], each[2]) == step.complaint]
            check(len(complaints) == 1, f"X1: {step.complaint} was not told, but {told}")
            told.remove(complaints[0])
        check(Counter(told) == Counter(expected), f"X1: the ERRORs {told} were sent, not {expected}")

    def _withdrawn(self, gone: list[tuple[Ticket, Drop]], step: Step) -> None:
        """CANCEL goes to the X1 workers whose request has just been dropped, and to no other."""
        held = [(ticket.holder, ticket.client) for ticket, _ in gone if ticket.holder is not None]
        expected = [(worker, client) for worker, client in held if self.seats[worker].header == wire.WX1]
        if not step.withdrawn and not expected:
            return
        withdrawn = [each for each in step.withdrawn if each[0] not in step.lost]
        check(Counter(withdrawn) == Counter(expected), f"X1: CANCEL went to {withdrawn}, not to {expected}")
        for place in {place for place, _ in step.withdrawn} & set(step.lost):
            seat = step.lost[place]  # it had its own request
            check(seat.header == wire.WX1 and seat.held is not None, f"X1: CANCEL went to {place!r}, which is gone")
        self._events["X1: CANCEL forwarded"] += step.cancelled is not None and len(withdrawn)

    def _registry(self, step: Step, requests: list[Request]) -> None:
        """The registry's own books are in order; `requests` are those that wait."""
        registry = self.broker.registry
        for service in registry.services.values():
            if service.idle and service.queue.size:
                raise Broken(f"{service.name!r} has idle workers and queued requests")
            if not (service.workers or service.queue.size):
                raise Broken(f"nothing is left of {service.name!r}, but its name")
        if step.fresh is not None and step.fresh.queued:
            waiting = sum(1 for _ in self._waiting(step.fresh.service))
            check(waiting <= self.limits.max_queue, f"{step.fresh.service!r} has more than max_queue requests")
        check(registry.numbered.keys() == self.numbers.keys(), "X1: the numbers are not those of the requests")
        for ticket in self.numbers.values():
            if ticket.queued and not ticket.options.wait and not self._offered(ticket.service):
                raise Broken(f"X1: {ticket.key} waits, but not for any worker")
        check(len(registry.services) <= self.limits.max_services, "more than max_services services")
        check(len(registry.workers) <= self.limits.max_workers, "more than max_workers workers")
        routes = [seat.route for seat in self.seats.values()]
        check(list(registry.workers) == routes, "the registered workers are not those that sent READY")
        held_by = sorted(worker.route for held in registry.connections.values() for worker in held.values())
        check(held_by == sorted(routes), "the workers of the connections are not those that are registered")
        busy = [worker.request for worker in registry.workers.values() if worker.request is not None]
        held = [request for client in registry.clients.values() for request in client.running]
        check(registry.running == len(busy) == len(held), "the count of running requests is wrong")
        sizes = [request.size for request in requests]
        check(registry.queued == len(requests), "the count of queued requests is wrong")
        check(registry.queued == sum(s.queue.size for s in registry.services.values()), "a queue's size is wrong")
        check(registry.queued_bytes == sum(sizes), "the bytes of queued requests are wrong")

    def _reason(self, ticket: Ticket, step: Step, counted: Counter[str]) -> Drop:
        """Why it was right to drop `ticket`; where there are two reasons, the one that was `counted`."""
        if ticket is step.fresh:
            return self._refusal(ticket, step.now)
        if ticket is step.cancelled:
            self._events["X1: CANCEL of a waiting request"] += ticket.queued
            return Drop.CANCELLED
        if ticket is step.failed:
            return Drop.HANDLER_FAILED
        if ticket.client == step.gone:
            return Drop.CLIENT_GONE
        if ticket.orphaned and ticket.streamed:
            return Drop.LOST_AFTER_PARTIAL
        passed = step.now >= ticket.deadline - EPSILON
        alone = not ticket.options.wait and not self._offered(ticket.service)
        if ticket.orphaned and (ticket.deaths >= self.limits.max_attempts or alone):
            certain = ticket.attempts >= self.limits.max_attempts or alone
            if certain or not passed or counted[Drop.WORKERS_LOST]:
                return Drop.WORKERS_LOST
        if ticket.queued and alone:
            return Drop.WORKERS_LOST if ticket.deaths else Drop.NO_WORKER  # 404 says that nobody has begun with it
        if passed:
            return Drop.TTL_PASSED
        if ticket.queued and step.now >= ticket.since_time + self.limits.expiry - EPSILON:
            return Drop.EXPIRED
        if ticket.header == wire.C01 and self._too_large(ticket):
            return Drop.REPLY_TOO_LARGE
        raise Broken(f"{ticket.key} was lost")

    def _refusal(self, ticket: Ticket, now: float) -> Drop:
        registry = self.broker.registry
        if self.broker.draining:
            return Drop.DRAINING
        if now >= ticket.deadline:
            return Drop.TTL_PASSED
        if not ticket.options.wait and not self._offered(ticket.service):
            return Drop.NO_WORKER
        if ticket.service not in registry.services and len(registry.services) >= self.limits.max_services:
            return Drop.TOO_MANY_SERVICES
        if sum(1 for _ in self._waiting(ticket.service)) >= self.limits.max_queue:
            return Drop.QUEUE_FULL
        full = registry.queued_bytes + ticket.size > self.limits.max_queued_bytes
        check(full, f"{ticket.key} was refused without a reason")
        return Drop.MEMORY_FULL

    def _punctual(self, now: float) -> None:
        """After a tick nothing is overdue; the broker's timers may be late by a fraction of an interval."""
        heartbeat, expiry = 1.1 * self.limits.heartbeat, 1.01 * self.limits.expiry + 0.01
        for place, seat in self.seats.items():
            if now >= seat.last_sent + heartbeat:
                raise Broken(f"C13: {place!r} was sent nothing for an interval")
            if now >= seat.last_seen + self.limits.patience + heartbeat:
                raise Broken(f"C13: {place!r} is dead, but kept")
        for ticket in self.tickets.values():
            if ticket.queued and now >= ticket.since_time + expiry:
                raise Broken(f"C12: {ticket.key} has not expired")
            if now >= ticket.deadline + GRAIN + EPSILON:
                raise Broken(f"X1: {ticket.key} lives on after its time has passed")


def answerable(message: Message) -> Route | None:
    """Where an X1 client that sent something malformed is told so: its envelope, if it can be read."""
    if message[1:2] and message[1] in HEADERS:
        return None
    for at, frame in enumerate(message[1 : 1 + wire.MAX_ENVELOPE], 1):
        if len(frame) > wire.MAX_NAME:
            break
        if not frame:
            return tuple(message[: at + 1]) if message[at + 1 : at + 2] == [wire.CX1] else None
    return None


def _key(request: Request) -> Key:
    return request.client.identity, request.body[0]

"""The rules, as somebody sees them who stands at the broker's socket and notes down what goes in and what comes out.

`Referee` stands in for a `Broker`: it hands each call on and judges what came of it; `Broken` says which rule was
broken.  It knows the rules of CONFORMANCE.md and nothing of how the broker keeps them, except in `_books`, which
compares what the referee knows with the broker's registry.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from zmdp.mdp import wire
from zmdp.mdp.broker import Broker
from zmdp.mdp.journal import Drop
from zmdp.mdp.registry import REQUEST_OVERHEAD, Request
from zmdp.mdp.wire import MMI, FromPeer, Invalid, Message, Route

from .rules import Broken, check

Key = tuple[bytes, bytes]
"""A request: the connection it came from, and the first frame of its body, which no other request there has."""

EPSILON = 1e-6


@dataclass(eq=False)
class Ticket:
    """A request that the broker was given and has not ended."""

    key: Key
    route: Route
    header: bytes
    service: bytes
    size: int
    """Bytes it takes while it waits."""
    deaths: int = 0
    """Workers that were lost while they had it."""
    attempts: int = 0
    """Those of them that count for certain: they were alive when they got it (C17)."""
    holder: bytes | None = None
    """The worker that has it."""
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
    held: Ticket | None = None
    reached: bool = True
    """What it holds has not failed to reach it."""
    alive: bool = True
    """It was heard within the interval before it got what it holds."""


@dataclass
class Step:
    """One call of the broker: what it was about, and what must have come of it."""

    now: float
    tick: bool = False
    sender: bytes | None = None
    """The worker that sent a command that is in order."""
    leaver: bytes | None = None
    """The peer that is to be forgotten."""
    gone: bytes | None = None
    """The peer that is not connected any more."""
    answer: Message | None = None
    """What a client is to get."""
    refusal: Message | None = None
    """The DISCONNECT that the sender is to get."""
    fresh: Ticket | None = None
    """The request that has just come."""
    ended: Ticket | None = None
    """The request whose FINAL has just come."""
    lost: dict[bytes, Seat] = field(default_factory=dict)


class Referee:
    """A broker under watch."""

    def __init__(self, broker: Broker, events: Counter[str]) -> None:
        self.broker = broker
        self.limits = broker.limits
        self.tickets: dict[Key, Ticket] = {}
        self.seats: dict[bytes, Seat] = {}
        self._turns: dict[tuple[bytes, bytes], int] = {}
        """When a client last had its turn at a service."""
        self._order = count(1)
        self._dropped: Counter[str] = Counter()
        self._events = events

    # ── the broker's own calls ───────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> list[Message]:
        command = wire.decode_peer(message, max_message=self.limits.max_message, max_frames=self.limits.max_frames)
        sends = self.broker.receive(message, now)
        step = Step(now)
        self._took(command, sends, step)
        self._judge(sends, step)
        return sends

    def tick(self, now: float) -> list[Message]:
        sends = self.broker.tick(now)
        self._judge(sends, Step(now, tick=True))
        self._punctual(now)
        return sends

    def unreachable(self, message: Message, now: float) -> list[Message]:
        seat = self.seats.get(message[0])
        if seat is not None and seat.held is not None and isinstance(wire.decode_broker(message[1:]), wire.Work):
            seat.reached = False
            self._events["REQUEST to a worker that is gone"] += 1
        sends = self.broker.unreachable(message, now)
        self._judge(sends, Step(now, gone=message[0], leaver=message[0]))
        return sends

    def gone(self, identity: bytes, now: float) -> list[Message]:
        sends = self.broker.gone(identity, now)
        self._judge(sends, Step(now, gone=identity, leaver=identity))
        return sends

    def _judge(self, sends: list[Message], step: Step) -> None:
        self._forgot(step)
        self._sent(sends, step)
        self._books(step)

    # ── what came in ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _took(self, command: FromPeer | Invalid, sends: list[Message], step: Step) -> None:
        """The broker has dealt with `command`: what must have come of it."""
        match command:
            case wire.Invalid():  # C15
                return
            case wire.Request(route, header, service, body) if service.startswith(MMI):
                step.answer = wire.answer(route, header, True, service, self._mmi(service, body, sends))
            case wire.Request(route, header, service, body):
                size = sum(map(len, (*route, *body))) + REQUEST_OVERHEAD
                step.fresh = Ticket((route[0], body[0]), route, header, service, size)
                check(step.fresh.key not in self.tickets, "the simulation sent a request twice on one connection")
                self.tickets[step.fresh.key] = step.fresh
            case wire.Disconnect(route):
                step.leaver = route[0]
            case wire.Ready(route) if self._seat(command, step.now):
                step.sender = route[0]
            case wire.Heartbeat(route) | wire.Reply(route) if self._expected(command):
                step.sender = route[0]
                self.seats[route[0]].last_seen = step.now
                if isinstance(command, wire.Reply):
                    self._replied(command, step)
            case wire.Ready(route, header) | wire.Heartbeat(route, header) | wire.Reply(route, header):
                step.leaver = route[0]
                step.refusal = wire.disconnect(route, header)
                self._events["late or stray FINAL dropped"] += isinstance(command, wire.Reply) and command.final

    def _mmi(self, service: bytes, body: list[bytes], sends: list[Message]) -> list[bytes]:
        """What the broker is to answer itself (C25, C26)."""
        if service == b"mmi.service":
            return [b"200" if any(seat.service == body[0] for seat in self.seats.values()) else b"404"]
        check(len(sends) == 1, f"C25: not one answer to {service!r} but {sends}")
        return sends[0][-1:]  # what it tells is no matter of the protocol

    def _seat(self, command: wire.Ready, now: float) -> bool:
        """Register a worker; False if the broker may refuse it, and did."""
        identity, registry = command.route[0], self.broker.registry
        if identity in self.seats or command.service.startswith(MMI):
            return False  # C14, C25
        if identity not in registry.workers:
            names = {ticket.service for ticket in self.tickets.values()} | {
                seat.service for seat in self.seats.values()
            }
            names |= {seat.held.service for seat in self.seats.values() if seat.held is not None}
            full = len(self.seats) >= self.limits.max_workers
            full = full or (command.service not in names and len(names) >= self.limits.max_services)
            check(full, f"C7: READY of {identity!r} was refused though there is room")
            return False
        self.seats[identity] = Seat(command.route, command.header, command.service, next(self._order), now, now)
        return True

    def _expected(self, command: wire.Heartbeat | wire.Reply) -> bool:
        """Whether a valid command is expected too (C14, C18)."""
        seat = self.seats.get(command.route[0])
        if seat is None or seat.header != command.header:
            return False
        return isinstance(command, wire.Heartbeat) or (seat.held is not None and seat.held.client == command.client)

    def _replied(self, command: wire.Reply, step: Step) -> None:
        """A PARTIAL or FINAL of the request that the worker has: what its client is to get."""
        seat = self.seats[command.route[0]]
        ticket = seat.held
        assert ticket is not None
        if command.final:
            seat.held = ticket.holder = None
            seat.idle_since = next(self._order)
        if ticket.abandoned:
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

    def _too_large(self, ticket: Ticket) -> bool:
        frames = ticket.collected
        return len(frames) > self.limits.max_frames or sum(map(len, frames)) > self.limits.max_message

    # ── what went out ────────────────────────────────────────────────────────────────────────────────────────────────

    def _forgot(self, step: Step) -> None:
        """The workers that the broker has forgotten in this step, which has to be for a reason."""
        workers = self.broker.registry.workers
        step.lost = {identity: seat for identity, seat in self.seats.items() if identity not in workers}
        for identity, seat in step.lost.items():
            silent = step.tick and step.now >= seat.last_seen + self.limits.patience - EPSILON
            check(identity == step.leaver or silent, f"C13: worker {identity!r} was forgotten though it is alive")
            del self.seats[identity]
            if seat.held is not None:
                seat.held.holder = None
                seat.held.orphaned = True
                seat.held.deaths += seat.reached
                seat.held.attempts += seat.reached and (seat.alive or not silent)
        check(step.leaver not in self.seats, f"C10, C14: worker {step.leaver!r} is gone but not forgotten")

    def _sent(self, sends: list[Message], step: Step) -> None:
        answers, disconnects = [], []
        for message in sends:
            match wire.decode_broker(message[1:]):
                case wire.Answer():
                    answers.append(message)
                case wire.Disconnect():
                    disconnects.append(message)
                case wire.Heartbeat():
                    self._beat(message, step)
                case wire.Work() as work:
                    self._dispatched(message[0], work, step)
                case wire.Invalid():
                    raise Broken(f"the broker sent an invalid message: {message}")
        check(answers == ([step.answer] if step.answer else []), f"C3, C18, C22, C24: {answers}, not {step.answer}")
        check(disconnects == ([step.refusal] if step.refusal else []), f"C14, C16: {disconnects}, not {step.refusal}")

    def _beat(self, message: Message, step: Step) -> None:
        seat = self.seats.get(message[0])
        check(seat is not None, f"C16: HEARTBEAT to {message[0]!r}, which is no worker")
        assert seat is not None
        check(step.now >= seat.last_sent + self.limits.heartbeat - EPSILON, "C13: HEARTBEAT within the interval")
        seat.last_sent = step.now

    def _dispatched(self, identity: bytes, work: wire.Work, step: Step) -> None:
        """A REQUEST goes to a worker."""
        seat = self.seats.get(identity)
        ticket = self.tickets.get((work.client, work.body[0]))
        check(seat is not None, f"C16: REQUEST to {identity!r}, which is no worker")
        check(ticket is not None, f"C17, C18: {work.body!r} of {work.client!r} was dispatched after its end")
        assert seat is not None
        assert ticket is not None
        check(seat.held is None, f"C6: a second REQUEST to {identity!r}")
        check(seat.service == ticket.service, f"C7: a REQUEST for {ticket.service!r} to a worker of {seat.service!r}")
        check(ticket.holder is None, f"C17: {ticket.key} is with {ticket.holder!r} and goes to {identity!r} as well")
        check(not ticket.streamed, f"C17: {ticket.key} goes to a second worker after a PARTIAL")
        check(ticket.attempts < self.limits.max_attempts, f"C17: {ticket.key} is tried too often")
        if ticket.queued:
            check(identity == step.sender, f"C21: {ticket.key} waited, but {identity!r} was idle")
            self._in_turn(ticket)
            self._turns[ticket.service, ticket.client] = next(self._order)
        else:
            check(ticket is step.fresh or ticket.orphaned, f"{ticket.key} came from nowhere")
            self._longest_idle(identity, seat)
        if ticket.orphaned:
            ticket.collected = []
            self._events["request of a lost worker given to another"] += 1
        ticket.queued = ticket.orphaned = False
        ticket.holder, seat.held, seat.last_sent = identity, ticket, step.now
        seat.reached, seat.alive = True, step.now < seat.last_seen + self.limits.heartbeat - EPSILON

    def _waiting(self, service: bytes) -> Iterator[Ticket]:
        return (ticket for ticket in self.tickets.values() if ticket.queued and ticket.service == service)

    def _in_turn(self, ticket: Ticket) -> None:
        """No other request of the service may have gone before `ticket`."""
        turn = self._turns.get((ticket.service, ticket.client), 0)
        for other in self._waiting(ticket.service):
            if other is ticket:
                continue
            others = self._turns.get((other.service, other.client), 0)
            if other.client == ticket.client:
                check(ticket.rank <= other.rank, f"C17, C20: {ticket.key} overtook {other.key} of the same client")
            elif other.returned and others < other.since:
                check(ticket.rank <= other.rank, f"C17: {ticket.key} overtook {other.key}, which had come back")
            elif not ticket.returned:
                since = max(other.since, others)
                check(turn <= since, f"C20: {ticket.key} takes a second turn while {other.key} waits for its first")

    def _longest_idle(self, identity: bytes, seat: Seat) -> None:
        for other in self.seats.values():
            if other is not seat and other.held is None and other.service == seat.service:
                check(other.idle_since > seat.idle_since, f"C21: {identity!r} was not idle longest")

    # ── after each step ──────────────────────────────────────────────────────────────────────────────────────────────

    def _books(self, step: Step) -> None:
        """Each request is in exactly one place: with a worker, in the queue, answered, or dropped and counted."""
        registry = self.broker.registry
        running: dict[Key, bytes] = {}
        for worker in registry.workers.values():
            if worker.request is not None and not worker.request.abandoned:
                running[_key(worker.request)] = worker.identity
        requests = [request for client in registry._waiting for request in registry.waiting_for(client)]
        queued = {_key(request): request for request in requests}
        dropped: Counter[str] = Counter()
        order = next(self._order)  # one for all: which of two workers was lost first in this step cannot be seen
        for key, ticket in list(self.tickets.items()):
            if key in queued:
                check(ticket.holder is None and key not in running, f"{key} is in two places")
                check(ticket is not step.ended, f"{key} waits after its FINAL")
                check(not ticket.streamed, f"C17: {key} waits for a second worker after a PARTIAL")
                if not ticket.queued:
                    check(ticket is step.fresh or ticket.orphaned, f"{key} went back to the queue without a loss")
                    ticket.returned = ticket.orphaned
                    ticket.queued, ticket.since, ticket.since_time = True, order, step.now
                    ticket.collected = []
                    self._events["request of a lost worker back in the queue"] += ticket.orphaned
            elif key in running:
                check(ticket.holder == running[key], f"{key} is with {running[key]!r}, not with {ticket.holder!r}")
            else:
                del self.tickets[key]
                if ticket is not step.ended:
                    dropped[self._reason(ticket, step)] += 1
                    ticket.abandoned = True
            ticket.orphaned = False
        check(all(key in self.tickets for key in (*queued, *running)), "a request lives on after its end")
        check(all(ticket.client != step.gone for ticket in self.tickets.values()), "a client is gone, its request not")
        counted = self.broker.stats.dropped - self._dropped
        check(counted == dropped, f"requests were dropped for {dict(dropped)}, but {dict(counted)} were counted")
        self._dropped = self.broker.stats.dropped.copy()

        self._registry(step, requests)

    def _registry(self, step: Step, requests: list[Request]) -> None:
        """The registry's own books are in order; `requests` are those that wait."""
        registry = self.broker.registry
        for service in registry.services.values():
            check(not (service.idle and service.queue.size), f"{service.name!r} has idle workers and queued requests")
            check(bool(service.workers or service.queue.size), f"nothing is left of {service.name!r}, but its name")
        if step.fresh is not None and step.fresh.queued:
            waiting = sum(1 for _ in self._waiting(step.fresh.service))
            check(waiting <= self.limits.max_queue, f"{step.fresh.service!r} has more than max_queue requests")
        check(len(registry.services) <= self.limits.max_services, "more than max_services services")
        check(len(registry.workers) <= self.limits.max_workers, "more than max_workers workers")
        check(list(registry.workers) == list(self.seats), "the registered workers are not those that sent READY")
        busy = [worker.request for worker in registry.workers.values() if worker.request is not None]
        held = [request for requests in registry._worked_on.values() for request in requests]
        check(registry.running == len(busy) == len(held), "the count of running requests is wrong")
        sizes = [request.size for request in requests]
        check(registry.queued == len(requests), "the count of queued requests is wrong")
        check(registry.queued == sum(s.queue.size for s in registry.services.values()), "a queue's size is wrong")
        check(registry.queued_bytes == sum(sizes), "the bytes of queued requests are wrong")

    def _reason(self, ticket: Ticket, step: Step) -> Drop:
        """Why it was right to drop `ticket`."""
        if ticket is step.fresh:
            return self._refusal(ticket)
        if ticket.client == step.gone:
            return Drop.CLIENT_GONE
        if ticket.orphaned and ticket.streamed:
            return Drop.LOST_AFTER_PARTIAL
        if ticket.orphaned and ticket.deaths >= self.limits.max_attempts:
            return Drop.WORKERS_LOST
        if ticket.queued and step.now >= ticket.since_time + self.limits.expiry - EPSILON:
            return Drop.EXPIRED
        if ticket.header == wire.C01 and self._too_large(ticket):
            return Drop.REPLY_TOO_LARGE
        raise Broken(f"{ticket.key} was lost")

    def _refusal(self, ticket: Ticket) -> Drop:
        registry = self.broker.registry
        if self.broker.draining:
            return Drop.DRAINING
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
        for identity, seat in self.seats.items():
            check(now < seat.last_sent + heartbeat, f"C13: {identity!r} was sent nothing for an interval")
            check(now < seat.last_seen + self.limits.patience + heartbeat, f"C13: {identity!r} is dead, but kept")
        for ticket in self.tickets.values():
            check(not ticket.queued or now < ticket.since_time + expiry, f"C12: {ticket.key} has not expired")


def _key(request: Request) -> Key:
    return request.client, request.body[0]

"""What must be true at the broker after each command, by the rules alone, and what its peers must be told.

`Ledger` follows the commands one by one.  It knows the rules of CONFORMANCE.md and of X1, and nothing of the broker.
"""

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from zmdp.mdp import wire
from zmdp.mdp.broker.core.clients import GIVEN_UP
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import Loss, Refusal, Stats
from zmdp.mdp.broker.core.records import CLIENT_OVERHEAD, FRAME_OVERHEAD, GROUP_OVERHEAD, REQUEST_OVERHEAD
from zmdp.mdp.codes import Code
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.wire import MMI, Kind, Reason, RequestId, Route

from .policy import Waiting
from .reading import Peer, Said, peer_of
from .rules import EPSILON, check
from .throttle import Throttle

Key = tuple[Peer, bytes]
"""A request: its client, and the first frame of its body, which no other request there has."""

CODES = {
    Drop.CANCELLED: Code.CANCELLED,
    Drop.CLOSING: Code.DRAINING,
    Drop.DRAINING: Code.DRAINING,
    Drop.EXPIRED: Code.TIME_PASSED,
    Drop.LOST_AFTER_PARTIAL: Code.WORKER_LOST,
    Drop.LIMITED: Code.QUEUE_FULL,
    Drop.LIMIT_PASSED: Code.TIME_PASSED,
    Drop.MEMORY_FULL: Code.QUEUE_FULL,
    Drop.NOT_ALLOWED: Code.NOT_ALLOWED,
    Drop.NOT_ON_BEHALF: Code.NOT_ALLOWED,
    Drop.NO_WORKER: Code.NO_WORKER,
    Drop.QUEUE_FULL: Code.QUEUE_FULL,
    Drop.REPLY_TOO_LARGE: Code.TOO_LARGE,
    Drop.ROLE_MEMORY_FULL: Code.QUEUE_FULL,
    Drop.ROLE_OUTSTANDING: Code.QUEUE_FULL,
    Drop.ROLE_QUEUED: Code.QUEUE_FULL,
    Drop.TOO_MANY_SERVICES: Code.QUEUE_FULL,
    Drop.TOO_MANY_UNSERVED: Code.QUEUE_FULL,
    Drop.TTL_PASSED: Code.TIME_PASSED,
    Drop.WORKERS_LOST: Code.WORKER_LOST,
    Drop.LAST_WORKER_LOST: Code.WORKER_LOST,
}
"""What an X1 client is told of each reason to drop its request.  One whose client is gone is told to nobody."""
BROKERS = {403, 404, 413, 429, 502, 503}
"""Codes that need a detail if they are the service's own; no worker has a reason to send them for the broker."""
ANSWERED = {b"mmi.service", b"mmi.services", b"mmi.workers", b"mmi.stats", b"mmi.broker"}


@dataclass(eq=False)
class Ticket:
    """A request that has not ended, for its client or for its worker."""

    client: Peer
    route: Route
    header: bytes
    service: bytes
    body: tuple[bytes, ...]
    options: wire.Options
    number: RequestId
    since: float
    """When it began to wait."""
    role: str = ""
    deadline: float = math.inf
    """When its ttl has passed."""
    waits: bool = False
    deaths: int = 0
    """Workers that were lost with it, and may be lost because of it (C17)."""
    handed: int = 0
    """Workers that have received it and not returned it."""
    seat: "Seat | None" = None
    address: int = 0
    streamed: bool = False
    """A PARTIAL of it has gone to the client."""
    collected: list[bytes] | None = None
    """For a 0.1 client, the frames of the PARTIALs so far."""
    over: bool = False
    """It has ended for its client."""

    @property
    def key(self) -> Key:
        return self.client, self.body[0]

    @property
    def numbered(self) -> bool:
        """It is X1's: it ends in exactly one FINAL or ERROR."""
        return self.header == wire.CX1

    def __post_init__(self) -> None:
        self._own_size = REQUEST_OVERHEAD + _size(self.body) + len(self.options.raw)
        self._own_size += GROUP_OVERHEAD if self.options.group else 0

    @property
    def size(self) -> int:
        """Bytes charged for it until it ends (C40)."""
        return self._own_size if self.collected is None else self._own_size + _size(self.collected)

    def __repr__(self) -> str:
        return f"{self.body[0].decode(errors='replace')} of {self.client[-1].decode(errors='replace')}"


def _size(frames: Sequence[bytes]) -> int:
    return sum(len(frame) + FRAME_OVERHEAD for frame in frames)


@dataclass(eq=False)
class Held:
    """A request at a worker."""

    ticket: Ticket
    turn: int
    doubtful: bool
    """The worker had been silent for so long that it may have been dead already: C17 does not count it."""


@dataclass(eq=False)
class Seat:
    """A registered worker."""

    route: Route
    header: bytes
    service: bytes
    credit: int
    changed: int
    """When it was last given or done with something, or its credit was told, in the order of events."""
    last_seen: float
    last_sent: float
    role: str = ""
    held: dict[int, Held] = field(default_factory=dict)
    leaving: bool = False
    warm: bool = False
    """It speaks X1, and the last request that it ended was answered with a FINAL."""
    unreached_from: int = -1
    """The first turn of which it has received nothing; -1 if it is connected."""

    @property
    def x1(self) -> bool:
        return self.header == wire.WX1

    @property
    def free(self) -> int:
        return 0 if self.leaving else max(0, self.credit - len(self.held))

    @property
    def suspects(self) -> int:
        return sum(1 for held in self.held.values() if held.ticket.deaths)

    def __repr__(self) -> str:
        return f"worker {self.route[0].decode(errors='replace')}"


class Ledger:
    """Requests, workers, and what peers must be told."""

    def __init__(self, limits: Limits, known: Container[bytes], events: Counter[str]) -> None:
        self.limits = limits
        self._known = known
        """The services that the broker knows: which of several makes way for a new one cannot be seen otherwise."""
        self.draining = False
        self.tickets: dict[Key, Ticket] = {}
        self.numbers: dict[tuple[Peer, RequestId], Ticket] = {}
        """The X1 requests among them."""
        self.seats: dict[Peer, Seat] = {}
        self.waiting: dict[bytes, Waiting] = {}
        self.roles: dict[str, Permissions] = {}
        """Empty at a broker without access control, at which everybody may do everything."""
        self.throttles: dict[bytes, Throttle] = {}
        """The services that the operator has limited."""
        self.role = ""
        """Who sent the current message."""
        self.named: dict[bytes, Peer] = {}
        """Services that have had no worker since a request made them known, and whose request it was (C41)."""
        self.stats = Stats()
        self.expected: list[Said] = []
        self.touched: set[bytes] = set()
        """Services in which something has happened in this turn, so that the broker still knows them."""
        self.starting: Counter[bytes] = Counter()
        """How many requests were accepted in this turn that start at its end, by service with limits."""
        self.issued: set[int] = set()
        """All addresses that were ever given out."""
        self.given_up: dict[Peer, float] = {}
        """Peers that were dropped though they may be there: X1 clients among them are to hear no more."""
        self.unordered: dict[bytes, list[list[Ticket]]] = {}
        """Requests that came back from workers that were lost at once: which worker was first cannot be seen."""
        self._ended: set[tuple[Peer, RequestId]] = set()
        self.routes: dict[Peer, Route] = {}
        """What was in front of the header of the last message of each X1 client."""
        self._order = count(1)
        self._doubt = max(limits.patience - 1.5 * limits.heartbeat, limits.heartbeat)
        self._events = events

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_given_up(self, route: Route, now: float) -> bool:
        """Whether an X1 client is to hear nothing; what it has just said makes it so for longer.

        One behind a proxy may come back as another: the proxy is not given up for longer because of it.
        """
        peer = peer_of(route)
        if now >= max(self.given_up.get(peer, 0.0), self.given_up.get(peer[:1], 0.0)):
            return False
        self.given_up[peer] = now + GIVEN_UP
        return True

    # ── roles ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_anothers(self, route: Route) -> bool:
        """C45: whether a client's requests belong to another role, so that the current message does not count."""
        client = peer_of(route)
        if all(ticket.role == self.role for ticket in self.tickets.values() if ticket.client == client):
            return False
        self.stats.other_role += 1
        self._events["C45: a client of another role"] += 1
        return True

    def _own_seat(self, route: Route) -> Seat | None:
        """The seat of a worker, unless it is another role's (C45)."""
        seat = self.seats.get(peer_of(route))
        if seat is None or seat.role == self.role:
            return seat
        self.stats.other_role += 1
        self._events["C45: a worker of another role"] += 1
        return None

    def _may_call(self, service: bytes) -> bool:
        if not self.roles:
            return True
        permissions = self.roles[self.role]
        if service.startswith(MMI):
            asked = service in {b"mmi.service", b"mmi.services"}
            return permissions.mmi == "all" or (permissions.mmi == "service" and asked)
        return permissions.may_call(service)

    def _may_offer(self, service: bytes) -> bool:
        return not self.roles or self.roles[self.role].may_offer(service)

    def _sees(self, service: bytes) -> bool:
        all_of_it = not self.roles or self.roles[self.role].mmi == "all"
        return all_of_it or self._may_call(service) or self._may_offer(service)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def invalid(self, command: wire.Invalid) -> None:
        """C15: dropped and counted; an X1 client is told."""
        self.stats.invalid[command.reason] += 1
        if command.route and command.id is not None:
            code = Code.TOO_LARGE if command.over_limit else Code.MALFORMED
            self._tell_error(peer_of(command.route), command.id, code, reason=command.reason.value)
            self._events["X1: malformed"] += 1

    def request(self, command: wire.Request, now: float) -> None:
        """A client's REQUEST: it is refused, or waits until the end of the turn."""
        self.stats.requests += 1
        route, header, service, body, options, number, ttl, _ = command
        client = peer_of(route)
        if header == wire.CX1 and (client, number) in self.numbers:
            self.invalid(wire.Invalid(Reason.NUMBER_IN_USE, route, number))
            self._events["X1: number used twice"] += 1
            return
        ticket = Ticket(client, route, header, service, tuple(body), options, number, now, self.role)
        if ttl is not None:
            ticket.deadline = now + ttl
        if not self._may_call(service):
            self._report(ticket, Drop.NOT_ALLOWED)
        elif service.startswith(MMI):
            self.stats.mmi += 1
            self._tell(ticket, Kind.FINAL, self._mmi(service, body))
        elif (reason := self._refusal(ticket, now)) is not None:
            self._report(ticket, reason)
        else:
            check(ticket.key not in self.tickets, "the simulation sent a request twice on one connection")
            self.tickets[ticket.key] = ticket
            if ticket.numbered:
                self.numbers[client, number] = ticket
                self._events["X1: request"] += 1
            if service not in self.services:
                self.named[service] = client
            self.touched.add(service)
            ticket.waits = True
            waiting = self._waiting(service)
            waiting.line.append(ticket)
            return
        if ticket.numbered:
            self._ended.add((client, number))

    def _mmi(self, service: bytes, body: list[bytes]) -> tuple[bytes, ...] | None:
        """What the broker answers itself (C25, C26); None: one frame that is no matter of the protocol."""
        if service == b"mmi.service":
            if not self._sees(body[0]):
                return (b"403",)
            return (b"200",) if self.offered(body[0]) else (b"404",)
        return None if service in ANSWERED else (b"501",)

    def offered(self, service: bytes) -> bool:
        """Whether a worker takes requests for `service`."""
        return any(seat.service == service and not seat.leaving for seat in self.seats.values())

    def capacity(self, service: bytes) -> int:
        """How many requests its workers can take."""
        return sum(seat.free for seat in self.seats.values() if seat.service == service)

    @property
    def services(self) -> set[bytes]:
        """Those that have a worker, a request, or something to be settled in this turn."""
        waiting = {service for service, waiting in self.waiting.items() if len(waiting)}
        return waiting | {seat.service for seat in self.seats.values()} | self.touched

    @property
    def services_now(self) -> set[bytes]:
        """Those that have a worker or a request."""
        return {ticket.service for ticket in self.tickets.values()} | {seat.service for seat in self.seats.values()}

    def _waiting(self, service: bytes) -> Waiting:
        return self.waiting.setdefault(service, Waiting())

    def _memory_full(self, ticket: Ticket, tickets: list[Ticket]) -> Drop | None:
        """Why there is no memory for one of these requests, or for what is collected for it, or None."""
        used = self.request_bytes([each for each in self.tickets.values() if each.client[0] == ticket.client[0]])
        if self.request_bytes(tickets) + used > self.limits.max_request_bytes:
            return Drop.MEMORY_FULL
        role = self.roles.get(ticket.role)
        own = [each for each in tickets if each.role == ticket.role]
        if role is not None and self.request_bytes(own) > (role.request_bytes or math.inf):
            return Drop.ROLE_MEMORY_FULL
        return None

    def _refusal(self, ticket: Ticket, now: float) -> Drop | None:  # noqa: PLR0912 - one by one
        """Why a request cannot be accepted, or None."""
        service, limits = ticket.service, self.limits
        if self.draining:
            return Drop.DRAINING
        role = self.roles.get(ticket.role)
        own = [each for each in self.tickets.values() if each.role == ticket.role]
        if role is not None and role.outstanding is not None and len(own) >= role.outstanding:
            return Drop.ROLE_OUTSTANDING
        full = self._memory_full(ticket, [*self.tickets.values(), ticket])
        if full is not None:
            return full
        waiting = len(self._waiting(service)) - self.capacity(service)
        if service in self.throttles:
            waiting = len(self._waiting(service))
            group = ticket.options.group
            before = [each for each in self._waiting(service) if each.options.group == group]
            if not waiting:
                self.starting[service] = 0
            ahead = self.starting[service]
            opens = self.throttles[service].opens(group, self.seats_of(service), now, ahead, min(ahead, len(before)))
            held_back = self.offered(service) and opens > now + EPSILON
            if held_back and not ticket.options.wait:
                return Drop.LIMITED
            if self.capacity(service) > ahead and not held_back:
                self.starting[service] += 1
                if not before:
                    return None
        elif waiting < 0:
            return None
        if not ticket.options.wait and not self.offered(service):
            return Drop.NO_WORKER
        if service not in self.services:
            if len(self.services) >= limits.max_services:
                return Drop.TOO_MANY_SERVICES
            named = [each for each, client in self.named.items() if client == ticket.client and each in self.services]
            if len(named) >= limits.max_unserved:
                return Drop.TOO_MANY_UNSERVED
        if waiting >= limits.max_queue:
            return Drop.QUEUE_FULL
        if role is not None and sum(each.waits for each in own) >= (role.queued_requests or math.inf):
            return Drop.ROLE_QUEUED
        return None

    def seats_of(self, service: bytes) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.service == service]

    def opens(self, ticket: Ticket) -> float:
        """When the limits of its service let a request start (C48)."""
        return self.throttles[ticket.service].opens(ticket.options.group, self.seats_of(ticket.service))

    @property
    def served(self) -> set[bytes]:
        """The services that have a worker."""
        return {seat.service for seat in self.seats.values()}

    @staticmethod
    def request_bytes(tickets: Collection[Ticket]) -> int:
        """Bytes charged for requests and their clients (C40)."""
        clients = {ticket.client for ticket in tickets}
        return sum(ticket.size for ticket in tickets) + sum(
            CLIENT_OVERHEAD + (_size(client) if len(client) > 1 else 0) for client in clients
        )

    def cancel(self, command: wire.Cancel, now: float) -> None:
        """A client's CANCEL."""
        client, number = peer_of(command.route), command.id
        ticket = self.numbers.get((client, number))
        if ticket is not None:
            where = "with a worker" if ticket.seat else "waiting"
            self._events[f"X1: cancelled, {where}"] += 1
            self.drop(ticket, Drop.CANCELLED, now)
        elif (client, number) not in self._ended:
            self.invalid(wire.Invalid(Reason.UNKNOWN_NUMBER, command.route, number))
            self._events["X1: CANCEL of nothing"] += 1
        else:
            self._events["X1: CANCEL met the end of the request"] += 1

    # ── what clients are told ────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, ticket: Ticket, kind: Kind, body: tuple[bytes, ...] | None) -> None:
        """PARTIAL or FINAL."""
        if ticket.numbered:
            self.expected.append(Said(ticket.client, kind, ticket.number, body=body))
        else:
            self.expected.append(Said(ticket.route, kind, None, ticket.service, body))

    def _tell_error(self, client: Peer, number: RequestId, code: int, **details: Any) -> None:
        self.expected.append(Said(client, Kind.ERROR, number, code=code, **{"text": None, **details}))

    def _report(self, ticket: Ticket, reason: Drop) -> None:
        self.stats.dropped[reason] += 1
        if ticket.numbered and reason in CODES:
            where = "with a worker" if ticket.seat else "waiting" if ticket.waits else "at once"
            self._events[f"X1: {reason}, {where}"] += 1
            body = None if reason is Drop.LIMITED else ()  # which says when to try again, if that is known
            told = {"reason": reason.value, "lost": ticket.deaths, "body": body}
            self._tell_error(ticket.client, ticket.number, CODES[reason], **told)

    # ── the end of a request ─────────────────────────────────────────────────────────────────────────────────────────

    def drop(self, ticket: Ticket, reason: Drop, now: float) -> None:
        """A request ends while it waits, or while a worker holds it, which an X1 worker is told."""
        self._report(ticket, reason)
        self._finish(ticket)
        seat = ticket.seat
        if ticket.waits:
            self._unqueue(ticket)
        elif seat is not None and seat.x1:
            seat.last_sent = now
            self.expected.append(Said(seat.route, Kind.CANCEL, ticket.address))
            self._events["X1: CANCEL forwarded"] += reason is Drop.CANCELLED

    def _finish(self, ticket: Ticket) -> None:
        ticket.over = True
        del self.tickets[ticket.key]
        if all(other.client != ticket.client for other in self.tickets.values()):  # it is not remembered
            self.named = {service: client for service, client in self.named.items() if client != ticket.client}
        if ticket.numbered:
            del self.numbers[ticket.client, ticket.number]
            self._ended.add((ticket.client, ticket.number))

    def _unqueue(self, ticket: Ticket) -> None:
        self.waiting[ticket.service].line_of(ticket).remove(ticket)
        ticket.waits = False

    def too_late(self, ticket: Ticket, now: float, reason: Drop = Drop.TTL_PASSED) -> Drop:
        """Why the time of a request has passed: because of a limit, if that holds it back or a worker is free."""
        if ticket.service not in self.throttles or ticket.seat is not None:
            return reason
        return Drop.LIMIT_PASSED if self.capacity(ticket.service) or self.opens(ticket) > now else reason

    def overdue(self, ticket: Ticket, now: float) -> None:
        """The time of a request had passed when its turn came."""
        ticket.waits = True
        self._report(ticket, self.too_late(ticket, now))
        ticket.waits = False
        self._finish(ticket)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ready(self, command: wire.Ready, now: float) -> None:
        """A worker's READY."""
        place = peer_of(command.route)
        if place in self.seats and self._own_seat(command.route) is None:
            return
        if place in self.seats:
            self._refuse(command, Refusal.SECOND_READY, now)
        elif command.service.startswith(MMI):
            self._refuse(command, Refusal.RESERVED_NAME, now)
        elif len(self.seats) >= self.limits.max_workers:
            self._refuse(command, Refusal.TOO_MANY_WORKERS, now)
        elif not self._may_offer(command.service):
            self._refuse(command, Refusal.NOT_ALLOWED, now)
            self._events["READY not allowed"] += 1
        elif not self._make_room(command.service, now):
            self._refuse(command, Refusal.TOO_MANY_SERVICES, now)
        elif self.draining and command.header == wire.WX1:
            self._refuse(command, Refusal.DRAINING, now)
        else:
            credit = 0 if self.draining else min(command.credit, self.limits.max_credit)
            order = next(self._order)
            self.named.pop(command.service, None)
            # An X1 worker is sent its first HEARTBEAT, or a REQUEST, at once (C13).
            sent = now - self.limits.heartbeat if command.header == wire.WX1 else now
            self.seats[place] = Seat(
                command.route, command.header, command.service, credit, order, now, sent, self.role
            )
            self.touched.add(command.service)

    def _make_room(self, service: bytes, now: float) -> bool:
        """C41: a service that only has requests makes way for one with a worker."""
        if service in self.services or len(self.services) < self.limits.max_services:
            return True
        for other in (self.services - self.served) - {service}:
            if other not in self._known:
                for ticket in list(self._waiting(other)):
                    self.drop(ticket, Drop.TOO_MANY_SERVICES, now)
                self.touched.discard(other)
                self._events["a service made way"] += 1
                return True
        return False

    def _seen(self, command: Any, now: float) -> Seat | None:
        """The seat of who says that, if it is registered, and in that dialect (C13, C14)."""
        if peer_of(command.route) not in self.seats:
            self._refuse(command, Refusal.NOT_REGISTERED, now)
            return None
        seat = self._own_seat(command.route)
        if seat is None:
            return None
        if seat.header != command.header:
            self._refuse(command, Refusal.WRONG_DIALECT, now)
            return None
        seat.last_seen = now
        return seat

    def alive(self, route: Route, now: float) -> None:
        """A worker has sent something, whatever it was."""
        seat = self.seats.get(peer_of(route))
        if seat is not None and seat.role == self.role:
            seat.last_seen = now

    def _refuse(self, command: Any, reason: Refusal, now: float) -> None:
        """C14: DISCONNECT to that peer, and forget it."""
        self.stats.disconnected[reason] += 1
        text = "why" if command.header == wire.WX1 and reason is Refusal.NOT_ALLOWED else ""
        self.expected.append(Said(command.route, Kind.DISCONNECT, None, command.header, text=text))
        seat = self.seats.get(peer_of(command.route))
        if seat is not None:
            self.lose([seat], Loss.REFUSED, now)

    def heartbeat(self, command: wire.Heartbeat, now: float) -> None:
        """HEARTBEAT of a worker, or of an X1 client, which is answered."""
        self.stats.heartbeats += 1
        if command.header == wire.CX1:
            if self.draining:
                self.expected.append(Said(command.route, Kind.DISCONNECT, None, wire.CX1))
                self._events["drain: a client's heartbeat"] += 1
                return
            self.expected.append(Said(command.route, Kind.HEARTBEAT))
            self._events["X1: heartbeat answered"] += 1
        else:
            self._seen(command, now)

    def credit(self, command: wire.Credit, now: float) -> None:
        """A worker's CREDIT."""
        seat = self._seen(command, now)
        if seat is not None:
            seat.credit = min(command.credit, self.limits.max_credit)
            self._changed(seat)
            self._events["CREDIT"] += 1
            self._events["CREDIT 0"] += not seat.credit
            self._events["CREDIT below what is held"] += seat.credit < len(seat.held)

    def disconnect(self, command: wire.Disconnect, now: float) -> None:
        """C10, C16; an X1 worker may finish what it holds."""
        seat = self._own_seat(command.route)
        if seat is None:
            return
        if not seat.x1:
            self.lose([seat], Loss.DISCONNECTED, now)
        elif not seat.leaving:
            self._events["a worker leaves while it holds requests"] += bool(seat.held)
            seat.last_seen = now
            seat.leaving = True
            self.touched.add(seat.service)
            self._drop_no_wait(seat.service, now)
            if not seat.held:
                self._let_go(seat, now)

    def drain(self) -> None:
        """From now on the broker sends its peers away: first the clients that have requests."""
        self.draining = True
        for client in dict.fromkeys(client for client, _ in self.numbers):
            self.expected.append(Said(self.routes[client], Kind.DISCONNECT, None, wire.CX1))
            self._events["drain: a client was told"] += 1

    def dismiss_idle(self, now: float) -> None:
        """The broker drains, and everything that can be is dispatched: workers that hold nothing are sent away."""
        held_back = {service for service in self.throttles if len(self._waiting(service))}
        idle = [each for each in self.seats.values() if each.credit and not each.held and not each.leaving]
        for seat in [each for each in idle if each.service not in held_back]:
            self.dismiss(seat, now)

    def dismiss(self, seat: Seat, now: float) -> None:
        """A worker is sent away because the broker drains."""
        self.expected.append(Said(seat.route, Kind.DISCONNECT, None, seat.header))
        self.lose([seat], Loss.CLOSING, now)
        self._events["drain: a worker was sent away"] += 1
        self._events["drain: a worker without credit was sent away"] += not seat.credit

    def left(self, now: float) -> None:
        """Workers that are leaving and hold nothing are let go."""
        for seat in list(self.seats.values()):
            if seat.leaving and not seat.held:
                self._let_go(seat, now)

    def _let_go(self, seat: Seat, now: float) -> None:
        self.expected.append(Said(seat.route, Kind.DISCONNECT, None, seat.header))
        self.lose([seat], Loss.DISCONNECTED, now)
        self._events["a worker has left"] += 1

    def _held(self, command: Any, now: float) -> tuple[Seat, Ticket] | None:
        """What `command` is about; None if it matches no live request (C14, C18, C32)."""
        seat = self._seen(command, now)
        if seat is None:
            return None
        held = seat.held.get(command.id)
        if held is not None:
            return seat, held.ticket
        if not isinstance(command.id, int):
            self.stats.invalid[Reason.BAD_ADDRESS] += 1
            self._events["a reply to what cannot be an address"] += 1
        elif command.id in self.issued:
            self.stats.late += 1
            self._events[f"late {type(command).__name__}"] += 1
        else:
            self._refuse(command, Refusal.WRONG_CLIENT if seat.held else Refusal.NO_REQUEST, now)
        return None

    def reply(self, command: wire.Reply, now: float) -> None:
        """A worker's PARTIAL or FINAL."""
        found = self._held(command, now)
        if found is None:
            return
        seat, ticket = found
        if command.final:
            self.stats.replies += 1
            self._done(seat, ticket, answered=True)
            self._events["FINAL of an abandoned request goes nowhere"] += ticket.over
        else:
            self.stats.partials += 1
        if ticket.over:
            return
        body = command.body
        if ticket.header == wire.C01 and (not command.final or ticket.collected):  # C24
            body = ticket.collected = [*(ticket.collected or []), *body]
            if len(body) > self.limits.max_frames or sum(map(len, body)) > self.limits.max_message:
                self.drop(ticket, Drop.REPLY_TOO_LARGE, now)
                return
            full = None if command.final else self._memory_full(ticket, list(self.tickets.values()))
            if full is not None:
                self.drop(ticket, full, now)
                return
        if command.final:
            self._finish(ticket)
            dialects = f"{wire.DIALECTS[ticket.header]} client by {wire.DIALECTS[seat.header]} worker"
            self._events[f"served: {dialects}"] += 1
        elif ticket.header == wire.C01:
            return
        ticket.streamed = not command.final
        self._tell(ticket, Kind.FINAL if command.final else Kind.PARTIAL, tuple(body))

    def failure(self, command: wire.Error, now: float) -> None:
        """A worker's ERROR: only an X1 client is told."""
        found = self._held(command, now)
        if found is None:
            return
        seat, ticket = found
        self.stats.errors += 1
        self._done(seat, ticket)
        if ticket.over:
            self._events["ERROR of an abandoned request goes nowhere"] += 1
            return
        self._finish(ticket)
        if ticket.numbered:
            detail = tuple(command.detail) or ((b"",) if command.code in BROKERS else ())
            text = command.text.decode(errors="replace")
            self._tell_error(ticket.client, ticket.number, command.code, text=text, body=detail, lost=ticket.deaths)
            self._events["X1: ERROR of a worker"] += 1
        else:
            self._report(ticket, Drop.HANDLER_FAILED)

    def oversized(self, command: wire.Oversized, now: float) -> None:
        """A reply over the limits: an X1 request ends with that."""
        self.stats.invalid[command.reason] += 1
        seat = self._own_seat(command.route)
        held = None if seat is None or seat.header != command.header else seat.held.get(command.id)  # type: ignore[arg-type]
        if seat is None or held is None:
            return
        check(seat.x1, "the simulation has no such workers of MDP")
        ticket = held.ticket
        if command.kind is Kind.PARTIAL:
            if not ticket.over:
                self.drop(ticket, Drop.REPLY_TOO_LARGE, now)
            return
        seat.last_seen = now
        self._done(seat, ticket)
        if not ticket.over:
            self.drop(ticket, Drop.REPLY_TOO_LARGE, now)

    def release(self, command: wire.Release, now: float) -> None:
        """A worker returns a request that it has not begun."""
        found = self._held(command, now)
        if found is None:
            return
        seat, ticket = found
        self._done(seat, ticket)
        self._events["RELEASE"] += 1
        if ticket.over:
            self._events["RELEASE met CANCEL"] += 1
        else:
            ticket.handed -= 1
            self._place_again(ticket, now)

    def assign(self, ticket: Ticket, seat: Seat, address: int, turn: int, now: float) -> None:
        """A worker was given a request."""
        self.stats.dispatched += 1
        self.issued.add(address)
        ticket.waits = False
        ticket.seat, ticket.address = seat, address
        ticket.handed += 1
        seat.held[address] = Held(ticket, turn, now - seat.last_seen > self._doubt)
        seat.last_sent = now
        self._changed(seat)

    def _done(self, seat: Seat, ticket: Ticket, *, answered: bool = False) -> None:
        """A worker is done with a request."""
        del seat.held[ticket.address]
        ticket.seat = None
        seat.warm = answered and seat.x1
        self._changed(seat)

    def _changed(self, seat: Seat) -> None:
        seat.changed = next(self._order)
        self.touched.add(seat.service)

    # ── the end of workers ───────────────────────────────────────────────────────────────────────────────────────────

    def lose(self, seats: Iterable[Seat], reason: Loss, now: float) -> None:
        """Workers are forgotten; what they held goes to the front of the queue (C17)."""
        groups = [self._forget(seat, reason, now) for seat in seats]
        for ticket in reversed([ticket for group in groups for ticket in group]):
            self._place_again(ticket, now)
        for service in {ticket.service for group in groups for ticket in group}:
            waiting = [[each for each in group if each.waits and each.service == service] for group in groups]
            if len(waiting) > 1:
                self.unordered[service] = [group for group in waiting if group]

    def _forget(self, seat: Seat, reason: Loss, now: float) -> list[Ticket]:
        self.stats.lost[reason] += 1
        del self.seats[peer_of(seat.route)]
        self.touched.add(seat.service)
        self._events["a worker was lost with many requests"] += len(seat.held) > 3
        for held in seat.held.values():
            held.ticket.seat = None
            if 0 <= seat.unreached_from <= held.turn:
                held.ticket.handed -= 1
                self._events["REQUEST to a worker that is gone"] += 1
            elif held.doubtful and reason is Loss.SILENT:
                self._events["REQUEST to a worker that may have been dead"] += 1
            else:
                held.ticket.deaths += 1
        self._drop_no_wait(seat.service, now)
        return [held.ticket for held in seat.held.values() if not held.ticket.over]

    def _drop_no_wait(self, service: bytes, now: float) -> None:
        """Requests that are not to wait for a worker end when there is none."""
        if self.offered(service):
            return
        for ticket in list(self._waiting(service)):
            if not ticket.options.wait:
                # 404 says that nobody has begun with it.
                self.drop(ticket, Drop.LAST_WORKER_LOST if ticket.handed else Drop.NO_WORKER, now)

    def _place_again(self, ticket: Ticket, now: float) -> None:
        """A request that was released, or whose worker was lost, may be done by another worker (C17)."""
        if ticket.streamed:
            self.drop(ticket, Drop.LOST_AFTER_PARTIAL, now)
        elif ticket.deaths >= self.limits.max_attempts:
            self.drop(ticket, Drop.WORKERS_LOST, now)
        elif not ticket.options.wait and not self.offered(ticket.service):
            self.drop(ticket, Drop.LAST_WORKER_LOST if ticket.handed else Drop.NO_WORKER, now)
        elif now >= ticket.deadline:
            self.drop(ticket, Drop.TTL_PASSED, now)
        else:
            self.stats.redispatched += 1
            self.touched.add(ticket.service)
            ticket.collected = None
            ticket.waits = True
            ticket.since = now
            self._waiting(ticket.service).line_of(ticket).prepend(ticket)
            self._events["request back in the queue"] += 1

    def give_up(self, identity: bytes, now: float) -> None:
        """A connection has ended: so have its clients' requests, and its workers."""
        for ticket in list(self.tickets.values()):
            if ticket.client[0] == identity:
                self.drop(ticket, Drop.CLIENT_GONE, now)
        self.lose(self.seats_at(identity), Loss.UNREACHABLE, now)

    def seats_at(self, identity: bytes) -> list[Seat]:
        """The workers of a connection."""
        return [seat for place, seat in self.seats.items() if place[0] == identity]

    def patience(self, seat: Seat) -> float:
        """Seconds for which a worker may be silent (C13, C34)."""
        if seat.held and not seat.x1:
            return max(self.limits.patience, self.limits.busy_grace)
        return self.limits.patience

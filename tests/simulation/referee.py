"""The rules, as somebody sees them who stands at the broker's socket and notes down what goes in and what comes out.

`Referee` stands in for a `Broker`: it hands each call on, follows it in its `Ledger`, and compares.  `Broken` says
which rule was broken.  In `_books` it compares the ledger with the broker's registry as well.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, permutations, product
from typing import Any

from zmdp.mdp import wire
from zmdp.mdp.broker.core.clients import GIVEN_UP
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import Loss
from zmdp.mdp.broker.core.outgoing import Event
from zmdp.mdp.broker.core.records import Request
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.service_limits import ServiceLimits
from zmdp.mdp.wire import Kind, Message, Route, x1

from .ledger import Key, Ledger, Seat, Ticket
from .policy import Waiting, plan
from .reading import Beat, Peer, Said, Work, hear, matches, peer_of, read
from .rules import EPSILON, Broken, check
from .throttle import Throttle

GRAIN = 0.01
"""Seconds by which a timer may be late."""
COMMAND = 4
"""Where a record has its command."""
MAX_ORDERS = 5000
"""Orders of workers lost at once, and of requests whose time has just passed, that are tried for one that explains what
the broker did."""


@dataclass(frozen=True)
class Dispatch:
    """A REQUEST that the broker has sent."""

    ticket: Ticket
    seat: Seat
    address: int


class Referee:
    """A broker under watch."""

    def __init__(self, broker: Broker, events: Counter[str]) -> None:
        self.broker = broker
        self.limits = broker.limits
        self.ledger = Ledger(broker.limits, broker.directory.services, events)
        self._now = 0.0
        self._closing = False
        self._busy = False
        """Something but heartbeats has happened in this turn."""
        self._beaten: dict[Seat, float] = {}
        """The workers that may be sent HEARTBEAT in this turn, and when they were last sent something before."""
        self._probed: list[Route] = []
        """The workers that must be sent HEARTBEAT in this turn."""
        self._ticked = False
        self._late: list[Ticket] = []
        """Those whose time has passed in this turn, so recently that the timer or their turn may have ended them."""
        self._events = events

    # ── the broker's own calls ───────────────────────────────────────────────────────────────────────────────────────

    def drain(self, now: float) -> None:
        """Clients that wait for something are told, and so are idle workers."""
        self._now = now
        self.broker.drain(now)
        self.ledger.drain()
        self._busy = True

    def limit(self, limits: dict[str, ServiceLimits], now: float) -> None:
        self.broker.limit(limits, now)
        self.ledger.throttles = {name.encode(): Throttle(each) for name, each in limits.items()}

    def grant(self, roles: dict[str, Permissions], now: float) -> None:
        self.broker.grant(roles, now)
        check(self.broker.take_messages() == [], "nobody is there whom new permissions concern")
        self.ledger.roles = roles

    def receive(self, message: Message, now: float, role: str) -> None:
        self._now = now
        heard = hear(message, self.limits)
        self.broker.receive(message, now, self.broker.roles.named(role) if role else None)
        self.ledger.role = role
        if heard.header == wire.CX1 and self.ledger.is_given_up(heard.route, now):
            self._events["X1: slow reader ignored"] += 1
            return
        self._events["batch of a peer"] += len(heard.commands) > 1
        if heard.header in {wire.CX1, wire.C02, wire.C01} and self.ledger.is_anothers(heard.route):
            return
        if heard.header == wire.CX1:
            self.ledger.routes[peer_of(heard.route)] = heard.route
        refused = self.ledger.stats.disconnected.total()
        for command in heard.commands:
            self._took(command, now)
            if self.ledger.stats.disconnected.total() > refused:
                return  # what else a worker says in that batch does not count
        if heard.header == wire.WX1:
            self.ledger.alive(heard.route, now)

    def _took(self, command: Any, now: float) -> None:
        ledger = self.ledger
        self._busy |= not isinstance(command, wire.Heartbeat)
        match command:
            case wire.Invalid():
                ledger.invalid(command)
            case wire.Request():
                ledger.request(command, now)
            case wire.Cancel():
                ledger.cancel(command, now)
            case wire.Ready():
                ledger.ready(command, now)
            case wire.Heartbeat():
                ledger.heartbeat(command, now)
            case wire.Reply():
                ledger.reply(command, now)
            case wire.Error():
                ledger.failure(command, now)
            case wire.Oversized():
                ledger.oversized(command, now)
            case wire.Credit():
                ledger.credit(command, now)
            case wire.Release():
                ledger.release(command, now)
            case wire.Disconnect():
                ledger.disconnect(command, now)

    def take_messages(self) -> list[Message]:
        sends = self.broker.take_messages()
        if self._closing:
            said = list(self._read(sends))
            check(all(isinstance(each, Said) for each in said), f"the broker ends and sends {sends}")
            self._compare([each for each in said if isinstance(each, Said)])
            return sends
        self._judge(sends, self._now)
        self._beaten = {}
        if self._ticked:
            self._ticked = False
            self._punctual(self._now)
        return sends

    def take_events(self) -> list[Event]:
        return self.broker.take_events()

    def tick(self, now: float) -> None:
        self._now = now
        ledger = self.ledger
        self._beaten = {seat: seat.last_sent for seat in ledger.seats.values()}
        self._ticked = True
        self.broker.tick(now)
        workers = {_peer(worker.key) for worker in self.broker.directory.workers.values()}
        lost = [seat for place, seat in ledger.seats.items() if place not in workers]
        for seat in [each for each in lost if ledger.draining and not (each.credit or each.held)]:
            if now < seat.last_seen + ledger.patience(seat) - EPSILON:
                check(now >= seat.last_sent + self.limits.heartbeat - EPSILON, f"C13: {seat} was sent away too early")
                ledger.dismiss(seat, now)
                lost.remove(seat)
                self._busy = True
        for seat in lost:
            silent = now >= seat.last_seen + ledger.patience(seat) - EPSILON
            check(silent, f"C13: {seat} was forgotten though it is alive")
        ledger.lose(lost, Loss.SILENT, now)
        self._expire(now)
        self._busy |= bool(lost)

    def _expire(self, now: float) -> None:
        """Requests whose time has passed have ended, in a tick."""
        alive = set(self._tickets())
        for ticket in list(self.ledger.tickets.values()):
            if ticket.key in alive:
                continue
            if ticket.waits and ticket.deadline <= now < ticket.deadline + GRAIN + EPSILON:
                self._late.append(ticket)
            elif now >= ticket.deadline:
                self.ledger.drop(ticket, self.ledger.too_late(ticket, now), now)
            elif ticket.waits and now >= ticket.since + self.limits.expiry - EPSILON:
                self.ledger.drop(ticket, self.ledger.too_late(ticket, now, Drop.EXPIRED), now)
            else:
                raise Broken(f"{ticket} was lost")

    def disconnected(self, identity: bytes, turn: int, now: float) -> None:
        for seat in self.ledger.seats_at(identity):
            seat.unreached_from = turn
        self.ledger.given_up.pop((identity,), None)
        self.broker.disconnected(identity, turn, now)
        self._gone(identity, now)

    def give_up(self, identity: bytes, now: float) -> None:
        self.ledger.given_up[identity,] = now + GIVEN_UP
        self.broker.give_up(identity, now)
        self._gone(identity, now)

    def _gone(self, identity: bytes, now: float) -> None:
        self._now = now
        self._busy = True
        self._events["connection with several workers lost"] += len(self.ledger.seats_at(identity)) > 1
        self.ledger.give_up(identity, now)

    def probe(self, identity: bytes, now: float) -> None:
        """Every peer there that can take one gets a HEARTBEAT."""
        self._now = now
        ledger = self.ledger
        self.broker.probe(identity, now)
        for client in {client for client, _ in ledger.numbers if client[0] == identity}:
            ledger.expected.append(Said(ledger.routes[client], Kind.HEARTBEAT))
        seats = ledger.seats_at(identity)
        self._beaten |= dict.fromkeys(seats, -math.inf)
        self._probed += [seat.route for seat in seats]

    def close(self, now: float) -> None:
        self._now = now
        ledger = self.ledger
        self._events["X1: the broker ended first"] += len(ledger.numbers)
        for ticket in list(ledger.numbers.values()):
            ledger.drop(ticket, Drop.CLOSING, now)
        for seat in ledger.seats.values():
            ledger.expected.append(Said(seat.route, Kind.DISCONNECT, None, seat.header))
        self._closing = True
        self.broker.close(now)

    # ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, sends: list[Message]) -> Iterator[Said | Work | Beat]:
        for message in sends:
            yield from read(message)

    def _judge(self, sends: list[Message], now: float) -> None:
        """The turn has ended: compare what the broker says with what it must say."""
        ledger = self.ledger
        self._one_batch_each(sends)
        said: list[Said] = []
        works: list[Work] = []
        beats: list[Route] = []
        for each in self._read(sends):
            if isinstance(each, Said):
                said.append(each)
            elif isinstance(each, Work):
                works.append(each)
            else:
                self._beat(each, now)
                beats.append(each.to)
        check(not self._probed or Counter(beats) >= Counter(self._probed), "{} were not probed", self._probed)
        self._probed.clear()
        ledger.left(now)  # after what was due in this turn
        self._busy |= bool(works or said or ledger.touched or self._late)
        if self._busy:
            self._compare_early(said)
            self._dispatched(works, now)
            if ledger.draining:
                ledger.dismiss_idle(now)
            self._compare(said)
            self._books()
        ledger.touched.clear()
        ledger.starting.clear()
        ledger.unordered.clear()
        self._busy = False

    def _one_batch_each(self, sends: list[Message]) -> None:
        """Everything there is to say to an X1 worker goes into one message, except for DISCONNECT."""
        messages = [message for message in sends if message[-2:-1] == [wire.BATCH]]
        batches = Counter(tuple(each[:-2]) for each in messages if each[-1][COMMAND] != x1.WORKER_DISCONNECT)
        for to, number in batches.items():
            self._events["batch of the broker"] += 1
            check(number == 1 or to[-1] != wire.WX1, f"the broker sent {number} batches to {to} in one turn")

    def _beat(self, beat: Beat, now: float) -> None:
        seat = self.ledger.seats.get(peer_of(beat.to))
        check(seat is not None, f"C16: HEARTBEAT to {beat.to!r}, which is no worker")
        assert seat is not None
        if seat not in self._beaten or now < self._beaten[seat] + self.limits.heartbeat - EPSILON:
            raise Broken(f"C13: HEARTBEAT to {seat} within the interval")
        if beat.header != seat.header:
            raise Broken(f"{seat} gets HEARTBEAT in another dialect")
        seat.last_sent = now

    def _compare_early(self, said: list[Said]) -> None:
        """Compare what does not depend on what is dispatched: it tells best which rule is broken."""
        kinds = {Kind.PARTIAL, Kind.FINAL} if self.ledger.draining else {Kind.PARTIAL, Kind.FINAL, Kind.DISCONNECT}
        _compare([each for each in said if each.kind in kinds], [e for e in self.ledger.expected if e.kind in kinds])
        for expected in self.ledger.expected:
            if expected.kind is Kind.ERROR and not any(matches(each, expected) for each in said):
                raise Broken(_complaint([], [expected]))

    def _compare(self, said: list[Said]) -> None:
        """Each peer is told what it must be told, in that order, and nothing else."""
        expected, self.ledger.expected = self.ledger.expected, []
        _compare(said, expected)

    def _dispatched(self, works: list[Work], now: float) -> None:
        """Requests go to workers: each to the right one, and in their turn."""
        dispatches = self._identify(sorted(works, key=lambda work: work.work.id), now)
        alive = set(self._tickets())
        late = {ticket.service for ticket in self._late}
        for ticket in self.ledger.tickets.values():
            if ticket.key not in alive:  # it was late when its turn came, perhaps because a limit opened
                check(ticket.waits and now >= ticket.deadline, "{} was lost", ticket)
                late.add(ticket.service)
        for service in sorted({*self.ledger.touched, *late, *(each.ticket.service for each in dispatches)}):
            check_service = self._check_limits if service in self.ledger.throttles else self._check_policy
            check_service(service, [each for each in dispatches if each.ticket.service == service], now)
        for ticket in self._late:
            check(ticket.over, "{} was lost", ticket)
        self._late.clear()

    def _identify(self, works: list[Work], now: float) -> list[Dispatch]:
        """Find out what was dispatched to whom, and that it could be."""
        ledger, dispatches = self.ledger, []
        given: Counter[Seat] = Counter()
        suspects: Counter[Seat] = Counter()
        for to, work in works:
            seat = ledger.seats.get(peer_of(to))
            check(seat is not None, "C16: REQUEST to {!r}, which is no worker", to)
            assert seat is not None
            check(not seat.leaving, "C16: REQUEST to {}, which is leaving", seat)
            check(seat.route == to, "C22: REQUEST to {} is behind the envelope {}", seat, to)
            check(work.header == seat.header, "{} gets REQUEST in another dialect", seat)
            address = work.id
            check(isinstance(address, int), "C32: the address {!r} is no number", address)
            assert isinstance(address, int)
            check(address not in ledger.issued, "C32: the address {} was given out before", address)
            ledger.issued.add(address)
            worker = self.broker.directory.workers.get(to[0] if len(peer_of(to)) == 1 else peer_of(to))
            attempt = None if worker is None else worker.held.get(address)
            check(attempt is not None, "C32: the broker does not know the address {} that it gave {}", address, seat)
            ticket = ledger.tickets.get(_key(attempt.request))
            check(ticket is not None, "C17, C18: {} was dispatched after its end", work.body)
            assert ticket is not None
            check(tuple(work.body) == ticket.body, "C7: {} gets {} instead of {}", seat, work.body, ticket.body)
            check(ticket.seat is None, "C17: {} is with {} and goes to {} as well", ticket, ticket.seat, seat)
            check(ticket.waits, "C17: {} goes to {}, but does not wait", ticket, seat)
            check(not ticket.streamed, "C17: {} goes to a second worker after a PARTIAL", ticket)
            check(ticket.deaths < self.limits.max_attempts, "C17: {} is tried too often", ticket)
            check(now < ticket.deadline, "X1: {} is dispatched after its time has passed", ticket)
            check(seat.service == ticket.service, "C7: {} goes to a worker of {!r}", ticket, seat.service)
            given[seat] += 1
            check(len(seat.held) + given[seat] <= seat.credit, "C6: {} holds more than its credit", seat)
            suspects[seat] += bool(ticket.deaths)
            check(
                not ticket.deaths or seat.suspects + suspects[seat] == 1,
                f"C17: {ticket} is a second suspect at {seat}",
            )
            self._events["suspect dispatched"] += bool(ticket.deaths)
            if seat.x1:
                self._check_options(ticket, work, now)
            dispatches.append(Dispatch(ticket, seat, address))
        check(len({each.ticket for each in dispatches}) == len(dispatches), "C17: dispatched twice: {}", dispatches)
        return dispatches

    def _check_policy(self, service: bytes, dispatches: list[Dispatch], now: float) -> None:
        """It was their turn (C17, C20), and those were the workers to choose (C21)."""
        ledger = self.ledger
        seats = [seat for seat in ledger.seats.values() if seat.service == service]
        actual = [(each.ticket, each.seat) for each in dispatches]
        self._events["several dispatched in one turn"] += len(actual) > 1
        self._events["several waited for several workers"] += len({seat for _, seat in actual}) > 1
        problem = ""
        for waiting, timed_out in islice(self._orders(service), MAX_ORDERS):  # noqa: B007 - used after the loop
            if not len(waiting.suspects) and len(waiting.line) <= ledger.capacity(service):
                _reorder(waiting, [ticket for ticket, _ in actual])  # whose turn it is does not matter
            steps = plan(waiting, seats, now)
            planned = [(ticket, seat) for ticket, seat in steps if seat is not None]
            if planned == actual and waiting.order == self._order_of(service):
                break
            problem = problem or _difference(planned, actual, waiting.order, self._order_of(service))
        else:
            raise Broken(problem)
        for ticket in timed_out:
            ledger.drop(ticket, Drop.TTL_PASSED, now)
        for ticket, seat in steps:
            if seat is None:
                ledger.overdue(ticket, now)
        for each in dispatches:
            self._events["request dispatched again"] += each.ticket.handed > 0
            ledger.assign(each.ticket, each.seat, each.address, self.broker.turn - 1, now)
        if len(waiting):
            ledger.waiting[service] = waiting
        else:
            ledger.waiting.pop(service, None)

    def _check_limits(self, service: bytes, dispatches: list[Dispatch], now: float) -> None:
        """The limits let each of them start (C48), and those of one client and group stay in their order (C20)."""
        ledger = self.ledger
        throttle = ledger.throttles[service]
        waiting = ledger.waiting.get(service, Waiting())
        for ticket in [ticket for ticket in self._late if ticket.service == service and not ticket.over]:
            ledger.drop(ticket, ledger.too_late(ticket, now), now)
        alive = set(self._tickets())
        for ticket in [ticket for ticket in waiting if now >= ticket.deadline and ticket.key not in alive]:
            waiting.line_of(ticket).remove(ticket)
            ledger.overdue(ticket, now)
        for each in dispatches:
            ticket = each.ticket
            check(ledger.opens(ticket) <= now + EPSILON, "C48: {} starts, but not within the limits", ticket)
            others = [other for other in waiting.line_of(ticket) if _side(other) == _side(ticket)]
            check(
                others[0] is ticket or bool(ticket.deaths) or service in ledger.unordered,
                "C20: {} starts before {}", ticket, others[0],
            )  # fmt: skip
            waiting.line_of(ticket).remove(ticket)
            throttle.start(ticket.options.group, now)
            self._events["started within limits"] += 1
            self._events["request dispatched again"] += ticket.handed > 0
            ledger.assign(ticket, each.seat, each.address, self.broker.turn - 1, now)
        if not len(waiting):
            ledger.waiting.pop(service, None)

    def _check_started(self, now: float) -> None:
        """What the limits let start has started, if a worker has credit (C48)."""
        ledger = self.ledger
        for service in ledger.throttles:
            free = [seat for seat in ledger.seats_of(service) if seat.free]
            for ticket in ledger.waiting.get(service, ()):
                if free and (not ticket.deaths or not all(seat.suspects for seat in free)):
                    late = now - max(ledger.opens(ticket), ticket.since)
                    check(late <= GRAIN, "C48: {} waits, but may have started {} s ago", ticket, late)
                    self._events["held back by a limit"] += late < 0

    def _orders(self, service: bytes) -> Iterator[tuple[Waiting, list[Ticket]]]:
        """In which orders requests may wait, and which of those whose time has just passed a timer may have ended."""
        waiting = self.ledger.waiting.get(service, Waiting())
        groups = self.ledger.unordered.get(service, [])
        late = [ticket for ticket in self._late if ticket.service == service]
        chosen = [each for size in range(len(late), -1, -1) for each in combinations(late, size)]
        for timed_out, order in product(chosen, permutations(groups)):
            copy = waiting.copy()
            returned = [ticket for group in order for ticket in group]
            if len(groups) > 1:
                for ticket in returned:
                    copy.line_of(ticket).remove(ticket)
                for ticket in reversed(returned):
                    copy.line_of(ticket).prepend(ticket)
            for ticket in timed_out:
                copy.line_of(ticket).remove(ticket)
            yield copy, list(timed_out)

    def _order_of(self, service: bytes) -> list[list[tuple[Peer, list[bytes]]]]:
        """How requests wait at the broker."""
        found = self.broker.directory.services.get(service)
        if found is None:
            return [[], []]
        lines = found.schedule.suspects, found.schedule.queue
        return [
            [
                (_peer(each.requests.first.client.key), [request.body[0] for request in each.requests])
                for each in line._queues
            ]
            for line in lines
        ]

    def _check_options(self, ticket: Ticket, work: wire.Request, now: float) -> None:
        """The client's own; and how much of its time is left, and which attempt this is."""
        told: dict[str, Any] = json.loads(work.options.raw or b"{}")
        expected: dict[str, Any] = json.loads(ticket.options.raw or b"{}")
        for name in ("user", "admin"):
            expected.pop(name, None)
        if ticket.role:
            expected["user"] = ticket.role
            if self.ledger.roles[ticket.role].admin:
                expected["admin"] = True
        left, handed = work.ttl, ticket.handed + 1
        check(work.attempt == handed, f"X1: {ticket} is told to be the attempt {work.attempt}, not {handed}")
        check(told == expected, f"X1: {ticket} has the options {told}, not {expected}")
        self._events["X1: dispatched with its attempt"] += handed > 1
        check((left is None) == (ticket.deadline == math.inf), f"X1: {ticket} has the ttl {left}")
        if left is not None:
            late = left - (ticket.deadline - now)
            check(-EPSILON < late <= 0.001 + EPSILON, f"X1: {ticket} has {left} s, which is {late} s too much")
            self._events["X1: dispatched with what is left of its ttl"] += now > ticket.since

    # ── after each turn ──────────────────────────────────────────────────────────────────────────────────────────────

    def _tickets(self) -> Iterator[Key]:
        """The requests that have not ended, as the broker's registry has them."""
        directory, registry = self.broker.directory, self.broker.registry
        for client in directory.clients.values():
            for request in [*registry.waiting_for(client), *client.running]:
                yield _key(request)

    def _books(self) -> None:
        """The registry is what the ledger says: each request is in exactly one place, and the counts are right."""
        ledger, registry, limits = self.ledger, self.broker.registry, self.limits
        directory = self.broker.directory
        found = Counter(self._tickets())
        twice = [key for key, number in found.items() if number > 1]
        check(not twice, "{} are in two places", twice)
        lost = ledger.tickets.keys() - found.keys()
        check(not lost, "{} was lost", sorted(lost))
        check(not found.keys() - ledger.tickets.keys(), "a request lives on after its end")
        self._workers()
        self._clients()
        for name, service in directory.services.items():
            workers = [seat for seat in ledger.seats.values() if seat.service == name]
            if name in ledger.throttles and not (workers or service.waiting):
                continue  # it is remembered until its limits no longer matter
            check(bool(workers or service.waiting), "nothing is left of {!r}, but its name", name)
            check(not service.arrived and not service.unsettled, "{!r} is not settled", name)
            check(service.available == sum(not seat.leaving for seat in workers), "{!r}: wrong count of workers", name)
            check(service.schedule.capacity == ledger.capacity(name), "C6: {!r} has the wrong capacity", name)
            running = sum(len(seat.held) for seat in workers)
            check(service.running == running, "{!r}: the count of running requests is wrong", name)
            no_wait = {_key(request) for request in service.no_wait}
            expected = {each.key for each in ledger.waiting.get(name, ()) if not each.options.wait}
            check(no_wait == expected, "{!r}: {} are not to wait, {} are", name, no_wait, expected)
            check(not expected or service.available > 0, "X1: {} waits, but not for any worker", expected)
        remembered = directory.services.keys() & ledger.throttles.keys()
        check(
            directory.services.keys() == ledger.services_now | remembered, "the services are not those that are in use"
        )
        check(len(directory.services) <= limits.max_services, "more than max_services services")
        queued = [ticket for ticket in ledger.tickets.values() if ticket.waits]
        check(registry.queued == len(queued), "the count of queued requests is wrong")
        check(
            registry.request_bytes == ledger.request_bytes(ledger.tickets.values()),
            "C40: the bytes charged for requests are wrong",
        )
        held = sum(len(seat.held) for seat in ledger.seats.values())
        check(registry.running == held, "the count of running requests is wrong")
        for name, value in self.broker.stats.as_dict().items():
            expected_value = getattr(ledger.stats, name)
            check(value == expected_value, "stats.{} is {}, not {}", name, value, expected_value)

    def _workers(self) -> None:
        directory, seats = self.broker.directory, self.ledger.seats
        found = [worker.route for worker in directory.workers.values()]
        check(found == [seat.route for seat in seats.values()], "the registered workers are not those that sent READY")
        check(len(seats) <= self.limits.max_workers, "more than max_workers workers")
        for worker, seat in zip(directory.workers.values(), seats.values(), strict=True):
            check(worker.held.keys() == seat.held.keys(), "{} does not hold what it was given", seat)
            check(worker.credit == seat.credit, "C6: {} has the credit {}, not {}", seat, worker.credit, seat.credit)
            check(worker.leaving == seat.leaving, "C16: {}: leaving is {}", seat, worker.leaving)
            check(worker.suspects == seat.suspects, "C17: {} has {} suspects", seat, worker.suspects)
            check(not (seat.leaving and not seat.held), "C16: {} is leaving, holds nothing, and is kept", seat)

    def _clients(self) -> None:
        directory, registry, ledger = self.broker.directory, self.broker.registry, self.ledger
        open_requests = Counter(ticket.client for ticket in ledger.tickets.values())
        found = {_peer(client.key): client.requests for client in directory.clients.values()}
        check(found == dict(open_requests), "the clients are not those that have requests")
        numbered = {(_peer(request.client.key), request.number) for request in registry.numbered}
        check(numbered == ledger.numbers.keys(), "X1: the numbers are not those of the requests")
        behind = {peer for peer in [*open_requests, *ledger.seats] if len(peer) > 1}
        known = {_peer(key) for proxy in directory.proxies.values() for key in proxy.peers}
        check(behind == known, f"those behind proxies are {known}, not {behind}")

    def _punctual(self, now: float) -> None:
        """After a tick nothing is overdue; the broker's timers may be late by a fraction of an interval."""
        self._check_started(now)
        heartbeat, expiry = 1.1 * self.limits.heartbeat, self.limits.expiry + GRAIN + EPSILON
        for seat in self.ledger.seats.values():
            if now >= seat.last_sent + heartbeat:
                raise Broken(f"C13: {seat} was sent nothing for an interval")
            if now >= seat.last_seen + self.ledger.patience(seat) + heartbeat:
                raise Broken(f"C13: {seat} is dead, but kept")
        for ticket in self.ledger.tickets.values():
            if ticket.waits and now >= ticket.since + expiry:
                raise Broken(f"C12: {ticket} has not expired")
            if now >= ticket.deadline + GRAIN + EPSILON:
                raise Broken(f"X1: {ticket} lives on after its time has passed")


def _side(ticket: Ticket) -> tuple[Peer, str]:
    return ticket.client, ticket.options.group


def _peer(key: Any) -> Peer:
    return (key,) if isinstance(key, bytes) else key


def _key(request: Request) -> Key:
    return _peer(request.client.key), bytes(request.body[0])


def _compare(said: list[Said], expected: list[Said]) -> None:
    """What each peer was told of each of its requests is what was expected, in that order."""
    if said == expected:
        return
    by_peer: dict[Any, tuple[list[Said], list[Said]]] = defaultdict(lambda: ([], []))
    for at, each in [*((0, each) for each in said), *((1, each) for each in expected)]:
        by_peer[each.to, each.number][at].append(each)
    for told, wanted in by_peer.values():
        if Code.MALFORMED in {each.code for each in wanted}:  # then the order does not matter
            told.sort(key=lambda said: (said.kind.value, said.code))
            wanted.sort(key=lambda said: (said.kind.value, said.code))
        right = len(told) == len(wanted) and all(map(matches, told, wanted))
        if not right:
            raise Broken(_complaint(told, wanted))


def _reorder(waiting: Waiting, first: list[Ticket]) -> None:
    """Let `first` be dispatched first, in that order."""
    tickets = [*first, *(ticket for ticket in waiting.line if ticket not in first)]
    waiting.line.turns = [((), tickets)] if tickets else []


def _difference(planned: list[Any], actual: list[Any], left: list[Any], found: list[Any]) -> str:
    """Which rule the broker has broken."""
    for (ticket, seat), (actual_ticket, actual_seat) in zip(planned, actual, strict=False):
        if ticket is not actual_ticket:
            returned = " C17:" if ticket.handed else ""
            return f"C20:{returned} it was the turn of {ticket}, not of {actual_ticket}"
        if seat is not actual_seat:
            return f"C21: {ticket} goes to {actual_seat}, but {seat} has less to do"
    if len(planned) > len(actual):
        ticket, seat = planned[len(actual)]
        return f"C12: {ticket} waits, but {seat} has free credit"
    if len(planned) < len(actual):
        ticket, seat = actual[len(planned)]
        return f"C21: {ticket} goes to {seat}, but was to wait"
    return f"C17, C20: there wait {found}, not {left}"


def _complaint(told: list[Said], wanted: list[Said]) -> str:
    """Which rule the broker has broken."""
    kinds = {each.kind for each in (*told, *wanted)}
    rule = "C3, C18, C32"
    if Kind.CANCEL in kinds:
        rule = "X1: CANCEL"
    elif Kind.ERROR in kinds:
        rule = "X1: ERROR"
    elif Kind.DISCONNECT in kinds:
        rule = "C14, C16"
    return f"{rule}: the broker said {told}, not {wanted}"

"""Faulty replacements for methods of the machines, and the rule that the simulation must report for each."""

import copy
import random
from typing import Any

from support.peers import body_of, record

from zmdp.clients.legacy.session import LegacySession
from zmdp.clients.x1.broker_connection import BrokerConnection
from zmdp.clients.x1.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.broker.core import requests
from zmdp.mdp.broker.core.admission import Admission
from zmdp.mdp.broker.core.clients import ClientDialog, GivenUp
from zmdp.mdp.broker.core.directory import Directory
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.outgoing import Outgoing
from zmdp.mdp.broker.core.records import key_of
from zmdp.mdp.broker.core.registry import Registry
from zmdp.mdp.broker.core.requests import Requests
from zmdp.mdp.broker.core.scheduling.fair_queue import FairQueue
from zmdp.mdp.broker.core.scheduling.groups import Gate, Group, Groups
from zmdp.mdp.broker.core.scheduling.schedule import Pool, Schedule
from zmdp.mdp.broker.core.workers import WorkerDialog
from zmdp.mdp.timers import NEVER
from zmdp.mdp.wire.batch import Batch
from zmdp.workers.session.held import HeldRequests
from zmdp.workers.session.session import WorkerSession

_enqueue = Registry.enqueue

# ── who gets what ────────────────────────────────────────────────────────────────────────────────────────────────────


def no_turns(queue: FairQueue) -> Any:
    """A client with many requests is served until none is left."""
    request = queue._queues.first.requests.first
    queue.remove(request)
    return request


def oldest_first(pool: Pool, worker: Any, load: int, add: Any = Pool.add) -> None:
    """Of workers with the same load the one that was used least recently is next."""
    add(pool, worker, load)
    line = pool._lists[load]
    line.remove(worker)
    line.append(worker)


def newest_first(pool: Pool, worker: Any, load: int, add: Any = Pool.add) -> None:
    """Of workers with the same load the one that was used last is next, even if it has failed."""
    add(pool, worker, load)
    line = pool._lists[load]
    line.remove(worker)
    line.prepend(worker)


def most_loaded(pool: Pool) -> Any:
    """The worker that holds the most requests gets the next one."""
    return next((line.first for line in reversed(pool._lists) if line.first), None)


def suspects_together(schedule: Schedule, now: float, next_pair: Any = Schedule.next_pair) -> Any:
    """A worker that holds a suspect gets another one."""
    if schedule.groups is not None:
        return next_pair(schedule, now)
    if schedule.suspects.size:
        worker = schedule.next_worker()
        return None if worker is None else (schedule.suspects.take(), worker)
    if schedule.queue.size:
        worker = schedule.next_worker()
        return None if worker is None else (schedule.queue.take(), worker)
    return None


def suspects_last(schedule: Schedule, now: float, next_pair: Any = Schedule.next_pair) -> Any:
    """Other requests overtake those whose worker died."""
    worker = schedule.next_worker()
    if schedule.queue.size and worker is not None:
        return schedule.queue.take(), worker
    return next_pair(schedule, now)


def to_the_leaving(schedule: Schedule, worker: Any, update: Any = Schedule.update) -> None:
    """A worker that is leaving gets more."""
    leaving, worker.leaving = worker.leaving, False
    update(schedule, worker)
    worker.leaving = leaving


def without_credit(workers: WorkerDialog, command: Any, role: Any, now: float) -> None:
    """CREDIT changes nothing."""
    worker = workers._seen(command, role, now)
    if worker is not None:
        workers._directory.set_credit(worker, worker.credit)


def over_credit(schedule: Schedule, worker: Any, update: Any = Schedule.update) -> None:
    """A worker gets one more than it has credit for."""
    worker.credit += 1
    update(schedule, worker)
    worker.credit -= 1


def wait_too_long(registry: Registry, request: Any, now: float, *, front: bool = False) -> None:
    """A request waits though its time has passed."""
    _enqueue(registry, request, now, front=front)
    registry.expiries.clear(request)
    registry.expiries.set(request, now + registry._expiry)


def no_ttl(requests: Requests, worker: Any, request: Any, now: float, dispatch: Any = Requests._dispatch) -> None:
    """The time of a request stands still while a worker has it."""
    dispatch(requests, worker, request, now)
    requests._registry.expiries.clear(request)


def old_address(requests: Requests, worker: Any, request: Any, now: float, dispatch: Any = Requests._dispatch) -> None:
    """An address is given out to worker after worker."""
    dispatch(requests, worker, request, now)
    if requests.next_address % 3 == 0:
        requests.next_address -= 1


def untold_ttl(request: Any, now: float) -> int:
    """A worker is not told how much time is left."""
    return 0


def first_attempt(
    packed: Batch, address: int, ttl: int, attempt: int, *rest: Any, work: Any = Batch.request_to_worker
) -> None:
    """A worker is not told that it is not the first."""
    work(packed, address, ttl, 1, *rest)


def lost_record(packed: Batch, address: int, *rest: Any, work: Any = Batch.request_to_worker) -> None:
    """Some records get lost when they are packed."""
    if address % 20:
        work(packed, address, *rest)


def lost_reply(packed: Batch, command: int, number: int, body: Any, reply: Any = Batch.reply) -> None:
    """Some records to clients get lost when they are packed."""
    if number != 3 or command == 4:
        reply(packed, command, number, body)


# ── the end of workers and requests ──────────────────────────────────────────────────────────────────────────────────


def forget_request(requests: Requests, attempt: Any, now: float) -> None:
    """The request is lost with its worker."""


def restream(outgoing: Outgoing, request: Any, *rest: Any, send: Any = Outgoing.reply) -> None:
    """A stream is begun again by another worker."""
    send(outgoing, request, *rest)
    if request.attempt is not None:
        request.attempt.streamed = False


def keep_service(directory: Directory, service: Any) -> None:
    """A service stays when nothing is left of it."""


def any_address(
    workers: WorkerDialog, command: Any, role: Any, now: float, attempt: Any = WorkerDialog._attempt
) -> Any:
    """A reply is taken for that of the worker's first request, whatever its address."""
    worker = workers._directory.workers.get(key_of(command.route))
    if worker is not None and worker.held and worker.header == command.header:
        command = copy.copy(command) if isinstance(command, wire.Reply) else command
        address = next(iter(worker.held))
        if isinstance(command, wire.Reply):
            command.id = address
        else:
            command = command._replace(id=address)
    return attempt(workers, command, role, now)


def no_late(workers: WorkerDialog, command: Any, role: Any, now: float, attempt: Any = WorkerDialog._attempt) -> Any:
    """A worker that replies too late is disconnected."""
    workers._state.first_address = workers._requests.next_address
    return attempt(workers, command, role, now)


def blame_release(
    workers: WorkerDialog, command: Any, role: Any, now: float, release: Any = WorkerDialog._release
) -> None:
    """RELEASE counts as an attempt."""
    worker = workers._directory.workers.get(key_of(command.route))
    attempt = None if worker is None else worker.held.get(command.id)
    if attempt is not None and worker is not None:
        worker.suspects += not attempt.request.attempts
        attempt.request.attempts += 1
    release(workers, command, role, now)


def had_it(workers: WorkerDialog, command: Any, role: Any, now: float, release: Any = WorkerDialog._release) -> None:
    """Who released a request is told of as one who had it."""
    worker = workers._directory.workers.get(key_of(command.route))
    attempt = None if worker is None else worker.held.get(command.id)
    if attempt is not None:
        attempt.request.handed += 1
    release(workers, command, role, now)


def blame_unreached(workers: WorkerDialog, worker: Any, *args: Any, forget: Any = WorkerDialog._forget) -> Any:
    """A request is blamed for the end of a worker that it has never reached."""
    worker.unreached_from = -1
    return forget(workers, worker, *args)


def impatient(workers: WorkerDialog, worker: Any) -> float:
    """A busy worker has no grace."""
    return workers._limits.patience


def let_go_at_once(
    workers: WorkerDialog, command: Any, role: Any, now: float, disconnect: Any = WorkerDialog._disconnect
) -> None:
    """DISCONNECT is answered while the worker holds requests."""
    disconnect(workers, command, role, now)
    worker = workers._directory.workers.get(key_of(command.route))
    if worker is not None and worker.held:
        workers._left(worker, now)


def never_let_go(workers: WorkerDialog, worker: Any, now: float) -> None:
    """DISCONNECT is not answered."""


def one_worker(directory: Directory, identity: bytes, workers_at: Any = Directory.workers_at) -> Any:
    """With a connection one of the workers behind it is lost, and the others stay."""
    return workers_at(directory, identity)[:1]


# ── what peers are told ──────────────────────────────────────────────────────────────────────────────────────────────


def without_cancel(packed: Batch, command: int, number: int, signal: Any = Batch.signal) -> None:
    """A worker is not told that nobody waits any more."""
    if command != 8:
        signal(packed, command, number)


def cancel_to_all(requests: Requests, request: Any, *args: Any, drop: Any = Requests.drop) -> None:
    """CANCEL goes to a worker that does not speak X1."""
    drop(requests, request, *args)
    attempt = request.attempt
    if attempt is not None and attempt.worker.header == wire.W02:
        requests._outgoing.add([*attempt.worker.route, wire.WX1, wire.BATCH, record(8, attempt.address)])


def twice(
    requests: Requests, request: Any, reason: Drop, now: float, attempt: Any = None, report: Any = Requests.report
) -> None:
    """An X1 client is told twice."""
    report(requests, request, reason, now, attempt)
    if request.header == wire.CX1:
        requests._outgoing.error(request.client, request.number, 408, b"again", [])


def never(requests: Requests, request: Any, reason: Drop, now: float, attempt: Any = None) -> None:
    """An X1 client is not told."""
    requests._stats.dropped[reason] += 1


def tell_all(
    requests: Requests, request: Any, reason: Drop, now: float, attempt: Any = None, report: Any = Requests.report
) -> None:
    """A client that does not speak X1 is told too."""
    report(requests, request, reason, now, attempt)
    if request.header == wire.C02:
        error = record(4, 1, b"\x01\xf4\0\0\0\0\0" + body_of())
        requests._outgoing.add([*request.client.path, b"", wire.CX1, wire.BATCH, error])


def tell_late(workers: WorkerDialog, command: Any, role: Any, now: float, failure: Any = WorkerDialog._error) -> None:
    """An ERROR for an abandoned request goes to its client all the same."""
    worker = workers._directory.workers.get(key_of(command.route))
    attempt = None if worker is None else worker.held.get(command.id)
    failure(workers, command, role, now)
    if attempt is not None and attempt.abandoned and attempt.request.header == wire.CX1:
        request = attempt.request
        workers._outgoing.error(request.client, request.number, command.code, b"", [], b"", 0)


def patient(admission: Admission, request: Any, now: float, refusal: Any = Admission._refusal) -> Drop | None:
    """A request waits for a worker though it was not to."""
    drop: Drop | None = refusal(admission, request, now)
    return None if drop is Drop.NO_WORKER else drop


def let_all_wait(registry: Registry, request: Any, now: float, *, front: bool = False) -> None:
    """A request goes on waiting when the last worker has left."""
    raw, _, *others = request.options
    request.options = wire.Options(raw, True, *others)
    _enqueue(registry, request, now, front=front)


def forget_ended(registry: Registry, client: Any, number: wire.RequestId) -> bool:
    """The broker does not know of requests that have ended."""
    return False


def answer_slow_readers(clients: ClientDialog, identity: bytes, now: float) -> None:
    """A client that has missed messages goes on hearing from the broker."""


def give_up_proxies(given_up: GivenUp, key: Any, now: float, includes: Any = GivenUp.includes) -> Any:
    """A proxy is given up for as long as anybody behind it says something."""
    return includes(given_up, key if isinstance(key, bytes) else key[0], now)


def allow_all(clients: ClientDialog, request: Any) -> None:
    """Every role may call everything."""


def anyone(workers: WorkerDialog, command: Any, role: Any) -> bool:
    """Another role speaks for a worker."""
    worker = workers._directory.workers.get(key_of(command.route))
    if worker is not None:
        worker.role = role
    return False


def any_client(directory: Directory, route: wire.Route, role: Any, client: Any = Directory.client) -> Any:
    """Another role speaks for a client."""
    found = client(directory, route, role)
    found.role = role
    return found


def free_when_held(registry: Registry, *args: Any, assign: Any = Registry.assign, **rest: Any) -> Any:
    """A request that a worker holds is not charged."""
    attempt = assign(registry, *args, **rest)
    registry.request_bytes -= attempt.request.charge
    attempt.request.charge = 0
    return attempt


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def deaf(session: WorkerSession, reason: str, *args: Any, lose: Any = WorkerSession.lose, **kwargs: Any) -> None:
    """A worker does not give up its connection when it is told to."""
    if "DISCONNECT" not in reason and "refused" not in reason:
        lose(session, reason, *args, **kwargs)


def deaf_to_cancel(session: WorkerSession, address: Any, now: float) -> None:
    """A worker takes no notice of CANCEL."""


def forget_unbegun(requests: HeldRequests, keep: int, release: Any = HeldRequests.release) -> list[Any]:
    """A worker forgets requests that it should return."""
    release(requests, keep)
    return []


def secretive(session: WorkerSession) -> None:
    """A worker does not tell of a credit that has changed."""
    session.credit = session._requests.credit


def greedy(requests: HeldRequests, now: float) -> Any:
    """A worker begins all that it holds at once."""
    if not requests.unbegun:
        return None
    request = requests.unbegun.popleft()
    requests._running[request.address] = now
    return request


def never_give_up(session: WorkerSession, request: Any, now: float, *, ended: bool = False) -> None:
    """A request whose handler does not end stays with its worker."""
    session._requests._active_at.pop(request.address, None)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def asleep(session: LegacySession, now: float) -> None:
    """A client does nothing when it is time to."""


def repeat_stream(session: LegacySession, now: float, tick: Any = LegacySession.tick) -> Any:
    """A client sends again though a part was handed out."""
    session.streamed = False
    return tick(session, now)


def late_cancel(connection: BrokerConnection, call: Any) -> None:
    """A client does not tell the broker that it waits no more."""


def restream_x1(session: ClientSession, *told: Any, lose: Any = ClientSession.lose, **rest: Any) -> None:
    """A client sends again though a part was handed out."""
    for call in session.current.calls.values():
        call.streamed = False
    lose(session, *told, **rest)


def renumber(session: ClientSession, where: str, now: float, connected: Any = ClientSession.connected) -> Any:
    """A client sends again under new numbers."""
    waiting = session.current.calls
    for call in list(waiting.values()):
        del waiting[call.number]
        call.number += 1000
        waiting[call.number] = call
    return connected(session, where, now)


def forget_calls(session: ClientSession, where: str, now: float, connected: Any = ClientSession.connected) -> Any:
    """A client does not send again."""
    connection = connected(session, where, now)
    connection.take_messages()
    return connection


def unhurried(session: ClientSession, call: Any, now: float) -> None:
    """A client relies on the broker to end its calls in time."""


def hand_out_twice(session: ClientSession, call: Any, error: Any, fail: Any = ClientSession._fail) -> None:
    """A caller gets two errors."""
    fail(session, call, error)
    session.events.append((call, error))


def uncounted(gate: Gate, now: float) -> None:
    """A request that starts does not count towards the rate."""
    gate.running += 1


def wide_open(groups: Groups, now: float) -> bool:
    """The limit of a service is not looked at, only those of its groups."""
    return True


def asleep_in_a_group(groups: Groups, group: Group, opens: float, park: Any = Groups._park) -> None:
    """What a limit holds back is not looked at again."""
    park(groups, group, NEVER)


def trusting(session: ClientSession, now: float) -> None:
    """A client never asks whether the broker is there."""
    for call in session._due.pop_due(now):
        call.place.cancel(call)
        session._fail(call, session._overdue(call, session.current, now))
    session.current.expect_sign_of_life(now)


def impolite(connection: BrokerConnection, call: Any, now: float, add: Any = BrokerConnection.add) -> None:
    """A client sends some requests twice."""
    add(connection, call, now)
    if random.Random(call.number).random() < 0.1:
        add(connection, call, now)


MUTANTS = [
    (FairQueue, "prepend", FairQueue.append, "it was the turn of"),
    (FairQueue, "take", no_turns, "C20"),
    (Pool, "add", oldest_first, "C21"),
    (Pool, "add", newest_first, "C21"),
    (Pool, "least", most_loaded, "C21"),
    (Schedule, "next_pair", suspects_together, "a second suspect"),
    (Schedule, "next_pair", suspects_last, "C17"),
    (Schedule, "update", to_the_leaving, "C6: "),
    (Schedule, "update", over_credit, "C6: "),
    (WorkerDialog, "_credit", without_credit, "C"),
    (Gate, "start", uncounted, "C48"),
    (Groups, "is_open", wide_open, "C48"),
    (Groups, "_park", asleep_in_a_group, "C48"),
    (Registry, "enqueue", wait_too_long, "lives on after its time has passed"),
    (Requests, "_dispatch", no_ttl, "lives on after its time has passed"),
    (Requests, "_dispatch", old_address, "C32"),
    (requests, "ttl_of", untold_ttl, "has the ttl"),
    (Batch, "request_to_worker", first_attempt, "is told to be the attempt"),
    (Batch, "request_to_worker", lost_record, "C12"),
    (Batch, "reply", lost_reply, "C3, C18, C32"),
    (Requests, "place_again", forget_request, "was lost"),
    (Outgoing, "reply", restream, "WORKER_LOST"),
    (Directory, "forget_if_empty", keep_service, "nothing is left"),
    (WorkerDialog, "_attempt", any_address, "C3, C18, C32"),
    (WorkerDialog, "_attempt", no_late, "C14"),
    (WorkerDialog, "_release", blame_release, "C17"),
    (WorkerDialog, "_release", had_it, "is told to be the attempt"),
    (WorkerDialog, "_forget", blame_unreached, "C17"),
    (WorkerDialog, "_patience", impatient, "though it is alive"),
    (WorkerDialog, "_disconnect", let_go_at_once, "C1"),
    (WorkerDialog, "_left", never_let_go, "C14, C16"),
    (Directory, "workers_at", one_worker, "were not probed"),
    (Batch, "signal", without_cancel, "X1: CANCEL"),
    (Requests, "drop", cancel_to_all, "X1: CANCEL"),
    (Requests, "report", twice, "X1: ERROR"),
    (Requests, "report", never, "X1: ERROR"),
    (Requests, "report", tell_all, "X1: ERROR"),
    (WorkerDialog, "_error", tell_late, "X1: ERROR"),
    (Admission, "_refusal", patient, "X1: ERROR"),
    (ClientDialog, "_authorise", allow_all, "has the options"),
    (WorkerDialog, "_is_foreign", anyone, "C"),
    (Directory, "client", any_client, "the broker said"),
    (Registry, "assign", free_when_held, "C40"),
    (Registry, "enqueue", let_all_wait, "are not to wait"),
    (Registry, "ended_lately", forget_ended, "X1: ERROR"),
    (ClientDialog, "give_up", answer_slow_readers, "the broker said"),
    (GivenUp, "includes", give_up_proxies, "was lost"),
    (WorkerSession, "lose", deaf, "C9"),
    (WorkerSession, "_cancel_request", deaf_to_cancel, "missed a CANCEL"),
    (HeldRequests, "release", forget_unbegun, "not recovered"),
    (WorkerSession, "_announce", secretive, "not recovered"),
    (HeldRequests, "begin", greedy, "runs too many handlers"),
    (WorkerSession, "abandon", never_give_up, "not recovered"),
    (LegacySession, "tick", asleep, "time stands still"),
    (LegacySession, "tick", repeat_stream, "C17"),
    (BrokerConnection, "cancel", late_cancel, "did not send CANCEL"),
    (ClientSession, "lose", restream_x1, "after a part of its reply"),
    (ClientSession, "connected", renumber, "under a number of no call"),
    (ClientSession, "connected", forget_calls, "does not send"),
    (ClientSession, "_set_due", unhurried, "is not over, but was due"),
    (ClientSession, "_fail", hand_out_twice, "X1: "),
    (ClientSession, "tick", trusting, "though all is well"),
    (BrokerConnection, "add", impolite, "a second time on a connection"),
]
"""Class, method, replacement, and text that the failure must contain."""

FIRST_SEEDS = {
    FairQueue.append: 1, answer_slow_readers: 5, any_client: 13, anyone: 5, forget_unbegun: 51, give_up_proxies: 5,
    never_give_up: 16, old_address: 1, one_worker: 5, repeat_stream: 27, restream_x1: 6, secretive: 6,
    to_the_leaving: 2, trusting: 47,
}  # fmt: skip
"""The first seed that finds each of those that few seeds find.  If it no longer does, the search only takes longer."""


def name_of(mutant: Any) -> str:
    """Return the name of a mutant, for its test."""
    return str(getattr(mutant, "__func__", mutant).__name__)

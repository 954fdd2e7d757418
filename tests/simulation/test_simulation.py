"""The simulator: many seeds, and proofs that it can be repeated, that it explores, and that it finds what is broken."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from simulation.simulation import Failed, Simulation

from zmdp.clients.pirate import PirateSession
from zmdp.clients.session import ClientSession
from zmdp.mdp import compiled, wire
from zmdp.mdp.broker import Broker
from zmdp.mdp.journal import Drop
from zmdp.mdp.registry import NEVER, FairQueue, Registry, Service
from zmdp.workers.session import WorkerSession

SEEDS = 1000
CHUNK = 50

RARE = [
    "CANCEL met the FINAL on the way",
    "CANCEL reached a worker",
    "DISCONNECT, reconnected after a backoff",
    "DISCONNECT, reconnected at once",
    "EHOSTUNREACH",
    "ERROR of an abandoned request goes nowhere",
    "FINAL of an abandoned request goes nowhere",
    "REQUEST to a worker that is gone",
    "X1 call cancelled",
    "X1 client closed",
    "X1 client got its reply",
    "X1 client: BrokerUnreachable",
    "X1 client: RequestTimeout",
    "X1 client: RequestTimeout 408",
    "X1 client: RetryLater 429",
    "X1 client: RetryLater 503",
    "X1 client: ServiceError 418",
    "X1 client: ServiceError 500",
    "X1 client: ServiceNotFound 404",
    "X1 client: StreamInterrupted",
    "X1 client: StreamInterrupted 502",
    "X1 client: WorkerLost 502",
    "X1 request sent again",
    "X1: CANCEL forwarded",
    "X1: CANCEL met the end of the request",
    "X1: CANCEL of nothing",
    "X1: ERROR of a worker",
    "X1: cancelled, waiting",
    "X1: cancelled, with a worker",
    "X1: dispatched with its attempt",
    "X1: dispatched with what is left of its ttl",
    "X1: draining, at once",
    "X1: expired, waiting",
    "X1: heartbeat answered",
    "X1: malformed",
    "X1: no-worker, at once",
    "X1: no-worker, waiting",
    "X1: number used twice",
    "X1: slow reader ignored",
    "X1: the broker ended first",
    "X1: ttl-passed, at once",
    "X1: ttl-passed, waiting",
    "X1: ttl-passed, with a worker",
    "X1: worker-lost-after-partial, at once",
    "X1: workers-lost, at once",
    "broker silent for a worker",
    "broker started again",
    "client gave up",
    "client got its reply",
    "client sent again",
    "client was told of a failure",
    "connection lost",
    "connection with several slots lost",
    "dropped: cancelled",
    "dropped: client-gone",
    "dropped: draining",
    "dropped: expired",
    "dropped: handler-failed",
    "dropped: memory-full",
    "dropped: queue-full",
    "dropped: reply-too-large",
    "dropped: too-many-services",
    "dropped: worker-lost-after-partial",
    "dropped: workers-lost",
    "handler failed",
    "handler stuck",
    "invalid: bad-code",
    "invalid: bad-options",
    "invalid: envelope-too-deep",
    "invalid: no-header",
    "invalid: no-number",
    "invalid: unknown-command",
    "invalid: unknown-number",
    "late or stray ERROR dropped",
    "late or stray FINAL dropped",
    "lost: broker-closing",
    "lost: disconnected",
    "lost: refused",
    "lost: silent",
    "lost: unreachable",
    "message for a slot that has left",
    "mmi",
    "partials",
    "redispatched",
    "refused: not-registered",
    "refused: reply-to-wrong-client",
    "refused: reply-without-request",
    "refused: reserved-name",
    "refused: second-ready",
    "refused: too-many-services",
    "refused: too-many-workers",
    "refused: wrong-dialect",
    "request given back by DISCONNECT",
    "request of a lost worker back in the queue",
    "request of a lost worker given to another",
    "served: 0.1 client by 0.1 worker",
    "served: 0.1 client by 0.2 worker",
    "served: 0.1 client by X1 worker",
    "served: 0.2 client by 0.1 worker",
    "served: 0.2 client by 0.2 worker",
    "served: 0.2 client by X1 worker",
    "served: X1 client by 0.1 worker",
    "served: X1 client by 0.2 worker",
    "served: X1 client by X1 worker",
    "slot left, others stayed",
    "slot registered again on the same connection",
    "slow reader dropped",
    "stream broken off by its worker",
    "stream interrupted",
    "worker died in the middle of a request",
    "worker ended a request early: 408",
    "worker ended a request early: 499",
]
"""What must have happened in `SEEDS` seeds, or else they prove too little."""


@cache
def events_of(first: int) -> Counter[str]:
    """What happened in the chunk of seeds that begins at `first`."""
    return sum((Simulation(seed).run() for seed in range(first, first + CHUNK)), Counter())


COMPILED = compiled.parts()["machines"]
"""Then a few seeds show that the compiled machines do the same: the rest runs with ZMDP_PURE=1."""


@pytest.mark.parametrize("first", range(0, 100 if COMPILED else SEEDS, CHUNK))
def test_no_rule_is_broken(first: int) -> None:
    assert events_of(first)["client got its reply"] > 0


@pytest.mark.skipif(COMPILED, reason="it takes all the seeds: ZMDP_PURE=1 runs them")
def test_the_seeds_explore() -> None:
    totals = sum(map(events_of, range(0, SEEDS, CHUNK)), Counter[str]())
    assert [name for name in RARE if not totals[name]] == []


# ── it can be repeated ───────────────────────────────────────────────────────────────────────────────────────────────


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []
    Simulation(seed, lines.append).run()
    return lines


def test_a_seed_is_repeated_message_by_message() -> None:
    lines = trace_of(1)
    assert len(lines) > 100
    assert trace_of(1) == lines


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_nothing_depends_on_the_order_of_hashes(hash_seed: str) -> None:
    script = Path(__file__).parents[1] / "simulate.py"
    run = subprocess.run(
        [sys.executable, script, "--seed", "1", "--trace"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    lines = trace_of(1)
    told = "\n".join(run.stdout.decode().splitlines()[: len(lines)])
    assert hashlib.sha256(told.encode()).digest() == hashlib.sha256("\n".join(lines).encode()).digest()


# ── it finds what is broken ──────────────────────────────────────────────────────────────────────────────────────────


def forget_request(broker: Broker, request: Any, now: float) -> None:
    """The request is lost with its worker."""


def newest_first(registry: Registry, worker: Any) -> None:
    """The worker that was idle for the shortest time is served first."""
    worker.idle = True
    worker.service.idle.prepend(worker)


def restream(broker: Broker, request: Any, *rest: Any, answer: Any = Broker._answer) -> None:
    """A stream is begun again by another worker."""
    answer(broker, request, *rest)
    request.streamed = False


def keep_service(registry: Registry, service: Service) -> None:
    """A service stays when nothing is left of it."""


def no_turns(queue: FairQueue) -> None:
    """A client with many requests is served until none is left."""


def deaf(session: WorkerSession, reason: str, *args: Any, lose: Any = WorkerSession.lose, **kwargs: Any) -> None:
    """A worker does not give up its connection when it is told to."""
    if "DISCONNECT" not in reason:
        lose(session, reason, *args, **kwargs)


def asleep(session: PirateSession, now: float) -> None:
    """A client does nothing when it is time to."""


def repeat_stream(session: PirateSession, now: float, tick: Any = PirateSession.tick) -> Any:
    """A client sends again though a part was handed out."""
    session._streamed = False
    return tick(session, now)


def unnumbered(broker: Broker, request: Any, now: float, *, front: bool = False, place: Any = Broker._place) -> None:
    """The broker keeps no books of the numbers."""
    place(broker, request, now, front=front)
    request.client.numbered.clear()


def is_withdraw(message: wire.Message) -> bool:
    return isinstance(wire.decode_broker(message[1:]), wire.Withdraw)


def without_cancel(broker: Broker, *args: Any, abandon: Any = Broker._abandon) -> None:
    """A worker is not told that its request is abandoned."""
    abandon(broker, *args)
    broker._out = [message for message in broker._out if not is_withdraw(message)]


def cancel_to_all(broker: Broker, request: Any, *args: Any, abandon: Any = Broker._abandon) -> None:
    """CANCEL goes to a worker that does not speak X1."""
    abandon(broker, request, *args)
    if request.worker is not None and request.worker.header == wire.W02:
        broker._out.append(wire.withdraw(request.worker.route, request.client.identity))


def dispatch_late(broker: Broker, request: Any, now: float, *, front: bool = False, place: Any = Broker._place) -> None:
    """A request that waits is dispatched though its time has passed."""
    request.deadline = NEVER
    place(broker, request, now, front=front)


def no_ttl(broker: Broker, worker: Any, request: Any, now: float, dispatch: Any = Broker._dispatch) -> None:
    """The time of a request stands still while a worker has it."""
    dispatch(broker, worker, request, now)
    broker._expiries.clear(request)


def twice(broker: Broker, request: Any, reason: Drop, now: float, drop: Any = Broker._drop) -> None:
    """An X1 client is told twice."""
    before = len(broker._out)
    drop(broker, request, reason, now)
    broker._out += broker._out[before:]


def never(broker: Broker, request: Any, reason: Drop, now: float, drop: Any = Broker._drop) -> None:
    """An X1 client is not told."""
    before = len(broker._out)
    drop(broker, request, reason, now)
    del broker._out[before:]


def tell_all(broker: Broker, request: Any, reason: Drop, now: float, drop: Any = Broker._drop) -> None:
    """A client that does not speak X1 is told too."""
    drop(broker, request, reason, now)
    if request.header == wire.C02:
        broker._out.append(wire.error(request.route, request.service.name, b"500", b"it failed"))


def tell_late(broker: Broker, command: Any, now: float, failure: Any = Broker._failure) -> None:
    """An ERROR for an abandoned request goes to its client all the same."""
    worker = broker.registry.worker(command.route, command.header)
    request = worker.request if worker is not None else None
    failure(broker, command, now)
    if request is not None and request.abandoned:
        broker._out.append(wire.error(request.route, request.service.name, command.code, command.text))


def one_by_one(broker: Broker, workers: Any, *args: Any, lose: Any = Broker._lose) -> None:
    """What a slot held goes to the next one of the same lost connection."""
    for worker in workers:
        lose(broker, [worker], *args)


def one_slot(registry: Registry, identity: bytes, workers_of: Any = Registry.workers_of) -> Any:
    """With a connection one of its slots is lost, and the others stay."""
    return workers_of(registry, identity)[:1]


def any_slot(registry: Registry, route: wire.Route, header: bytes) -> Any:
    """What a slot says is taken for that of its connection's first."""
    return next(iter(registry.workers_of(route[0])), None)


def patient(broker: Broker, request: Any, now: float, refusal: Any = Broker._refusal) -> Drop | None:
    """A request waits for a worker though it was not to."""
    drop: Drop | None = refusal(broker, request, now)
    return None if drop is Drop.NO_WORKER else drop


def all_willing(registry: Registry, request: Any, *, front: bool = False, enqueue: Any = Registry.enqueue) -> None:
    """A request goes on waiting when the last worker has left."""
    raw, ttl, _, only_ttl = request.options
    request.options = wire.Options(raw, ttl, True, only_ttl)
    enqueue(registry, request, front=front)


def forget_ended(registry: Registry, route: wire.Route) -> bool:
    """The broker does not know of requests that have ended."""
    return False


def same_options(given: wire.Options, ttl: float | None, attempt: int) -> bytes:
    """A worker is not told how much time is left, nor that it is not the first."""
    return given.raw


def answer_slow_readers(broker: Broker, identity: bytes, now: float) -> list[wire.Message]:
    """A client that has missed messages goes on hearing from the broker."""
    return broker._gone(identity, now)


def late_cancel(session: ClientSession, *args: Any) -> None:
    """A client does not tell the broker that it waits no more."""


def restream_x1(session: ClientSession, reason: str, now: float, lose: Any = ClientSession.lose) -> None:
    """A client sends again though a part was handed out."""
    for call in session._calls.values():
        call.streamed = False
    lose(session, reason, now)


def renumber(session: ClientSession, where: str, now: float, connected: Any = ClientSession.connected) -> None:
    """A client sends again under new numbers."""
    for call in list(session._calls.values()):
        del session._calls[call.route]
        call.route = (b"%d" % next(session._numbers), b"")
        session._calls[call.route] = call
    connected(session, where, now)


def forget_calls(session: ClientSession, where: str, now: float, connected: Any = ClientSession.connected) -> None:
    """A client does not send again."""
    connected(session, where, now)
    session.messages.clear()


def unhurried(session: ClientSession, call: Any, now: float) -> None:
    """A client relies on the broker to end its calls in time."""


def hand_out_twice(session: ClientSession, call: Any, error: Any, fail: Any = ClientSession._fail) -> None:
    """A caller gets two errors."""
    fail(session, call, error)
    session.events.append((call, error))


def trusting(session: ClientSession, now: float) -> None:
    """A client never asks whether the broker is there."""
    for call in session._due.pop_due(now):
        session._tell_cancel(call)
        session._fail(call, session._overdue(call, now))
    session._begin_to_listen(now)


def deaf_to_cancel(session: WorkerSession, command: Any, now: float, take: Any = WorkerSession.take) -> Any:
    """A worker takes no notice of CANCEL."""
    return None if isinstance(command, wire.Withdraw) else take(session, command, now)


def run_all(seeds: int) -> None:
    for seed in range(seeds):
        Simulation(seed).run()


@pytest.mark.skipif(COMPILED, reason="what is compiled cannot be broken: ZMDP_PURE=1 has it not")
@pytest.mark.parametrize(
    ("owner", "name", "mutant", "rule"),
    [
        (FairQueue, "prepend", FairQueue.append, "C17"),
        (FairQueue, "next_turn", no_turns, "C20"),
        (Registry, "rest", newest_first, "C21"),
        (Broker, "_repeat", forget_request, "was lost"),
        (Broker, "_answer", restream, "C17"),
        (Registry, "forget_if_empty", keep_service, "nothing is left"),
        (WorkerSession, "lose", deaf, "C9"),
        (PirateSession, "tick", asleep, "time stands still"),
        (PirateSession, "tick", repeat_stream, "C17"),
        (Broker, "_place", unnumbered, "X1"),
        (Broker, "_abandon", without_cancel, "X1: CANCEL went to"),
        (Broker, "_abandon", cancel_to_all, "X1: CANCEL went to"),
        (Broker, "_place", dispatch_late, "after its time has passed"),
        (Broker, "_dispatch", no_ttl, "lives on after its time has passed"),
        (Broker, "_drop", twice, "X1: the ERRORs"),
        (Broker, "_drop", never, "X1: the ERRORs"),
        (Broker, "_drop", tell_all, "X1: the ERRORs"),
        (Broker, "_failure", tell_late, "X1: the ERRORs"),
        (Broker, "_refusal", patient, "X1: "),
        (Registry, "enqueue", all_willing, "waits, but not for any worker"),
        (Registry, "ended_lately", forget_ended, "X1: the ERRORs"),
        (wire, "renewed", same_options, "X1: "),
        (Broker, "_lose", one_by_one, "which is no worker"),
        (Registry, "workers_of", one_slot, "gone but not forgotten"),
        (Registry, "worker", any_slot, "C7: READY"),
        (Broker, "gone", answer_slow_readers, "C3, C18, C22, C24"),
        (ClientSession, "_tell_cancel", late_cancel, "did not send CANCEL"),
        (ClientSession, "lose", restream_x1, "after a part of its reply"),
        (ClientSession, "connected", renumber, "under a number of no call"),
        (ClientSession, "connected", forget_calls, "does not send"),
        (ClientSession, "_set_due", unhurried, "is not over, but was due"),
        (ClientSession, "_fail", hand_out_twice, "X1: "),
        (ClientSession, "tick", trusting, "not recovered"),
        (WorkerSession, "take", deaf_to_cancel, "missed a CANCEL"),
    ],
)
def test_a_broken_machine_is_found_out(
    owner: Any, name: str, mutant: Callable[..., Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Failed, match=r"to see it: python tests/simulate\.py --seed \d+ --trace") as caught:
        run_all(300)
    assert rule in str(caught.value)

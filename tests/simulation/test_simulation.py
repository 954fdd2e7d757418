"""Runs the simulator for many seeds: it is reproducible, reaches rare events, and detects broken machines."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation import mutants
from simulation.scenario import Failed
from simulation.simulation import Simulation
from support.processes import TIMEOUT_SECONDS

from zmdp import version
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import Loss, Refusal
from zmdp.mdp.wire import Reason

SEEDS = 600
CHUNK = 25
"""Seeds per test, few enough for the timeout of a test on a busy machine."""
QUICK = 25
"""Seeds that `make test` runs in pure Python, beside those of `EXPLORED`, which it runs compiled."""
EXPLORED = 200
"""Seeds in which every event in `RARE` must happen."""
MUTANT_SEEDS = 300
"""Seeds in which each mutant must be detected."""

DIALECTS = ["0.1", "0.2", "X1"]
NOT_DROPPED = {
    Drop.TOO_MANY_GROUPS,  # a million: test_limits
    Drop.LINKS_LOST, Drop.NO_BROKER, Drop.NOT_ALLOWED, Drop.NOT_ON_BEHALF, Drop.OPTIONS_TOO_LONG, Drop.ROLE_MEMORY_FULL,
    Drop.ROLE_OUTSTANDING, Drop.ROLE_QUEUED, Drop.TOO_MANY_UNSERVED, Drop.USER_NOT_ALLOWED,
}  # fmt: skip
"""What needs links, or roles that may not do everything, or settings that no scenario has."""
NOT_REFUSED = {
    Refusal.DRAINING, Refusal.NOT_ALLOWED, Refusal.OVERSIZED_REPLY, Refusal.WRONG_CLIENT, Refusal.TOO_MANY_SERVICES,
}  # fmt: skip
RARE = [
    "CANCEL met the FINAL on the way",
    "CANCEL reached a worker",
    "CREDIT",
    "CREDIT 0",
    "CREDIT below what is held",
    "DISCONNECT, reconnected after a backoff",
    "DISCONNECT, reconnected at once",
    "EHOSTUNREACH",
    "ERROR of an abandoned request goes nowhere",
    "FINAL of an abandoned request goes nowhere",
    "FINAL sent twice",
    "RELEASE",
    "RELEASE met CANCEL",
    "REQUEST crossed DISCONNECT",
    "REQUEST to a worker that is gone",
    "REQUEST to a worker that may have been dead",
    "X1 call",
    "X1 call cancelled",
    "X1 client closed",
    "X1 client connected",
    "X1 client got its reply",
    "X1 client: BrokerUnreachable",
    "X1 client: ClosedError",
    "X1 client: RequestRejected 413",
    "X1 client: RequestTimeout",
    "X1 client: RequestTimeout 408",
    "X1 client: RetryLater 429",
    "X1 client: RetryLater 503",
    "X1 client: ServiceError 404",
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
    "X1: broker-closing, waiting",
    "X1: broker-closing, with a worker",
    "X1: cancelled, waiting",
    "X1: cancelled, with a worker",
    "X1: dispatched with its attempt",
    "X1: dispatched with what is left of its ttl",
    "X1: draining, at once",
    "X1: expired, waiting",
    "X1: heartbeat answered",
    "X1: last-worker-lost, at once",
    "X1: last-worker-lost, waiting",
    "X1: malformed",
    "X1: memory-full, at once",
    "X1: no-worker, at once",
    "X1: no-worker, waiting",
    "X1: number used twice",
    "X1: queue-full, at once",
    "X1: reply-too-large, at once",
    "X1: request",
    "X1: slow reader ignored",
    "X1: the broker ended first",
    "X1: too-many-services, at once",
    "X1: ttl-passed, at once",
    "X1: ttl-passed, waiting",
    "X1: ttl-passed, with a worker",
    "X1: worker-lost-after-partial, at once",
    "X1: workers-lost, at once",
    "a worker has left",
    "a worker leaves while it holds requests",
    "a worker was lost with many requests",
    "batch of a client",
    "batch of a peer",
    "batch of the broker",
    "broker silent for a worker",
    "broker started again",
    "client gave up",
    "client got its reply",
    "client sent again",
    "client was told of a failure",
    "connected through a proxy",
    "connection lost",
    "connection with several workers lost",
    "errors",
    "handler failed",
    "handler given up",
    "handler stuck",
    "held ahead",
    "late",
    "late Error",
    "late Reply",
    "partials",
    "redispatched",
    "reply too large",
    "reply too late for its worker",
    "request back in the queue",
    "request dispatched again",
    "rogue message",
    "several dispatched in one turn",
    "several waited for several workers",
    "slow reader dropped",
    "stranger got its reply",
    "stranger leaves",
    "stream broken off by its worker",
    "stream interrupted",
    "suspect dispatched",
    "turn of several messages",
    "worker died in the middle of a request",
    "worker ended a request early: 499",
    "worker killed that held many",
    "worker process left",
    *(f"served: {client} client by {worker} worker" for client in DIALECTS for worker in DIALECTS),
    *(f"dropped: {each}" for each in {*Drop} - NOT_DROPPED),
    *(f"lost: {each}" for each in Loss),
    *(f"refused: {each}" for each in {*Refusal} - NOT_REFUSED),
    *(f"invalid: {each}" for each in {*Reason} - {Reason.TOO_LARGE}),
    "held back by a limit",
    "started within limits",
]
"""Events that must happen in the first `EXPLORED` seeds; otherwise the simulation covers too little."""


def events_of(first: int, seeds: int) -> Counter[str]:
    """Return the events of `seeds` seeds, from `first` on."""
    return sum((Simulation(seed).run() for seed in range(first, first + seeds)), Counter())


COMPILED = version.compiled_parts()["machines"]
"""Whether the machines are compiled.  Half of the seeds run compiled, the others with ZMDP_PURE=1."""


def chunks() -> list[Any]:
    """Return the first seeds of all chunks of this build, of which `make test` runs `QUICK`."""
    # Compiled, the test that follows runs the first seeds.
    firsts = range(EXPLORED, SEEDS // 2, CHUNK) if COMPILED else range(SEEDS // 2, SEEDS, CHUNK)
    quick = 0 if COMPILED else QUICK
    return [pytest.param(first, marks=pytest.mark.long if first >= firsts[0] + quick else ()) for first in firsts]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", chunks())
def test_no_rule_is_broken(first: int) -> None:
    assert events_of(first, CHUNK)["client got its reply"] > 0


@pytest.mark.timeout(3600)
@pytest.mark.compiled_only  # in pure Python, fewer seeds are run
def test_the_seeds_explore() -> None:
    totals = events_of(0, EXPLORED)
    assert [name for name in RARE if not totals[name]] == []


# ── it is reproducible ───────────────────────────────────────────────────────────────────────────────────────────────


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []
    Simulation(seed, lines.append).run()
    return lines


def test_a_seed_is_repeated_message_by_message() -> None:
    lines = trace_of(1)
    assert len(lines) > 100
    assert trace_of(1) == lines


def test_a_seed_takes_the_same_course_with_and_without_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    courses = []
    for federation in (True, False):
        monkeypatch.setattr(Simulation, "federation", staticmethod(lambda _, chosen=federation: chosen))
        courses.append(trace_of(1))
    assert courses[0] == courses[1]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_nothing_depends_on_the_order_of_hashes(hash_seed: str) -> None:
    script = Path(__file__).parents[1] / "simulate.py"
    run = subprocess.run(
        [sys.executable, script, "--seed", "1", "--trace"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    lines = trace_of(1)
    told = "\n".join(run.stdout.decode().splitlines()[: len(lines)])
    assert hashlib.sha256(told.encode()).digest() == hashlib.sha256("\n".join(lines).encode()).digest()


# ── it detects broken machines ───────────────────────────────────────────────────────────────────────────────────────


def run_until_it_fails(mutant: Callable[..., Any]) -> None:
    for seed in (mutants.FIRST_SEEDS.get(mutant, 0), *range(MUTANT_SEEDS)):
        Simulation(seed).run()


@pytest.mark.pure_only  # compiled machines cannot be patched
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("owner", "name", "mutant", "rule"), mutants.MUTANTS, ids=[mutants.name_of(each[2]) for each in mutants.MUTANTS]
)
def test_a_broken_machine_is_found_out(
    owner: Any, name: str, mutant: Callable[..., Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Failed, match=r"to reproduce it: python tests/simulate\.py --seed \d+ --trace") as caught:
        run_until_it_fails(mutant)
    assert rule in str(caught.value)

"""The simulator: many seeds, and proofs that it can be repeated, that it explores, and that it finds what is broken."""

import hashlib
import os
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from simulation.simulation import Failed, Simulation

from zmdp.clients.session import ClientSession
from zmdp.mdp.broker import Broker
from zmdp.mdp.registry import FairQueue, Registry, Service
from zmdp.workers.session import WorkerSession

SEEDS = 300
CHUNK = 30

RARE = [
    "DISCONNECT, reconnected after a backoff",
    "DISCONNECT, reconnected at once",
    "EHOSTUNREACH",
    "REQUEST to a worker that is gone",
    "broker silent for a worker",
    "broker started again",
    "client gave up",
    "client got its reply",
    "client sent again",
    "connection lost and made again",
    "dropped: client-gone",
    "dropped: draining",
    "dropped: expired",
    "dropped: memory-full",
    "dropped: queue-full",
    "dropped: reply-too-large",
    "dropped: too-many-services",
    "dropped: worker-lost-after-partial",
    "dropped: workers-lost",
    "handler stuck",
    "invalid message",
    "late or stray FINAL dropped",
    "lost: broker-closing",
    "lost: disconnected",
    "lost: refused",
    "lost: silent",
    "lost: unreachable",
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
    "slow reader dropped",
    "stream broken off by its worker",
    "stream interrupted",
    "worker died in the middle of a request",
]
"""What must have happened in `SEEDS` seeds, or else they prove too little."""


@cache
def events_of(first: int) -> Counter[str]:
    """What happened in the chunk of seeds that begins at `first`."""
    return sum((Simulation(seed).run() for seed in range(first, first + CHUNK)), Counter())


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_rule_is_broken(first: int) -> None:
    assert events_of(first)["client got its reply"] > 0


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


class NewestFirst(OrderedDict[Any, Any]):
    """Gives the last where the first is asked for."""

    def popitem(self, last: bool = True) -> Any:
        return super().popitem(last=not last)


def newest_first(service: Service, name: bytes, make: Any = Service.__init__) -> None:
    """The worker that was idle for the shortest time is served first."""
    make(service, name)
    service.idle = NewestFirst()


def restream(broker: Broker, request: Any, *rest: Any, answer: Any = Broker._answer) -> None:
    """A stream is begun again by another worker."""
    answer(broker, request, *rest)
    request.streamed = False


def keep_service(registry: Registry, service: Service) -> None:
    """A service stays when nothing is left of it."""


def no_turns(queue: FairQueue, client: bytes) -> None:
    """A client with many requests is served until none is left."""


def deaf(session: WorkerSession, *args: Any, **kwargs: Any) -> None:
    """A worker does not give up its connection."""


def asleep(session: ClientSession, now: float) -> None:
    """A client does nothing when it is time to."""


def repeat_stream(session: ClientSession, now: float, tick: Any = ClientSession.tick) -> Any:
    """A client sends again though a part was handed out."""
    session._streamed = False
    return tick(session, now)


def run_all(seeds: int) -> None:
    for seed in range(seeds):
        Simulation(seed).run()


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "rule"),
    [
        (FairQueue, "prepend", FairQueue.append, "C17"),
        (FairQueue, "turn", no_turns, "C20"),
        (Service, "__init__", newest_first, "C21"),
        (Broker, "_repeat", forget_request, "was lost"),
        (Broker, "_answer", restream, "C17"),
        (Registry, "forget_if_empty", keep_service, "nothing is left"),
        (WorkerSession, "lose", deaf, "C9"),
        (ClientSession, "tick", asleep, "time stands still"),
        (ClientSession, "tick", repeat_stream, "C17"),
    ],
)
def test_a_broken_machine_is_found_out(
    owner: type, name: str, mutant: Callable[..., Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Failed, match=r"to see it: python tests/simulate\.py --seed \d+ --trace") as caught:
        run_all(300)
    assert rule in str(caught.value)

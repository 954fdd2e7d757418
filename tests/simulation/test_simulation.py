"""Runs the simulator for many seeds: it is reproducible, reaches rare events, and detects broken machines."""

import ast
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

from zmdp.mdp import compiled

SEEDS = 600
CHUNK = 25
"""Seeds per test, few enough for the timeout of a test on a busy machine."""
QUICK = 25
"""Seeds that `make test` runs in pure Python, beside those of `EXPLORED`, which it runs compiled."""
EXPLORED = 100
"""Seeds in which every event in `RARE` must happen."""
MUTANT_SEEDS = 300
"""Seeds in which each mutant must be detected."""

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
    "dropped: broker-closing",
    "dropped: cancelled",
    "dropped: client-gone",
    "dropped: draining",
    "dropped: expired",
    "dropped: handler-failed",
    "dropped: last-worker-lost",
    "dropped: memory-full",
    "dropped: no-worker",
    "dropped: queue-full",
    "dropped: reply-too-large",
    "dropped: too-many-services",
    "dropped: ttl-passed",
    "dropped: worker-lost-after-partial",
    "dropped: workers-lost",
    "errors",
    "handler failed",
    "handler given up",
    "handler stuck",
    "held ahead",
    "invalid: bad-address",
    "invalid: bad-code",
    "invalid: bad-options",
    "invalid: bad-record",
    "invalid: bad-service-name",
    "invalid: envelope-too-deep",
    "invalid: no-body",
    "invalid: no-delimiter",
    "invalid: no-header",
    "invalid: number-in-use",
    "invalid: too-few-frames",
    "invalid: too-many-frames",
    "invalid: unknown-command",
    "invalid: unknown-number",
    "late",
    "late Error",
    "late Reply",
    "lost: broker-closing",
    "lost: disconnected",
    "lost: refused",
    "lost: silent",
    "lost: unreachable",
    "partials",
    "redispatched",
    "refused: not-registered",
    "refused: reply-without-request",
    "refused: reserved-name",
    "refused: second-ready",
    "refused: too-many-workers",
    "refused: wrong-dialect",
    "reply too large",
    "reply too late for its worker",
    "request back in the queue",
    "request dispatched again",
    "rogue message",
    "served: 0.1 client by 0.1 worker",
    "served: 0.1 client by 0.2 worker",
    "served: 0.1 client by X1 worker",
    "served: 0.2 client by 0.1 worker",
    "served: 0.2 client by 0.2 worker",
    "served: 0.2 client by X1 worker",
    "served: X1 client by 0.1 worker",
    "served: X1 client by 0.2 worker",
    "served: X1 client by X1 worker",
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
]
"""Events that must happen in the first `EXPLORED` seeds; otherwise the simulation covers too little."""


def events_of(first: int, seeds: int) -> Counter[str]:
    """Return the events of `seeds` seeds, from `first` on."""
    return sum((Simulation(seed).run() for seed in range(first, first + seeds)), Counter())


COMPILED = compiled.parts()["machines"]
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


# ── it runs the machines, and makes no decisions itself ──────────────────────────────────────────────────────────────

HERE = Path(__file__).parent
WIRE = [HERE.parents[1] / "mdp" / "wire" / f"{name}.py" for name in ("mdp", "x1")]
"""The sources of the encoders; `__file__` would be the compiled module, if there is one."""
OURS = ["actors.py", "brokers.py", "callers.py", "pirates.py", "scenario.py", "simulation.py", "topologies.py"]
"""The modules that run the machines.  Rogues and strangers are third-party peers, which write their own messages."""
JUDGES = ["crossing.py", "ledger.py", "policy.py", "reading.py", "referee.py"]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def encoders() -> set[str]:
    """Return the names of the functions in `wire` that encode messages, or parts of them."""
    functions = [each for path in WIRE for each in parsed(path).body if isinstance(each, ast.FunctionDef)]
    makers = {each.name for each in functions if each.returns is not None and ast.unparse(each.returns) == "Message"}
    return makers | {"encode_options", "error_body"}


def used(name: str, module: str) -> set[str]:
    """Return the names that a file uses from `module`."""
    nodes = list(ast.walk(parsed(HERE / name)))
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module
    }
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(module)]
    return attributes | {alias.name for node in imports for alias in node.names}


def test_there_are_encoders_to_look_for() -> None:
    assert {
        "request_to_broker",
        "request_to_worker",
        "reply_to_broker",
        "ready",
        "disconnect",
        "heartbeat",
    } <= encoders()
    assert "decode_peer" not in encoders()
    assert used("strangers.py", "wire") & encoders() != set()


@pytest.mark.parametrize("name", [*OURS, *JUDGES, "proxies.py"])
def test_nobody_who_runs_or_judges_our_machines_writes_messages(name: str) -> None:
    assert used(name, "wire") & encoders() == set()
    assert used(name, "batch") <= {"from_client", "from_worker", "to_client", "to_worker"}


@pytest.mark.parametrize("name", OURS)
def test_what_our_peers_send_comes_from_their_machines(name: str) -> None:
    """`socket.send(message)` in a loop over what a machine returned, or `socket.send(machine.encode(…))`; without its
    first frame, if a broker sends it over a link."""
    sends = [
        node.args[0]
        for node in ast.walk(parsed(HERE / name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "send"
    ]
    for argument in sends:
        said = ast.unparse(argument)
        assert said in {"message", "message[1:]"} or said.startswith("self.session."), f"{name} sends {said}"
    for node in ast.walk(parsed(HERE / name)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id == "message" and isinstance(node, ast.Assign):
                assert ast.unparse(node.value).startswith("self.session."), f"{name} makes {ast.unparse(node)}"


def test_judges_send_nothing() -> None:
    texts = {name: (HERE / name).read_text() for name in JUDGES}
    assert [name for name, text in texts.items() if "Dealer" in text or ".send(" in text] == []


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

"""Runs the simulation of several brokers for many seeds: it reaches rare events, and detects broken links."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from simulation import link_mutants
from simulation.link_mutants import LINK_MUTANTS
from simulation.mutants import name_of
from simulation.scenario import Failed
from simulation.topologies import TOPOLOGIES, LinkedSimulation

from zmdp import version

SEEDS = {"mesh2": 50, "mesh5": 35, "tree": 35}
"""Seeds of each topology in which every event in `RARE` must happen."""
QUICK = 5
"""Seeds of each topology that `make test` runs."""
MUTANT_SEEDS = 150
"""Seeds in which each mutant must be detected."""
COMPILED = version.compiled_parts()["machines"]
"""Whether the machines are compiled; then a few seeds suffice, because all run with ZMDP_PURE=1."""

RARE = [
    "CANCEL passed on",
    "PARTIAL over a link",
    "announced",
    "announcement withdrawn",
    "broker started again",
    "dropped: links-lost",
    "dropped: worker-lost-after-partial",
    "fault: break between brokers",
    "fault: cut",
    "fault: silence one way",
    "link closed",
    "link opened",
    "request passed 1 links",
    "request returned over a link",
    "request to a liar",
    "twin",
    "wrong link",
    "worker moves on",
    "worker returns",
    "X1 client moved",
    "X1 client: old connection lost",
    "X1 client: reply over an old connection",
    "X1 client: returns",
    "X1 client: sent to the next broker",
    "X1 client: StreamInterrupted 502",
    "X1 client: WorkerLost 502",
]
"""Events that must happen in all topologies."""
RARE_IN_TREES = ["request passed 2 links", "request passed 3 links", "request passed 4 links"]


def events_of(topology: str, seeds: int) -> Counter[str]:
    """Return the events of the first `seeds` seeds."""
    return sum((LinkedSimulation(topology, seed).run() for seed in range(seeds)), Counter())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_rule_is_broken(topology: str) -> None:
    assert events_of(topology, 2 if COMPILED else QUICK)["link opened"]


@pytest.mark.long
@pytest.mark.pure_only  # compiled, a few seeds suffice
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_seeds_explore(topology: str) -> None:
    totals = events_of(topology, SEEDS[topology])
    rare = RARE + (RARE_IN_TREES if topology == "tree" else [])
    assert [name for name in rare if not totals[name]] == []


def trace_of(topology: str, seed: int) -> list[str]:
    lines: list[str] = []
    LinkedSimulation(topology, seed, lines.append).run()
    return lines


@pytest.mark.pure_only  # compiled, a few seeds suffice
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_seed_is_repeated_message_by_message(topology: str) -> None:
    lines = trace_of(topology, 1)
    assert len(lines) > 100
    assert trace_of(topology, 1) == lines


def run_until_it_fails(topology: str, mutant: Callable[..., Any]) -> None:
    for seed in (link_mutants.FIRST_SEEDS.get(mutant, 0), *range(MUTANT_SEEDS)):
        LinkedSimulation(topology, seed).run()


@pytest.mark.pure_only  # compiled machines cannot be patched
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("topology", "owner", "name", "mutant", "rule"), LINK_MUTANTS, ids=[name_of(each[3]) for each in LINK_MUTANTS]
)
def test_a_broken_link_is_found_out(
    topology: str, owner: Any, name: str, mutant: Callable[..., Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    command = rf"python tests/simulate\.py --brokers {topology} --seed \d+ --trace"
    with pytest.raises(Failed, match=command) as caught:
        run_until_it_fails(topology, mutant)
    assert rule in str(caught.value)

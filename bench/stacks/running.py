"""A peer's whole stack, started for one round: its server, its workers, and the client process that measures."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import processes

from .peer import Peer

WORKERS = 4
Tell = Callable[[str], None]
Record = dict[str, Any]


def chosen(options: argparse.Namespace, peers: Sequence[Peer], quick: Sequence[str]) -> list[Peer]:
    """Return the peers to measure: those whose names begin with one of `--only`, or with --quick one of `quick`."""
    only = options.only or (quick if options.quick else ())
    return [peer for peer in peers if not only or peer.name.lower().startswith(tuple(each.lower() for each in only))]


@contextmanager
def stack(peer: Peer, work: str, workers: int = WORKERS) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Run a server and its workers; yields, once all are ready, the address and the processes by group."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        server = opened.enter_context(peer.server(folder))
        started = []
        for _ in range(workers):
            command = child("worker", peer, server.address, work)
            started.append(opened.enter_context(processes.running(*command)))
        for each in started:
            each.read_line()
        pids = {
            "server": processes.descendants(server.pids),
            "workers": processes.descendants(each.pid for each in started),
        }
        yield server.address, pids


def child(role: str, peer: Peer, address: str, plan: str) -> list[str]:
    """Return the command line of a worker or of the client."""
    return [sys.executable, "-m", "stacks.child", role, peer.target, json.dumps(peer.settings), address, plan]


def ask(peer: Peer, address: str, plan: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the client's results for each load of the plan, which takes this many seconds in all."""
    with processes.running(*child("client", peer, address, json.dumps(plan))) as process:
        timeout = 2 * seconds + processes.TIMEOUT_SECONDS
        return [json.loads(process.read_line(timeout)) for _ in plan]


def record(part: str, figure: tuple[str, str], peer: str, params: dict[str, Any], value: float) -> Record:
    """Return the record of one round of a figure with a name and a unit; further rounds are further records."""
    name, unit = figure
    return {
        "part": part, "figure": name, "unit": unit, "peer": peer, "params": params, "rounds": [round(value, 4)],
    }  # fmt: skip


def in_turn(
    part: str, contenders: Sequence[Peer], rounds: int, tell: Tell, measure: Callable[[Peer, int], Iterable[Record]]
) -> Iterator[Record]:
    """Yield records: round 1 of all contenders, round 2 …  Contenders that are not installed, or fail, are reported and
    skipped from then on."""
    left = []
    for peer in contenders:
        if why := peer.missing():
            yield {"part": part, "skipped": peer.name, "why": why}
        else:
            left.append(peer)
    for number in range(rounds):
        for peer in list(left):
            tell(f"{part}: round {number + 1} of {rounds}, {peer.name}")
            try:
                found = list(measure(peer, number))
            except (OSError, ValueError, processes.FailedError) as error:
                left.remove(peer)
                yield {"part": part, "skipped": peer.name, "why": f"it failed in round {number + 1}: {error}"}
            else:
                yield from found

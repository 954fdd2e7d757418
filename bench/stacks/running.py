"""A peer's whole stack, started for one round: its server, its workers, and the client process that measures."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import load, processes
from .peer import Peer

WORKERS = 4
Tell = Callable[[str], None]
Record = dict[str, Any]


@contextmanager
def stack(peer: Peer, work: str, workers: int = WORKERS) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """A server and its workers, all ready: the address, and the processes by group."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        server = opened.enter_context(peer.server(folder))
        started = []
        for _ in range(workers):
            command = child("worker", peer, server.address, work)
            started.append(opened.enter_context(processes.running(*command)))
        for each in started:
            each.read_line()
        pids = {"server": load.descendants(server.pids), "workers": load.descendants(each.pid for each in started)}
        yield server.address, pids


def child(role: str, peer: Peer, address: str, plan: str) -> list[str]:
    """The command of a worker or of the client."""
    return [sys.executable, "-m", "stacks.child", role, peer.target, json.dumps(peer.settings), address, plan]


def ask(peer: Peer, address: str, plan: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """What the client found, for each load of the plan, which takes so many seconds in all."""
    with processes.running(*child("client", peer, address, json.dumps(plan))) as process:
        patience = 2 * seconds + processes.PATIENCE
        return [json.loads(process.read_line(patience)) for _ in plan]


class Table:
    """What was measured, by figure, parameters and peer: a list with a value for each round."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._records: dict[tuple[str, str, str], Record] = {}
        self._skipped: dict[str, Record] = {}

    def add(self, figure: str, unit: str, peer: str, params: dict[str, Any], value: float) -> None:
        key = (figure, json.dumps(params), peer)
        empty = {
            "part": self._part, "figure": figure, "unit": unit, "peer": peer, "params": params, "rounds": [],
        }  # fmt: skip
        self._records.setdefault(key, empty)["rounds"].append(round(value, 4))

    def skip(self, peer: str, why: str) -> None:
        """That peer is left out, from now on."""
        self._skipped[peer] = {"part": self._part, "skipped": peer, "why": why}

    def skips(self, peer: str) -> bool:
        return peer in self._skipped

    def records(self) -> Iterator[Record]:
        yield from self._skipped.values()
        yield from self._records.values()


def in_turn(
    table: Table, contenders: Sequence[Peer], rounds: int, tell: Tell, measure: Callable[[Peer, int], None]
) -> Iterator[Record]:
    """Round 1 of all contenders, round 2 …; then the records.  What is not installed or fails is skipped, and said so.

    Ctrl-C gives what was measured until then, and goes on its way.
    """
    for peer in contenders:
        if why := peer.missing():
            table.skip(peer.name, why)
            tell(f"{peer.name} is skipped: {why}")
    interrupted = None
    try:
        for number in range(rounds):
            for peer in contenders:
                if table.skips(peer.name):
                    continue
                tell(f"{peer.name}, round {number + 1} of {rounds}")
                try:
                    measure(peer, number)
                except (OSError, ValueError, processes.FailedError) as error:
                    table.skip(peer.name, f"it failed: {error}")
                    tell(f"{peer.name} failed: {error}")
    except KeyboardInterrupt as error:
        interrupted = error
    yield from table.records()
    if interrupted is not None:
        raise interrupted

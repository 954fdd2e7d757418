"""Measure the broker: CPU per request and throughput, compared with a loop in C that only forwards.

    python bench/suite.py --parts cost [--quick] [--rounds N] [--seconds S]

Every contender is a separate process under the same load, generated in C (native/load.c).  Contenders take turns of a
tenth of a second, and all use the same libzmq:

- zmdp: a real `mdp-broker`, and the same in pure Python if it has compiled modules;
- the forwarding loop in C (native/forward.c): a lower bound for brokers that handle one message per request.  As in
  Majordomo, a worker gets one request at a time.

In X1 a message carries many requests, and a worker holds up to 64 of them.  The loop cannot forward such messages, so
it is compared under MDP/0.2, with as many requests outstanding.

CPU includes all threads of the broker's process, also libzmq's.  It depends on the cores on which the system runs its
two threads, which change all the time.  So all figures but the first pin the broker to one core and its load to the
others, which makes results repeatable.  Throughput is that of the whole machine: if broker and load share few cores,
both limit it.
"""

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import native
import processes

PART = "cost"
TITLE = "What the broker costs"

Tell = Callable[[str], None]
Record = dict[str, Any]
Start = Callable[[], AbstractContextManager[processes.Server]]

C = "forwarding loop in C"
ZMDP = "zmdp"
PURE = "zmdp, pure Python"
X1 = "X1"
CPU = "broker CPU per request"
RATE = "requests per second"
ON_ONE_CORE = ", on one core"
PINNED = "the broker on one core, the load on the others"
LOOP = "beside X1 the loop gets MDP/0.2"
NOTES = {
    "": f"4 clients, 4 workers, 32-byte bodies; outstanding requests of each client; {LOOP}",
    ON_ONE_CORE: f"4 clients, 4 workers, 32-byte bodies; {PINNED}; {LOOP}",
    ", by clients": f"X1, 4 workers, 64 outstanding per client, 32-byte bodies; {PINNED}; {LOOP}",
    ", by workers": f"X1, 4 clients, 64 outstanding per client, 32-byte bodies; {PINNED}; {LOOP}",
    ", by body": f"4 clients, 4 workers, 8 outstanding per client, 1 from 1 MB on; {PINNED}; {LOOP}",
}
"""What the figures of each kind have in common, by the suffix of their names."""
FASTER = 0.3
"""Part of the seconds of other loads for which this lasts: a load in C settles at once."""


@dataclass(frozen=True)
class Point:
    """A load that the contenders get in turn, and the suffix and the params of its figures."""

    dialect: str
    by: str
    params: Record
    load: Record


def points(*, quick: bool) -> Iterator[Point]:
    """Yield the points at which all contenders are measured in each round."""
    for dialect in ("0.2", X1):
        for outstanding in (1, 64) if quick else (1, 8, 64, 500):
            for by in ("", ON_ONE_CORE) if outstanding in {1, 64} else ("",):
                params = {"dialect": dialect, "outstanding": outstanding}
                yield Point(dialect, by, params, {"outstanding": outstanding})
    for role in ("clients", "workers"):
        for count in (1, 4, 16) if quick else (1, 2, 4, 8, 16):
            yield Point(X1, f", by {role}", {role: count}, {role: count, "outstanding": 64})
    for dialect in (X1,) if quick else ("0.2", X1):
        for body in (0, 1_000, 1_000_000) if quick else (0, 32, 1_000, 64_000, 1_000_000, 10_000_000):
            load = {"body": body, "outstanding": 8 if body < 1_000_000 else 1}
            yield Point(dialect, ", by body", {"dialect": dialect, "body bytes": body}, load)


def compiled() -> bool:
    """Return whether `mdp-broker` has compiled modules, which `ZMDP_PURE=1` would disable."""
    command = [str(processes.BIN / "mdp-broker"), "--version"]
    usual, pure = (
        subprocess.run(command, env=os.environ | extra, capture_output=True, timeout=30, check=False).stdout
        for extra in ({}, processes.PURE)
    )
    return usual != pure and b"pure" not in usual


def measure(
    tools: native.Tools, starts: dict[str, Start], point: Point, seconds: float, tell: Tell
) -> dict[str, native.Load]:
    """Start the contenders, and return the results of each that did not fail."""
    ours, theirs = native.cores() if point.by else (os.sched_getaffinity(0), None)
    heavy = point.load["outstanding"] >= 500 or point.load.get("body", 0) >= 1_000_000
    with ExitStack() as stack:
        loads = {}
        for name, start in starts.items():
            server = stack.enter_context(start())
            native.pin(server.pids[0], ours)
            dialect = "0.2" if name == C else point.dialect
            loads[name] = stack.enter_context(native.Loading(tools, server, dialect, cores=theirs, **point.load))
        return native.in_turn(loads, seconds, max(1, round(seconds / (0.2 if heavy else 0.1))), tell)


def run(options: argparse.Namespace, tell: Tell) -> Iterator[Record]:
    """Measure, and yield records as they become available."""
    for by, note in NOTES.items():
        for figure in (CPU, RATE):
            yield {"part": PART, "figure": figure + by, "base": C, "note": note}
    with ExitStack() as stack:
        try:
            tools = stack.enter_context(native.built())
        except processes.FailedError as error:
            yield {"part": PART, "skipped": "all", "why": str(error)}
            return
        starts: dict[str, Start] = {C: lambda: native.forwarding(tools), ZMDP: processes.broker}
        if compiled():
            starts[PURE] = lambda: processes.broker(pure=True)
        else:
            yield {"part": PART, "skipped": PURE, "why": "zmdp is not compiled: what is called zmdp is pure Python"}
        for number in range(options.rounds):
            for point in points(quick=options.quick):
                tell(f"  round {number + 1}{point.by}: {point.params}")
                found = measure(tools, starts, point, options.seconds * FASTER, tell)
                for name in starts:
                    one = found.get(name)
                    yield record(CPU + point.by, "µs", name, point.params, one and one.cost)
                    yield record(RATE + point.by, "1/s", name, point.params, one and one.rate)


def record(figure: str, unit: str, peer: str, params: Record, value: float | None) -> Record:
    return {"part": PART, "figure": figure, "unit": unit, "peer": peer, "params": params, "rounds": [value]}

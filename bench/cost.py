"""Measure the broker: CPU per request and throughput, compared with loops that only forward and the Guide's brokers.

    python bench/suite.py --parts cost [--quick] [--guide DIR]

Every contender is a separate process under the same load, generated in C (native/load.c).  Contenders take turns of a
tenth of a second, and all use the same libzmq:

- zmdp: a real `mdp-broker`, and the same in pure Python if it has compiled modules;
- the forwarding loop in C (native/forward.c): a lower bound for brokers that handle one message per request.
  As in Majordomo, a worker gets one request at a time.  "In turn" (round robin) it gives requests to workers whether or
  not they are busy, so that many travel together: cheaper, but impossible for a broker that gives work only to idle
  workers;
- the forwarding loop in Python (forward.py): pyzmq with as little other code as possible;
- the Guide's broker in C, and the Guide's method in Python (guide_method.py), which speak MDP/0.1.

In X1 a message carries many requests, and a worker holds up to 64 of them.  The loop cannot forward such messages, so
it is compared under MDP/0.2, with as many requests outstanding.

CPU includes all threads of the broker's process, also libzmq's.  It depends on the cores on which the system runs its
two threads, which change all the time.  So all figures but the first pin the broker to one core and its load to the
others, which makes results repeatable.  Throughput is that of the whole machine: if broker and load share few cores,
both limit it.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import native
import zmq

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

PART = "cost"
TITLE = "What the broker costs"

Tell = Callable[[str], None]
Record = dict[str, Any]

C = "forwarding loop in C"
IN_TURN = "forwarding loop in C, in turn"
PYTHON = "forwarding loop in Python"
ZMDP = "zmdp"
PURE = "zmdp, pure Python"
GUIDE = "the Guide's broker in C"
METHOD = "the Guide's method in Python"
X1 = "X1"
LEGACY = ("0.1", "0.2")
ALL = (*LEGACY, X1)

QUIET = ("--heartbeat", "30", "--max-services", "100000")
"""Long, so that heartbeats do not affect the measurement."""
CPU = "broker CPU per request"
RATE = "requests per second"
QUEUED_BODY = 100


@dataclass(frozen=True)
class Contender:
    """A program to measure, and how to start it: `start(quiet)`, where `quiet` makes heartbeats rare."""

    name: str
    dialects: tuple[str, ...]
    start: Callable[[bool], AbstractContextManager[tuple[int, str]]]
    forwards: bool = False
    """It does not implement X1: its load is MDP/0.2 instead."""

    def load_dialect(self, dialect: str) -> str:
        """Return the dialect of its load when `dialect` is measured."""
        return "0.2" if self.forwards and dialect == X1 else dialect


class Running:
    """The contender's process, which is restarted after a failure."""

    def __init__(self, contender: Contender, *, quiet: bool = False) -> None:
        self.contender = contender
        self.quiet = quiet
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.pid, self.endpoint = self._stack.enter_context(self.contender.start(self.quiet))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def again(self) -> None:
        """Restart it: after a failure its state is unknown."""
        self._stack.close()
        self.__enter__()


# ── the contenders ───────────────────────────────────────────────────────────────────────────────────────────────────


def contenders(tools: native.Tools, guide: str | None) -> Iterator[Contender | Record]:
    """Yield the available contenders, and records of those that are not available."""
    yield Contender(C, ALL, lambda _: native.forwarding(tools), forwards=True)
    yield Contender(IN_TURN, LEGACY, lambda _: native.forwarding(tools, in_turn=True))
    yield Contender(ZMDP, ALL, lambda quiet: native.broker(*QUIET * quiet))
    if compiled():
        yield Contender(PURE, ALL, lambda quiet: native.broker(*QUIET * quiet, pure=True))
    else:
        yield skipped(PURE, "this zmdp has no compiled module: what is called zmdp is pure Python")
    yield Contender(PYTHON, LEGACY, lambda _: native.forwarding_python())
    try:
        directory = native.guide_directory(guide)
        usual, rare = native.build_guide(tools, directory), native.build_guide(tools, directory, 30)
        yield Contender(GUIDE, ("0.1",), lambda quiet: native.guide(tools, rare if quiet else usual))
    except native.Missing as error:
        yield skipped(GUIDE, str(error))
    yield Contender(METHOD, ("0.1",), lambda quiet: native.guide_method(30 if quiet else 2.5))


def compiled() -> bool:
    """Return whether `mdp-broker` has compiled modules, which `ZMDP_PURE=1` would disable."""
    command = [str(native.BIN / "mdp-broker"), "--version"]
    usual, pure = (
        subprocess.run(command, env=native.environment(extra), capture_output=True, timeout=30, check=False).stdout
        for extra in ({}, native.PURE)
    )
    return usual != pure and b"pure" not in usual


def skipped(what: str, why: str) -> Record:
    return {"part": PART, "skipped": what, "why": why}


# ── the sweeps ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Point:
    """A load that some contenders get in turn, and the names of its figures."""

    dialect: str
    by: str
    params: Record
    load: Record
    peers: tuple[str, ...]
    pinned: bool = True


def points(*, quick: bool) -> list[Point]:
    """Return the points at which all contenders are measured in each round."""
    every = (C, IN_TURN, ZMDP, PURE, PYTHON, GUIDE, METHOD)
    few = (C, ZMDP, PURE)
    peers = {"0.1": every, "0.2": every, X1: few}
    found = []
    for dialect in ("0.2", X1) if quick else ALL:
        for outstanding in (1, 64) if quick else (1, 8, 64, 500):
            params = {"dialect": dialect, "outstanding": outstanding}
            load = {"outstanding": outstanding}
            found.append(Point(dialect, "", params, load, peers[dialect], pinned=False))
            if outstanding in {1, 64}:
                found.append(Point(dialect, ON_ONE_CORE, params, load, peers[dialect]))
    for role in ("clients", "workers"):
        found += [
            Point(X1, f", by {role}", {role: count}, {role: count, "outstanding": 64}, few)
            for count in ((1, 4, 16) if quick else (1, 2, 4, 8, 16))
        ]
    for dialect in (X1,) if quick else ("0.2", X1):
        for body in (0, 1_000, 1_000_000) if quick else (0, 32, 1_000, 64_000, 1_000_000, 10_000_000):
            params = {"dialect": dialect, "body bytes": body}
            load = {"body": body, "outstanding": 8 if body < 1_000_000 else 1}
            found.append(Point(dialect, ", by body", params, load, few))
    return found


ON_ONE_CORE = ", on one core"
PINNED = "the broker on one core, the load on the others"
LOOP = "beside X1 the loop gets MDP/0.2"
HEADERS = [
    ("", "outstanding", f"4 clients, 4 workers, 32-byte bodies; outstanding requests of each client; {LOOP}"),
    (ON_ONE_CORE, "outstanding", f"4 clients, 4 workers, 32-byte bodies; {PINNED}; {LOOP}"),
    (", by clients", "clients", f"X1, 4 workers, 64 outstanding per client, 32-byte bodies; {PINNED}; {LOOP}"),
    (", by workers", "workers", f"X1, 4 clients, 64 outstanding per client, 32-byte bodies; {PINNED}; {LOOP}"),
    (", by body", "body bytes", f"4 clients, 4 workers, 8 outstanding per client, 1 from 1 MB on; {PINNED}; {LOOP}"),
]
BESIDE = f"the load is 4 clients with 64 outstanding and 4 workers of another service; {PINNED}"


def headers() -> Iterator[Record]:
    for by, x, note in HEADERS:
        yield {"part": PART, "figure": CPU + by, "base": C, "x": x, "note": note}
        yield {"part": PART, "figure": RATE + by, "base": C, "x": x, "note": note}
    for by, x in IDLE.values():
        yield {"part": PART, "figure": CPU + by, "base": {x: 10}, "x": x, "note": BESIDE}
    yield {"part": PART, "figure": CPU + QUEUED[0], "base": {QUEUED[1]: 1}, "x": QUEUED[1], "note": BESIDE}


class Measurer:
    """The rounds, with their shared state."""

    def __init__(self, options: argparse.Namespace, tell: Tell, tools: native.Tools, found: list[Contender]) -> None:
        self.tell = tell
        self.tools = tools
        self.contenders = {each.name: each for each in found}
        self.seconds = getattr(options, "seconds", 1.0) * 0.3  # a load in C settles at once
        self.quick = getattr(options, "quick", False)

    def chosen(self, *names: str) -> list[Contender]:
        return [self.contenders[name] for name in names if name in self.contenders]

    def loads(
        self, running: dict[Any, Running], dialect: str, *, pinned: bool = True, **load: Any
    ) -> dict[Any, native.Load]:
        """Return the results of each under the same load, in turns of a tenth of a second; one that fails is
        restarted."""
        ours, theirs = native.cores() if pinned else (os.sched_getaffinity(0), None)
        for each in running.values():
            native.pin(each.pid, ours)
        heavy = load.get("outstanding", 64) >= 500 or load.get("body", 0) >= 1_000_000
        turns = max(1, round(self.seconds / (0.2 if heavy else 0.1)))
        with ExitStack() as stack:
            loading = {
                name: stack.enter_context(
                    native.Loading(
                        self.tools, each.pid, each.endpoint, each.contender.load_dialect(dialect), cores=theirs, **load
                    )
                )
                for name, each in running.items()
            }
            found = native.in_turn(loading, self.seconds, turns, self.tell)
        for name, each in running.items():
            if name not in found:
                each.again()
        return found

    def sweeps(self, number: int) -> Iterator[Record]:
        """Run one round of all points, with all contenders in turn at each point."""
        with ExitStack() as stack:
            up = {each.name: stack.enter_context(Running(each)) for each in self.contenders.values()}
            for point in points(quick=self.quick):
                self.tell(f"  round {number + 1}{point.by}: {point.params}")
                names = [name for name in point.peers if name in up and point.dialect in up[name].contender.dialects]
                first = number % len(names)
                running = {name: up[name] for name in names[first:] + names[:first]}
                found = self.loads(running, point.dialect, pinned=point.pinned, **point.load)
                for name in names:
                    one = found.get(name)
                    yield record(CPU + point.by, "µs", name, point.params, one and one.cost)
                    yield record(RATE + point.by, "1/s", name, point.params, one and one.rate)

    # ── beside others that wait ──────────────────────────────────────────────────────────────────────────────────────

    def idle(self, number: int) -> Iterator[Record]:
        """Run one round with few and with many idle workers, each number of them at a separate broker, in turn."""
        counts = [10, 1_000] if self.quick else [10, 1_000, 10_000]
        for kind, (by, x) in IDLE.items():
            for contender in self.chosen(C, ZMDP, GUIDE):
                self.tell(f"  round {number + 1}{by}: {contender.name}")
                dialect = "0.1" if contender.name == GUIDE else "0.2"
                with ExitStack() as stack:
                    running = {}
                    for count in counts:
                        one = running[count] = stack.enter_context(Running(contender, quiet=True))
                        hold = stack.enter_context(holder(one, dialect, kind))
                        hold(10)
                        native.settle(one.pid)
                        before = native.memory(one.pid)
                        hold(count)
                        native.settle(one.pid)
                        if count == counts[-1] and kind == "one":
                            each = (native.memory(one.pid) - before) / (count - 10)
                            yield record(PER_WORKER, "kB", contender.name, {}, each / 1000)
                    found = self.loads(running, dialect)
                for count in counts:
                    yield record(
                        CPU + by, "µs", contender.name, {x: count}, found[count].cost if count in found else None
                    )

    def queued(self, number: int) -> Iterator[Record]:
        """Run one round with few and with many queued requests, each number of them at a separate broker, in turn."""
        by, x = QUEUED
        counts = [1, 1_000] if self.quick else [1, 1_000, 100_000]
        for contender in self.chosen(ZMDP, PURE, GUIDE):
            self.tell(f"  round {number + 1}{by}: {contender.name}")
            dialect = "0.1" if contender.name == GUIDE else X1
            with ExitStack() as stack:
                running = {}
                for count in counts:
                    running[count] = stack.enter_context(Running(contender, quiet=True))
                    stack.enter_context(Queue(running[count].endpoint, dialect)).fill(count)
                found = self.loads(running, dialect)
            for count in counts:
                yield record(CPU + by, "µs", contender.name, {x: count}, found[count].cost if count in found else None)

    def memory(self) -> Iterator[Record]:
        """Measure the memory of a queued request, in each dialect."""
        count = 20_000 if self.quick else 100_000
        for contender in self.chosen(ZMDP, PURE, GUIDE):
            for dialect in contender.dialects if contender.name == GUIDE else ("0.2", X1):
                self.tell(f"  memory of {count:,} queued requests, {dialect}: {contender.name}")
                with Running(contender, quiet=True) as running, Queue(running.endpoint, dialect) as queue:
                    queue.fill(1_000)
                    before = native.memory(running.pid)
                    queue.fill(1_000 + count)
                    each = (native.memory(running.pid) - before) / count - QUEUED_BODY
                    yield record(PER_REQUEST, "bytes", contender.name, {"dialect": dialect}, each)

    def heartbeats(self) -> Iterator[Record]:
        """Measure the cost of a heartbeat from an idle worker and one to it, together."""
        count = 1_000 if self.quick else 10_000
        for contender in self.chosen(ZMDP, PURE):
            self.tell(f"  heartbeats of {count:,} idle workers: {contender.name}")
            pure = contender.name == PURE
            start = Contender(contender.name, ALL, lambda _, pure=pure: native.broker("--liveness", "60", pure=pure))
            with Running(start) as running, holder(running, "0.2", "one", 1.0) as hold:
                hold(count)
                time.sleep(1.5)
                started, used = time.monotonic(), native.cpu_seconds(running.pid)
                time.sleep(2.0 if self.quick else 4.0)
                took, used = time.monotonic() - started, native.cpu_seconds(running.pid) - used
                yield record(PER_HEARTBEAT, "µs", contender.name, {"idle workers": count}, used / took / count * 1e6)


IDLE = {
    "one": (", beside idle workers of one service", "idle workers"),
    "each": (", beside idle workers of as many services", "idle workers and services"),
}
QUEUED = (", beside queued requests of another service", "queued requests")
PER_WORKER = "memory of an idle worker, with its connection"
PER_REQUEST = "memory of a queued request over its body"
PER_HEARTBEAT = "broker CPU of a worker's heartbeats, one each way"


def record(figure: str, unit: str, peer: str, params: Record, value: float | None) -> Record:
    return {"part": PART, "figure": figure, "unit": unit, "peer": peer, "params": params, "rounds": [value]}


@contextmanager
def holder(running: Running, dialect: str, kind: str, heartbeat: float = 0.0) -> Iterator[Callable[[int], None]]:
    """Run a process with idle workers; yields a function that sets their number."""
    command = [sys.executable, str(native.HERE / "idle_peers.py"), running.endpoint, dialect, kind, str(heartbeat)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, process_group=0
    )

    def hold(count: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{count}\n")
        if not process.stdout.readline():
            raise RuntimeError(f"{count} idle workers could not be had")

    try:
        yield hold
    finally:
        process.kill()
        process.communicate()


class Queue:
    """Requests for a service that has no workers."""

    def __init__(self, endpoint: str, dialect: str) -> None:
        self.dialect = dialect
        self.sent = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVTIMEO, 60_000)
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def _send(self, service: bytes, body: bytes) -> None:
        if self.dialect == "0.1":
            frames = [b"", b"MDPC01", service, body]
        elif self.dialect == "0.2":
            frames = [b"MDPC02", b"\x01", service, body]
        else:
            packed = batch.Batch((b"",), wire.CX1)
            packed.request_to_broker(self.sent, 0, service, b"", [body])
            (frames,) = packed.messages()
        self.sent += 1
        self._socket.send_multipart(frames)

    def fill(self, count: int) -> None:
        """Queue this many requests; the answer to a later request shows that the broker has received them."""
        while self.sent < count:
            self._send(b"waiting", b"x" * QUEUED_BODY)
        self._send(b"mmi.service", b"waiting")
        self._socket.recv_multipart()
        self.sent -= self.dialect != X1


def allow_connections() -> bool:
    """Raise the soft limit of open files; return whether it allows 10,000 connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard == resource.RLIM_INFINITY or hard > 10_500


def run(options: argparse.Namespace, tell: Tell) -> Iterator[Record]:
    """Measure, and yield records as they become available."""
    try:
        with native.built() as tools:
            found = list(contenders(tools, getattr(options, "guide", None)))
            yield from (each for each in found if isinstance(each, dict))
            yield from headers()
            measurer = Measurer(options, tell, tools, [each for each in found if isinstance(each, Contender)])
            many = allow_connections()
            if not many:
                yield skipped("10,000 idle workers", "only a few files may be open at once (ulimit -Hn)")
            for number in range(getattr(options, "rounds", 3)):
                yield from measurer.sweeps(number)
                if number % 2 or (number and measurer.quick):
                    continue  # these take long, and are the steadiest
                if many:
                    yield from measurer.idle(number)
                yield from measurer.queued(number)
            yield from measurer.memory()
            if many:
                yield from measurer.heartbeats()
    except native.Missing as error:
        yield skipped("all that is not above", str(error))

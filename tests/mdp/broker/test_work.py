"""Bounds on what a request costs the broker's machine, counted, so that they do not depend on the load.

The tests count the bytecode instructions and builtin calls of a request and its reply, and the memory that a request
holds while it waits.  Each bound is the measured value plus a few percent: a change that exceeds one makes the broker
slower for everybody, or must raise the bound and say why.
"""

import gc
import sys
import tracemalloc

import pytest
from support import turns

from zmdp.mdp.broker.core.records import Service, Worker
from zmdp.mdp.broker.core.roles import Role
from zmdp.mdp.broker.core.scheduling.schedule import Pool
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.wire import WX1, batch

BODY = b"x" * 32


class Meter:
    """Counts instructions and builtin calls of the functions that it calls."""

    def __init__(self):
        self.steps = 0

    def call(self, function, *arguments):
        before = sys.gettrace(), sys.getprofile()
        gc.disable()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(before[1])
            sys.settrace(before[0])
            gc.enable()

    def _trace(self, frame, event, argument):
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.steps += event == "opcode"
        return self._trace

    def _profile(self, frame, event, argument):
        self.steps += event == "c_call"


# ── one command a message ────────────────────────────────────────────────────────────────────────────────────────────


def request(client=b"c"):
    return [client, b"MDPC02", b"\x01", b"echo", BODY]


class Single:
    """Requests and replies in MDP/0.2, while `waiting` others wait."""

    def __init__(self, waiting):
        self.waiting = waiting
        self.broker = Broker(now=0)
        turns.receive(self.broker, [b"w", b"MDPW02", b"\x01", b"echo"], 0)
        (self.work,) = [sent for _ in range(waiting + 1) for sent in turns.receive(self.broker, request(), 0)]

    def exchange(self, meter):
        final = [b"w", b"MDPW02", b"\x04", self.work[3], b"", BODY]
        for message in [request(), final] if self.waiting else [final, request()]:
            for sent in meter.call(turns.receive, self.broker, message, 0):
                if sent[0] == b"w":
                    self.work = sent
        return 1


# ── many commands a message ──────────────────────────────────────────────────────────────────────────────────────────


class Batches:
    """Requests and replies in X1, `size` in a message, while `waiting` others wait."""

    def __init__(self, size, waiting):
        self.size = size
        self.broker = Broker(now=0)
        packed = batch.Batch((b"w", b""), b"MDPWX1")
        packed.ready(size, b"echo", b"")
        turns.receive(self.broker, packed.messages()[0], 0)
        self.number = 0
        (self.work,) = turns.receive(self.broker, self.requests(size), 0)
        if waiting:
            assert turns.receive(self.broker, self.requests(waiting), 0) == []
        self.waiting = waiting

    def requests(self, count):
        packed = batch.Batch((b"c", b""), b"MDPCX1")
        for _ in range(count):
            self.number += 1
            packed.request_to_broker(self.number, 15_000, b"echo", b"", [BODY])
        return packed.messages()[0]

    def finals(self):
        packed = batch.Batch((b"w", b""), b"MDPWX1")
        for command in batch.to_worker(self.work, 2):
            packed.reply(4, command.id, command.body)
        return packed.messages()[0]

    def exchange(self, meter):
        asked, answered = self.requests(self.size), self.finals()
        for message in [asked, answered] if self.waiting else [answered, asked]:
            for sent in meter.call(turns.receive, self.broker, message, 0):
                if sent[0] == b"w":
                    self.work = sent
        assert len(batch.to_worker(self.work, 2)) == self.size
        return self.size


INSTRUCTIONS = {
    "0.2": (lambda: Single(0), 3310),
    "0.2, 64 waiting": (lambda: Single(64), 3670),
    "X1, 1 in a message": (lambda: Batches(1, 0), 5220),
    "X1, 64 in a message": (lambda: Batches(64, 0), 3460),
    "X1, 64 in a message, 64 waiting": (lambda: Batches(64, 64), 3900),
}
"""Bytecode instructions of a request and its reply, by dialect and the number of waiting requests.

Charging what a request takes in memory, also while a worker holds it (C40), takes 200 of them; that it may belong to a
role, 100; that it is counted for its service and its worker, 70 to 95.

Linked lists (`mdp/timers.py`) take more of them than dicts would, but compiled they take a third fewer processor
instructions.  40% of X1's are spent in encoding and decoding, which are compiled as well, and written for that: one
integer at a time, where `struct` would take several at once.
"""
SLACK = 1.1
"""For other versions of Python, which compile to other instructions."""


@pytest.mark.pure_only  # compiled code cannot be counted so
@pytest.mark.parametrize(("traffic", "bound"), INSTRUCTIONS.values(), ids=INSTRUCTIONS)
def test_a_request_takes_no_more_instructions_than_it_did(traffic, bound):
    going = traffic()
    going.exchange(Meter())  # warm-up: fills caches
    meter = Meter()
    requests = sum(going.exchange(meter) for _ in range(20))
    assert meter.steps / requests <= bound * SLACK


def requests(number):
    packed = batch.Batch((b"client", b""), b"MDPCX1")
    for each in range(50):
        packed.request_to_broker(50 * number + each, 15_000, b"echo", b"", [BODY])
    return packed.messages()[0]


def moved(pool, worker, load):
    """The bytes of all that is made, and given up, while a worker is moved that holds so many requests."""
    pool.add(worker, load)
    gc.disable()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    pool.remove(worker, load)
    pool.add(worker, load)
    assert pool.least() is worker
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.enable()
    pool.remove(worker, load)
    return peak - before


def test_a_worker_is_moved_at_the_same_cost_however_many_requests_it_holds():
    """The bit masks of loads are short: with a bit for each load, they would be as long as the largest."""
    worker = Worker((b"w",), WX1, Service(b"echo"), Role(), credit=1, id=1, now=0)
    pool = Pool()
    moved(pool, worker, 1)  # warm-up
    assert moved(pool, worker, 100_000) <= moved(pool, worker, 1) + 2000  # a bit for each would take 13,000 and more


HELD = {
    "0.2": (lambda _: request(b"client"), 1, 5, 340),
    "X1, 50 in a message": (requests, 50, 6, 428),
}
"""Message, its number of requests; memory blocks and bytes, besides its body, that each holds while it waits.

Where the machine is not compiled, one block of 32 bytes is the number of bytes charged for it.
"""


@pytest.mark.parametrize(("message", "count", "blocks", "size"), HELD.values(), ids=HELD)
def test_a_request_that_waits_holds_no_more_memory_than_it_did(message, count, blocks, size):
    broker = Broker(now=0)

    def feed(numbers):
        for number in numbers:  # frames as they come from a socket: each its own
            turns.receive(broker, [bytes(bytearray(frame)) for frame in message(number)], number * count / 10_000)

    feed(range(1000 // count))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    blocks_before, size_before = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
    feed(range(1000 // count, 11_000 // count))
    blocks_held = sys.getallocatedblocks() - blocks_before
    size_held = tracemalloc.get_traced_memory()[0] - size_before
    tracemalloc.stop()
    gc.enable()
    assert broker.registry.queued == 11_000
    assert blocks_held / 10_000 <= blocks + 0.5
    assert size_held / 10_000 - len(BODY) <= min(size * SLACK, MOST_HELD)


MOST_HELD = 480
"""Maximum bytes that a waiting request takes besides its body; the broker charges more (`REQUEST_OVERHEAD`)."""

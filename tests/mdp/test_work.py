"""What a request costs the broker's machine, counted: a bound that no noise can fool.

Counted are the bytecode instructions and the calls of builtin functions of a request and its reply, and the memory that
a request holds while it waits.  The bounds are what it took when they were set, and a few in a
hundred more: whoever goes over one has made the broker slower for everybody, or raises it and says why.
"""

import gc
import sys
import tracemalloc

import pytest

from zmdp.mdp.broker import Broker
from zmdp.mdp.compiled import parts

BODY = b"x" * 32


def ready(dialect, worker):
    return [worker, b"MDPW" + dialect, b"\x01", b"echo"]


def request(dialect, client, number):
    if dialect == b"X1":
        return [client, b"%d" % number, b"", b"MDPCX1", b"\x01", b"echo", b'{"ttl":15000}', BODY]
    return [client, b"MDPC02", b"\x01", b"echo", BODY]


def final(work):
    """The FINAL with which an echo answers `work`."""
    worker, header, _, client, empty, *body = work
    return [worker, header, b"\x04", client, empty, *(body[1:] if header == b"MDPWX1" else body)]


def worked(count, exchange):
    """Instructions and builtin calls of one of `count` exchanges."""
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        steps += event == "opcode"
        return trace

    def profile(frame, event, argument):
        nonlocal steps
        steps += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    gc.disable()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        for number in range(count):
            exchange(number)
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        gc.enable()
    return steps / count


INSTRUCTIONS = {
    (b"02", 0): 1740,
    (b"02", 64): 2100,
    (b"X1", 0): 2120,
    (b"X1", 64): 2440,
}
"""Of a request and its reply in this dialect while so many others wait.

Linked lists of our own (`mdp/lines.py`) take more of these than the dicts before them, and where they are compiled a
third fewer of the processor's.
"""


@pytest.mark.skipif(parts()["machines"], reason="compiled code cannot be counted so: ZMDP_PURE=1 runs it")
@pytest.mark.parametrize(("dialect", "waiting"), INSTRUCTIONS, ids=str)
def test_a_request_takes_no_more_instructions_than_it_did(dialect, waiting):
    broker = Broker(now=0)
    broker.receive(ready(dialect, b"w"), 0)
    (work,) = broker.receive(request(dialect, b"c", 0), 0)
    for number in range(waiting):
        broker.receive(request(dialect, b"c", number + 1), 0)

    def exchange(number):
        nonlocal work
        sent = broker.receive(request(dialect, b"c", 1000 + number), 0) if waiting else []
        sent += broker.receive(final(work), 0)
        if not waiting:
            sent += broker.receive(request(dialect, b"c", 1000 + number), 0)
        (work,) = [message for message in sent if message[0] == b"w"]

    exchange(-1)  # what is done only once is done
    took = worked(50, exchange)
    assert took <= INSTRUCTIONS[dialect, waiting] * SLACK


SLACK = 1.1
"""Other versions of Python compile to other instructions."""

HELD = {b"02": (4, 307), b"X1": (6, 427)}
"""Blocks of memory, and bytes beside its body, that a request holds while it waits."""


@pytest.mark.parametrize("dialect", HELD, ids=str)
def test_a_request_that_waits_holds_no_more_memory_than_it_did(dialect):
    broker = Broker(now=0)

    def feed(numbers):
        for number in numbers:  # frames as they come from a socket: each its own
            frames = [bytes(bytearray(frame)) for frame in request(dialect, b"client", number)]
            broker.receive(frames, number / 10_000)

    feed(range(1000))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    blocks, size = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
    feed(range(1000, 11_000))
    blocks, size = sys.getallocatedblocks() - blocks, tracemalloc.get_traced_memory()[0] - size
    tracemalloc.stop()
    gc.enable()
    assert blocks / 10_000 <= HELD[dialect][0] + 0.5
    assert size / 10_000 - len(BODY) <= HELD[dialect][1] * SLACK

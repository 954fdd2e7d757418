"""Measure large bodies: CPU per MB, and the memory that each process takes for one: `python bench/bodies.py [MB …]`.

A client calls a worker through a broker, one request at a time: with a large request and an empty reply, and the other
way around.  The same through pyzmq alone, with the functions that most programs call: `send_multipart(copy=False)` and
`recv_multipart()`, and `zmq.proxy` in place of the broker.  Both take turns.

CPU is that of all threads.  Memory is the peak of a process above what it had before, in sizes of the body: a body that
a caller or a handler passes does not count, one that it gets does.  libzmq reads a message into memory of its own, from
which `bytes` are copied, so the least is 1 for a broker, and 2 for who gets `bytes`, until libzmq's is freed.  It is
measured in a second run in which `malloc` returns freed memory at once, which costs CPU.
"""

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path

import zmq
from x1 import running, start_broker, start_worker

from zmdp.clients import AsyncClient, Client
from zmdp.workers import AsyncWorker, Worker

Call = Callable[[bytes], bytes]
Pids = list[int | str]
"""Of client, broker and worker."""

MB = 1_000_000
SIZES = (1, 20, 60)
TOTAL_MB = 120
"""How much is sent per round, at least three bodies."""
ROUNDS = 3
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "500000"}
"""An environment in which `malloc` returns the memory of bodies as soon as it is freed."""


@cache
def body(size: int) -> bytes:
    """Return a body of this many bytes, always the same object."""
    return b"x" * size


def answer(request: list[bytes]) -> bytes:
    """Reply to a large request with nothing, and to a number with that many bytes."""
    return b"" if len(request[0]) > 20 else body(int(request[0]))


async def answer_async(request: list[bytes]) -> bytes:
    """Do the same in an event loop."""
    return answer(request)


worker = Worker("bodies", answer)
async_worker = AsyncWorker("bodies", answer_async)


def cpu_seconds(pid: int | str) -> float:
    """Return the CPU time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def memory(pid: int | str, name: str) -> int:
    """Return a figure of a process's memory in bytes: `VmRSS`, or its peak, `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def spent(call: Call, pids: Pids, size: int, *, reply: bool) -> list[float]:
    """Make calls; return the CPU milliseconds per MB of each process."""
    count = max(3, TOTAL_MB * MB // size)
    make_calls(call, 1, size, reply=reply)  # the handler makes its body, and all processes have their buffers
    before = [cpu_seconds(pid) for pid in pids]
    make_calls(call, count, size, reply=reply)
    return [(cpu_seconds(pid) - cpu) * 1e3 / (count * size / MB) for pid, cpu in zip(pids, before, strict=True)]


def held(call: Call, pids: Pids, size: int, *, reply: bool) -> list[float]:
    """Make calls; return the peak memory of each process, in bodies."""
    make_calls(call, 1, size, reply=reply)
    before = [memory(pid, "VmRSS") for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins again
    make_calls(call, max(3, TOTAL_MB * MB // size), size, reply=reply)
    return [max(0, memory(pid, "VmHWM") - rss) / size for pid, rss in zip(pids, before, strict=True)]


def make_calls(call: Call, count: int, size: int, *, reply: bool) -> None:
    sent, expected = (b"%d" % size, size) if reply else (body(size), 0)
    for _ in range(count):
        if len(call(sent)) != expected:
            raise SystemExit("a reply is not what it should be")


# ── pyzmq alone ──────────────────────────────────────────────────────────────────────────────────────────────────────


def proxy() -> None:
    """Forward between clients and workers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front, context.socket(zmq.DEALER) as back:
        print(*(each.bind_to_random_port("tcp://127.0.0.1") for each in (front, back)), flush=True)
        zmq.proxy(front, back)


def serve(port: str) -> None:
    """Answer requests as `worker` does."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        while True:
            *route, request = socket.recv_multipart()
            socket.send_multipart([*route, answer([request])], copy=False)
            del request


def start_pyzmq(stack: ExitStack) -> tuple[Call, Pids]:
    """Start proxy and worker.  Return what calls it, and the processes."""
    forwarding = stack.enter_context(running(sys.executable, __file__, "proxy"))
    assert forwarding.stdout is not None
    front, back = forwarding.stdout.readline().split()
    serving = stack.enter_context(running(sys.executable, __file__, "serve", back))
    socket = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
    socket.linger = 0
    socket.connect(f"tcp://127.0.0.1:{front}")

    def call(sent: bytes) -> bytes:
        socket.send(sent, copy=False)
        return socket.recv()

    return call, ["self", forwarding.pid, serving.pid]


# ── zmdp ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def start_zmdp(stack: ExitStack) -> tuple[Call, Pids]:
    """Start broker and worker.  Return what calls it, and the processes."""
    broker, endpoint = start_broker(stack)
    serving = start_worker(stack, endpoint, "bodies:worker")
    client = stack.enter_context(Client(endpoint, timeout=60))
    return lambda sent: client.request("bodies", sent)[0], ["self", broker.pid, serving.pid]


def start_asyncio(stack: ExitStack) -> tuple[Call, Pids]:
    """The same with asyncio at both ends."""
    broker, endpoint = start_broker(stack)
    serving = start_worker(stack, endpoint, "bodies:async_worker")
    loop = asyncio.new_event_loop()  # not asyncio.run(), in which Python makes a `repr` of what the task returns
    client = AsyncClient(endpoint, timeout=60)
    stack.callback(lambda: loop.run_until_complete(client.close()))

    async def request(sent: bytes) -> bytes:
        return (await client.request("bodies", sent))[0]

    return lambda sent: loop.run_until_complete(request(sent)), ["self", broker.pid, serving.pid]


WAYS = {"zmdp": start_zmdp, "zmdp, asyncio": start_asyncio, "pyzmq alone": start_pyzmq}


def compared(title: str, measure: Callable[..., list[float]], sizes: Sequence[int], rounds: int) -> None:
    """Print a figure of all ways, which take turns: the median of the rounds."""
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    with ExitStack() as stack:
        ways = {name: start(stack) for name, start in WAYS.items()}
        for _, size, large in product(range(rounds), sizes, ("request", "reply")):
            for name, (call, pids) in ways.items():
                figures = measure(call, pids, size * MB, reply=large == "reply")
                found.setdefault((f"{size} MB", large, name), []).append(figures)
    print(f"\n| body | large is the | {title} | client | broker | worker |\n| ---: | --- | --- | ---: | ---: | ---: |")
    for key, rows in found.items():
        medians = [f"{statistics.median(each):.2f}" for each in zip(*rows, strict=True)]
        print(f"| {' | '.join([*key, *medians])} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["proxy"]:
        proxy()
    elif sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    sizes = [int(each) for each in sys.argv[1:]] or SIZES
    if RETURNED.items() <= os.environ.items():
        compared("memory, in bodies", held, sizes, 1)
    else:
        compared("CPU, ms per MB", spent, sizes, ROUNDS)
        subprocess.run([sys.executable, __file__, *sys.argv[1:]], env={**os.environ, **RETURNED}, check=True)


if __name__ == "__main__":
    main()

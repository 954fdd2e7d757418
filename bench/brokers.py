"""The cost of links: broker CPU per local request beside other brokers, and of a request that passes one more broker.

    python bench/brokers.py [--rounds 10] [--seconds 1] [--outstanding 64] [--body 32] [--peers 2 4 8]

All brokers and workers run the whole time; one client calls the services in turns:

- `alone`: a broker without links, with a worker;
- `2 peers` …: the same, linked to so many others;
- `hop`: the client calls a broker whose peer has the worker, so that each request passes both.

CPU is that of each broker with all its threads, also libzmq's.  Compare within one run.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmdp.clients import AsyncClient
from zmdp.workers import AsyncWorker

BIN = Path(sys.executable).parent
LOCAL_TARGET = 1.1
"""CPU per local request of a broker with peers, compared with one without."""
HOP_TARGET = 1.0
"""CPU per request of each broker on a way over two, compared with a local request."""
WARM_UP = 2000
"""Requests before the first turn."""


async def echo(request: Any) -> list[bytes]:
    return list(request)


async def serve(endpoint: str) -> None:
    """Run the worker."""
    async with AsyncWorker("echo", echo, broker=endpoint) as worker:
        await worker.wait()


@dataclass
class Case:
    """A client of one broker, and the brokers on the way of its requests."""

    name: str
    client: AsyncClient
    pids: dict[str, int]
    rates: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds per request, by broker."""

    async def call(self, outstanding: int, body: int, go_on: Callable[[], bool]) -> int:
        """Keep requests outstanding while `go_on` returns true; return how many were answered."""
        answered = 0

        async def caller(number: int) -> None:
            nonlocal answered
            mine = b"%d" % number + bytes(body - len(b"%d" % number))
            while go_on():
                assert await self.client.request("echo", mine) == [mine]
                answered += 1

        await asyncio.gather(*(caller(number) for number in range(outstanding)))
        return answered

    async def turn(self, seconds: float, outstanding: int, body: int) -> None:
        """Measure for so many seconds."""
        before = {who: cpu_seconds(pid) for who, pid in self.pids.items()}
        began = time.monotonic()
        answered = await self.call(outstanding, body, lambda: time.monotonic() < began + seconds)
        self.rates.append(answered / (time.monotonic() - began))
        for who, pid in self.pids.items():
            self.cpu.setdefault(who, []).append(1e6 * (cpu_seconds(pid) - before[who]) / answered)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process, and kill it at the end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Brokers:
    """Starts brokers with distinct names."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started = 0

    def start(self, *peers: str) -> tuple[str, int]:
        """Start a broker that is linked to these peers; return its endpoint and process."""
        self._started += 1
        links = [argument for peer in peers for argument in ("--peer", peer)]
        options = ("--bind", "tcp://127.0.0.1:*", "--name", f"b{self._started}", "--log-level", "error", *links)
        broker = self._stack.enter_context(running(str(BIN / "mdp-broker"), *options))
        assert broker.stdout is not None
        return broker.stdout.readline().strip(), broker.pid

    def work(self, endpoint: str) -> None:
        """Start a worker."""
        self._stack.enter_context(running(sys.executable, __file__, "--serve", endpoint))


def cases(brokers: Brokers, peers: list[int]) -> list[Case]:
    """Start everything; return what is compared."""
    found = []
    others = [brokers.start()[0] for _ in range(max(peers, default=0))]
    for count in (0, *peers):
        endpoint, pid = brokers.start(*others[:count])
        brokers.work(endpoint)
        found.append(Case(f"{count} peers" if count else "alone", AsyncClient(endpoint, timeout=60), {"broker": pid}))
    far, far_pid = brokers.start()
    brokers.work(far)
    near, near_pid = brokers.start(far)
    found.append(Case("hop", AsyncClient(near, timeout=60), {"first broker": near_pid, "second broker": far_pid}))
    return found


async def compare(found: list[Case], rounds: int, seconds: float, outstanding: int, body: int) -> None:
    """Let the cases take turns."""
    for case in found:
        left = iter(range(WARM_UP))
        await case.call(outstanding, body, lambda left=left: next(left, None) is not None)  # type: ignore[misc]
        case.rates.clear()
    for _ in range(rounds):
        for case in found:
            await case.turn(seconds, outstanding, body)
    for case in found:
        await case.client.close()


def report(found: list[Case]) -> None:
    """Print the medians, and ratios to the broker without links."""
    alone = statistics.median(found[0].cpu["broker"])
    for case in found:
        each = ", ".join(f"{who} {statistics.median(cpu):.1f} µs" for who, cpu in case.cpu.items())
        ratios = ", ".join(f"{statistics.median(cpu) / alone:.2f}" for cpu in case.cpu.values())
        print(f"{case.name:<8} {statistics.median(case.rates):8,.0f} requests/s, CPU of {each}: {ratios} of alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--outstanding", type=int, default=64)
    parser.add_argument("--body", type=int, default=32)
    parser.add_argument("--peers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    with ExitStack() as stack:
        found = cases(Brokers(stack), options.peers)
        asyncio.run(compare(found, options.rounds, options.seconds, options.outstanding, options.body))
        report(found)


if __name__ == "__main__":
    main()

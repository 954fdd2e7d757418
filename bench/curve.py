"""The cost of keys: throughput of AsyncClient, mdp-broker and AsyncWorker, with and without CURVE.

    python bench/curve.py [--rounds 10] [--seconds 1] [--outstanding 64] [--body 32]

Both brokers, each with a worker process, run the whole time; the client calls them in turns.  CPU is that of each
process with all its threads, also libzmq's, which encrypt.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zmdp.clients import AsyncClient
from zmdp.mdp.keys import create_keys
from zmdp.workers import AsyncWorker

BIN = Path(sys.executable).parent
TARGET = 0.8
"""Throughput with keys, compared with that without."""
WARM_UP = 2000
"""Requests before the first turn."""
ACCESS = """
secret_key = "broker.key_secret"
[roles.client]
keys = ["client.key"]
call = ["echo"]
[roles.worker]
keys = ["worker.key"]
offer = ["echo"]
"""


def keys_of(folder: str, name: str) -> dict[str, Any]:
    """Return the arguments for the key of that name; without `folder`, none."""
    return {"key": f"{folder}/{name}.key_secret", "broker_key": f"{folder}/broker.key"} if folder else {}


async def echo(request: Any) -> list[bytes]:
    return list(request)


async def serve(endpoint: str, folder: str) -> None:
    """Run the worker."""
    async with AsyncWorker("echo", echo, broker=endpoint, **keys_of(folder, "worker")) as worker:
        await worker.wait()


@dataclass
class Side:
    """A broker with its worker, and what was measured with it."""

    name: str
    pids: dict[str, int]
    client: AsyncClient
    rates: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds per request."""

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


def start(stack: ExitStack, name: str, folder: str) -> Side:
    """Start a broker, with keys if there is a folder with them, and a worker; return them with a client."""
    access = ("--access", f"{folder}/access.toml") if folder else ()
    options = ("--bind", "tcp://127.0.0.1:*", "--log-level", "error")
    broker = stack.enter_context(running(str(BIN / "mdp-broker"), *options, *access))
    assert broker.stdout is not None
    endpoint = broker.stdout.readline().strip()
    worker = stack.enter_context(running(sys.executable, __file__, "--serve", endpoint, folder))
    client = AsyncClient(endpoint, timeout=60, **keys_of(folder, "client"))
    return Side(name, {"client": os.getpid(), "broker": broker.pid, "worker": worker.pid}, client)


async def measure(options: argparse.Namespace) -> list[Side]:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        for name in ("broker", "client", "worker"):
            create_keys(name, Path(folder))
        Path(folder, "access.toml").write_text(ACCESS)
        sides = [start(stack, "without keys", ""), start(stack, "with keys", folder)]
        try:
            for side in sides:
                for _ in range(WARM_UP // options.outstanding):
                    await asyncio.gather(*(side.client.request("echo", b"") for _ in range(options.outstanding)))
            for number in range(options.rounds):
                for side in sides[:: 1 if number % 2 else -1]:
                    await side.turn(options.seconds, options.outstanding, options.body)
        finally:
            for side in sides:
                await side.client.close()
        return sides


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of keys")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument("--outstanding", type=int, default=64)
    parser.add_argument("--body", type=int, default=32, help="bytes")
    parser.add_argument("--serve", nargs=2, metavar=("ENDPOINT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(*options.serve))
        return
    sides = asyncio.run(measure(options))
    for side in sides:
        cpu = ", ".join(f"{who} {statistics.median(each):.1f}" for who, each in side.cpu.items())
        print(f"{side.name:13} {statistics.median(side.rates):8,.0f} requests/s; CPU in µs per request: {cpu}")
    without, with_keys = sides
    ratio = statistics.median(with_keys.rates) / statistics.median(without.rates)
    each = statistics.median(b / a for a, b in zip(without.rates, with_keys.rates, strict=True))
    print(f"throughput with keys / without: {ratio:.2f} (median of the rounds' ratios: {each:.2f}); target {TARGET}")
    costs = [sum(statistics.median(each) for each in side.cpu.values()) for side in sides]
    print(f"CPU of all three, without / with keys: {costs[0] / costs[1]:.2f}")


if __name__ == "__main__":
    main()

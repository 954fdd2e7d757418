"""What benchmarks share that compare brokers in one run: processes, and cases that take turns, with their CPU time."""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from native import cpu_seconds

from zmdp.clients import AsyncClient

BIN = Path(sys.executable).parent
WARM_UP = 2000
"""Requests before the first turn."""

WORKER = """
import asyncio, sys
from zmdp.workers import AsyncWorker

async def echo(request):
    return list(request)

async def main():
    async with AsyncWorker("echo", echo, broker=sys.argv[1], concurrency=256):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
"""The program of a process that offers `echo` at the endpoint that it is given, and prints a line when it has begun."""


async def echo(request: Any) -> list[bytes]:
    """The service that is called."""
    return list(request)


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that can import the modules of this folder, and kill it at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start_broker(stack: ExitStack, *options: str) -> tuple[str, int]:
    """Start a broker; return its endpoint and process id."""
    command = (str(BIN / "mdp-broker"), "--bind", "tcp://127.0.0.1:*", "--log-level", "error", *options)
    broker = stack.enter_context(running(*command))
    assert broker.stdout is not None
    return broker.stdout.readline().strip(), broker.pid


@dataclass
class Case:
    """A client of one broker, and the processes whose CPU time is measured while it calls."""

    name: str
    client: AsyncClient
    pids: dict[str, int]
    rates: list[float] = field(default_factory=list)
    """Requests per second, by turn."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds per request, by process and turn."""

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

    async def warm_up(self, outstanding: int) -> None:
        """Make the requests that are not measured."""
        for _ in range(max(1, WARM_UP // outstanding)):
            await asyncio.gather(*(self.client.request("echo", b"") for _ in range(outstanding)))

    async def turn(self, seconds: float, outstanding: int, body: int) -> None:
        """Measure for so many seconds."""
        before = {who: cpu_seconds(pid) for who, pid in self.pids.items()}
        began = time.monotonic()
        answered = await self.call(outstanding, body, lambda: time.monotonic() < began + seconds)
        self.rates.append(answered / (time.monotonic() - began))
        for who, pid in self.pids.items():
            self.cpu.setdefault(who, []).append(1e6 * (cpu_seconds(pid) - before[who]) / answered)


async def compare(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Let the cases take turns, in the opposite order in every other round; close their clients."""
    try:
        for case in cases:
            await case.warm_up(options.outstanding)
        for number in range(options.rounds):
            for case in cases[:: 1 if number % 2 else -1]:
                await case.turn(options.seconds, options.outstanding, options.body)
    finally:
        for case in cases:
            await case.client.close()


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that `compare` needs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument("--outstanding", type=int, default=64)
    parser.add_argument("--body", type=int, default=32, help="bytes")
    return parser

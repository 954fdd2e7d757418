"""Cases that take turns in one run, each a client of one broker, with the CPU time of the processes on the way."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from processes import cpu_seconds

from zmdp.clients import AsyncClient

WARM_UP = 2000
"""Requests before the first turn."""


@dataclass
class Case:
    """A client of one broker, and the processes whose CPU time is measured while it calls `echo`."""

    name: str
    client: AsyncClient
    pids: dict[str, int]
    rates: list[float] = field(default_factory=list)
    """Requests per second, by turn."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds per request, by process and turn."""

    def __str__(self) -> str:
        each = ", ".join(f"{who} {statistics.median(cpu):.1f} µs" for who, cpu in self.cpu.items())
        return f"{self.name:<22} {statistics.median(self.rates):8,.0f} requests/s, CPU of {each}"

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


async def compare(
    cases: Sequence[Case], *, rounds: int = 5, seconds: float = 1.0, outstanding: int = 64, body: int = 32
) -> None:
    """Let the cases take turns, in the opposite order in every other round; close their clients."""
    try:
        for case in cases:
            left = iter(range(WARM_UP))
            await case.call(outstanding, body, lambda left=left: next(left, None) is not None)
        for number in range(rounds):
            for case in cases[:: 1 if number % 2 else -1]:
                await case.turn(seconds, outstanding, body)
    finally:
        for case in cases:
            await case.client.close()

"""What types cost: a call of a service with types beside a request of the same bytes: `python bench/typed.py`.

A client with 64 outstanding calls, a broker and a worker are processes of their own.  Both services do the same work
with the same bytes: one with `Services` and `call`, the other with an `AsyncWorker` of frames and `request`.  Rounds of
both alternate; the result is the processor time of client and worker together, and of all three, per call.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from x1 import start_broker, start_worker

from zmdp import AsyncClient, AsyncWorker, Services

OUTSTANDING = 64
CALLS = 20_000
ROUNDS = 9
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Resize:
    """A request."""

    path: str
    width: int


@dataclass
class Size:
    """A reply."""

    width: int
    height: int


services = Services()
REQUEST = b'{"path":"a.png","width":80}'
REPLY = b'{"width":80,"height":60}'


@services.service("typed")
async def typed(job: Resize) -> Size:
    return Size(job.width, job.width * 3 // 4)


frames = AsyncWorker("frames")


@frames
async def reply(request: list[bytes]) -> bytes:
    return REPLY


def seconds_of(pid: int) -> float:
    """Return the processor time of a process."""
    with open(f"/proc/{pid}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICK


async def load(call: Callable[[], Awaitable[object]]) -> None:
    """Make all calls, so many of them at a time."""

    async def caller() -> None:
        for _ in range(CALLS // OUTSTANDING):
            await call()

    await asyncio.gather(*(caller() for _ in range(OUTSTANDING)))


async def measure() -> None:
    with ExitStack() as stack:
        broker, endpoint = start_broker(stack)
        workers = {name: start_worker(stack, endpoint, f"typed:{name}").pid for name in ("services", "frames")}
        async with AsyncClient(endpoint, timeout=60) as client:
            ways: dict[str, Callable[[], Awaitable[object]]] = {
                "frames": lambda: client.request("frames", REQUEST),
                "services": lambda: client.call(typed, Resize("a.png", 80)),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for number in range(1 + ROUNDS):  # the first is not counted
                for name, call in ways.items():
                    before = time.process_time(), seconds_of(workers[name]), seconds_of(broker.pid)
                    await load(call)
                    after = time.process_time(), seconds_of(workers[name]), seconds_of(broker.pid)
                    own, worker, between = (b - a for a, b in zip(before, after, strict=True))
                    if number:
                        found[name].append(((own + worker) / CALLS * 1e6, (own + worker + between) / CALLS * 1e6))
    for index, what in enumerate(("client and worker", "with the broker")):
        raw, checked = ([each[index] for each in found[name]] for name in ("frames", "services"))
        ratio = statistics.median(b / a for a, b in zip(raw, checked, strict=True))
        print(
            f"{what}: {statistics.median(raw):.1f} µs per request of frames, {statistics.median(checked):.1f} µs per "
            f"call with types: {ratio:.2f} times (median of {ROUNDS} rounds)"
        )


if __name__ == "__main__":
    asyncio.run(measure())

"""The loads that every peer gets, and the measurements under them.  Nothing here depends on a peer.

Closed loop: a constant number of requests is outstanding; each reply is followed by the next request.  Open loop:
requests are sent at scheduled times, whether or not earlier ones have finished; latencies count from the scheduled
time.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from processes import cpu_seconds

SEED = 1
SIZE = 32
"""Bytes of an echoed body."""
LEAST = 20
"""Minimum number of requests in a window: if the machine has stalled, the window stays open for longer."""

Ask = Callable[[bytes], Awaitable[bytes]]


class Caller(Protocol):
    """A synchronous client with many requests outstanding."""

    def send(self, key: int) -> None:
        """Send a request."""

    def receive(self) -> Iterable[tuple[int, float]]:
        """Wait for replies; return the keys of those that have arrived, and the times of their arrival."""


class WrongReplyError(Exception):
    """A peer did not echo the body."""


@dataclass
class Window:
    """Measurements from opening to closing: latencies in seconds, and CPU seconds by group of processes."""

    pids: dict[str, list[int]]
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    used: dict[str, float] = field(default_factory=dict)

    def open(self) -> None:
        self.latencies.clear()
        self.used = {name: cpu_seconds(*pids) for name, pids in self.pids.items()}
        self.seconds = -time.perf_counter()

    def close(self) -> None:
        self.seconds += time.perf_counter()
        self.used = {name: cpu_seconds(*pids) - self.used[name] for name, pids in self.pids.items()}

    def figures(self) -> dict[str, Any]:
        """Return figures ready for JSON: milliseconds, and CPU microseconds per request by group."""
        found, count = sorted(self.latencies), max(1, len(self.latencies))
        return {
            "rate": len(found) / self.seconds,
            "p50": 1e3 * percentile(found, 50),
            "p99": 1e3 * percentile(found, 99),
            "cpu": {name: 1e6 * used / count for name, used in self.used.items()},
        }


# ── pure ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of the sorted `values` that `percent` of them do not exceed; 0 if there are none."""
    if not values:
        return 0.0
    return values[max(0, -int(-len(values) * percent // 100) - 1)]


def schedule(rate: float, seconds: float, share: float, seed: int = SEED) -> list[tuple[float, bool]]:
    """Return the schedule of an open loop, in seconds, with a flag for slow requests: random, `rate` per second, the
    same in each call."""
    rng = random.Random(seed)
    moments, moment = [], 0.0
    while (moment := moment + rng.expovariate(rate)) < seconds:
        moments.append((moment, rng.random() < share))
    return moments


def body(key: int, size: int = SIZE) -> bytes:
    """Return a body that identifies its request."""
    return b"%08d" % key + b"x" * (size - 8)


# ── the loads ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def closed(ask: Ask, outstanding: int, warm: float, window: Window, seconds: float, *, size: int = SIZE) -> None:
    """Run `outstanding` callers, each of which waits for its reply before it sends the next request."""
    latencies, ended = window.latencies, False

    async def caller(key: int) -> None:
        mine = body(key, size)
        while not ended:
            sent = time.perf_counter()
            if await ask(mine) != mine:
                raise WrongReplyError(mine)
            latencies.append(time.perf_counter() - sent)

    async with asyncio.TaskGroup() as group:
        for key in range(outstanding):
            group.create_task(caller(key))
        await asyncio.sleep(warm)
        window.open()
        await asyncio.sleep(seconds)
        while len(latencies) < LEAST:
            await asyncio.sleep(0.01)
        window.close()
        ended = True
        counted = len(latencies)
    del latencies[counted:]


def closed_sync(caller: Caller, outstanding: int, warm: float, window: Window, seconds: float) -> None:
    """The same for a synchronous client."""
    sent: dict[int, float] = {}
    latencies = window.latencies

    def send(key: int) -> None:
        sent[key] = time.perf_counter()
        caller.send(key)

    for key in range(outstanding):
        send(key)
    opens, closes = time.perf_counter() + warm, 0.0
    while True:
        for key, came in caller.receive():
            latencies.append(came - sent.pop(key))
            send(key)
        now = time.perf_counter()
        if not closes and now >= opens:
            window.open()
            closes = time.perf_counter() + seconds
        elif closes and now >= closes and len(latencies) >= LEAST:
            window.close()
            break
    counted = len(latencies)
    while sent:
        for key, _ in caller.receive():
            del sent[key]
    del latencies[counted:]


async def open_loop(
    ask: Ask, moments: Sequence[tuple[float, bool]], short: bytes, slow: bytes
) -> dict[str, list[float]]:
    """Return the seconds from each request's scheduled time until its reply, for short and for slow requests.

    `late` is how late each was sent, which is not caused by the peer: the machine was busy with something else.
    """
    found: dict[str, list[float]] = {"short": [], "slow": [], "late": []}
    began = time.perf_counter()

    async def one(request: bytes, due: float, latencies: list[float]) -> None:
        if await ask(request) != request:
            raise WrongReplyError(request)
        latencies.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as group:
        for moment, is_slow in moments:
            due = began + moment
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            found["late"].append(time.perf_counter() - due)
            group.create_task(one(slow, due, found["slow"]) if is_slow else one(short, due, found["short"]))
    return found

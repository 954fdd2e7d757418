"""Load generators for `mdclient bench`."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ....mdp.errors import RequestError
from ...aio import AsyncClient
from ...mdclient import Client
from .latencies import Latencies

SEED: Final = 1
PROGRESS_INTERVAL_SECONDS: Final = 0.1
"""How often progress is reported."""

Progress = Callable[[float], None]
"""Called with the fraction of the time that has passed, from 0 to 1."""


@dataclass
class Result:
    """The result of a benchmark: latencies in seconds by kind of request, and errors by type."""

    seconds: float = 0.0
    latencies: dict[str, Latencies] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)
    """The text of the first error of each type."""

    def record(self, kind: str, seconds: float) -> None:
        """Record a request of `kind` that took `seconds`."""
        histogram = self.latencies.get(kind)
        if histogram is None:
            histogram = self.latencies[kind] = Latencies()
        histogram.record(seconds)

    def fail(self, error: RequestError) -> None:
        """Record a request that failed."""
        kind = type(error).__name__
        self.errors[kind] += 1
        self.samples.setdefault(kind, str(error))

    @property
    def replies(self) -> int:
        """The number of requests that were answered with a reply."""
        return sum(histogram.count for histogram in self.latencies.values())

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON; latencies in milliseconds."""
        return {
            "seconds": round(self.seconds, 3),
            "replies": self.replies,
            "replies_per_second": round(self.replies / self.seconds, 1) if self.seconds else 0.0,
            "errors": dict(self.errors),
            "error_samples": self.samples,
            "latency_ms": {
                kind: {"count": histogram.count, **histogram.summary()} for kind, histogram in self.latencies.items()
            },
        }


def one_by_one(
    client: Client, service: str, frames: Sequence[bytes], *, wait: bool = False, seconds: float, progress: Progress
) -> Result:
    """Send requests for `seconds`, each when the reply to the previous one has arrived.

    With MDP/0.2 and 0.1 `wait` must be true, because they cannot express anything else.
    """
    result = Result()
    began = now = time.perf_counter()
    shown = began
    while now < began + seconds:
        try:
            client.request(service, *frames, wait=wait)
        except RequestError as error:
            result.fail(error)
            then, now = now, time.perf_counter()
        else:
            then, now = now, time.perf_counter()
            result.record("all", now - then)
        if now - shown >= PROGRESS_INTERVAL_SECONDS:
            shown = now
            progress((now - began) / seconds)
    result.seconds = now - began
    return result


async def pipelined(
    client: AsyncClient,
    service: str,
    frames: Sequence[bytes],
    *,
    outstanding: int,
    seconds: float,
    progress: Progress,
) -> Result:
    """Keep `outstanding` requests outstanding for `seconds`, over one connection."""
    result = Result()
    began = time.perf_counter()

    async def ask() -> None:
        now = time.perf_counter()
        while now < began + seconds:
            try:
                await client.request(service, *frames, wait=False)
            except RequestError as error:
                result.fail(error)
                now = time.perf_counter()
                await asyncio.sleep(0)
            else:
                then, now = now, time.perf_counter()
                result.record("all", now - then)

    watcher = asyncio.create_task(_watch(began, seconds, progress))
    await asyncio.gather(*(ask() for _ in range(outstanding)))
    result.seconds = time.perf_counter() - began
    await watcher
    return result


async def mixed(
    client: AsyncClient,
    service: str,
    frames: Sequence[bytes],
    slow_frames: Sequence[bytes],
    *,
    share: float,
    rate: float,
    seconds: float,
    progress: Progress,
) -> Result:
    """Send requests at random moments, `rate` per second on average; a `share` of them has the slow body.

    Each is sent when it is due, whether or not earlier ones have finished, and its latency counts from that moment: so
    the latencies also show the delay when a service falls behind.
    """
    result = Result()
    rng = random.Random(SEED)  # noqa: S311 - the same load each time
    began = time.perf_counter()

    async def ask(kind: str, body: Sequence[bytes], moment: float) -> None:
        try:
            await client.request(service, *body, wait=False)
        except RequestError as error:
            result.fail(error)
        else:
            result.record(kind, time.perf_counter() - moment)

    watcher = asyncio.create_task(_watch(began, seconds, progress))
    moment = began
    async with asyncio.TaskGroup() as group:
        while (moment := moment + rng.expovariate(rate)) < began + seconds:
            slow = rng.random() < share
            await asyncio.sleep(moment - time.perf_counter())
            group.create_task(ask("slow", slow_frames, moment) if slow else ask("short", frames, moment))
    result.seconds = time.perf_counter() - began
    await watcher
    return result


async def _watch(began: float, seconds: float, progress: Progress) -> None:
    while (passed := time.perf_counter() - began) < seconds:
        progress(passed / seconds)
        await asyncio.sleep(PROGRESS_INTERVAL_SECONDS)
    progress(1.0)

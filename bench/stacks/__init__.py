"""Full stacks in Python, zmdp and its peers.

    python bench/suite.py --parts stacks [--quick] [--rounds N] [--seconds S] [--only PEER]…

One client process and four worker processes in Python, with the peer's server between them, echo 32-byte bodies, with
1, 64 and 500 requests outstanding.  Each peer's client and workers follow its own documentation's recommendations for
speed; each peer's file gives details.  A round starts a peer's whole stack, nothing else runs at the same time, and the
peers take turns: round 1 of all, round 2 …  So on a shared machine, ratios within a round are meaningful, and absolute
numbers are not.

It measures requests per second, latencies, and CPU time per request, of all processes together and of each kind.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from . import celery, nats, rabbitmq, redis, running, taskiq, zmdp
from .peer import Peer

PART = "stacks"
TITLE = "Full stacks in Python"
OUTSTANDING = (1, 64, 500)
BASE = "NATS"
QUICK = ("zmdp", "NATS")
WARM = 0.5
"""Seconds of warm-up under load before measuring."""
FIGURES = (
    ("requests per second", "1/s"),
    ("latency, p50", "ms"),
    ("latency, p99", "ms"),
    ("CPU per request, of all processes", "µs"),
)
SHARES = ("CPU per request, by process", "µs")
NOTE = "one client process and four worker processes in Python, 32-byte bodies echoed"


def contenders() -> list[Peer]:
    """Return all peers."""
    return [
        zmdp.ZmdpAsync(),
        zmdp.ZmdpThreads(),
        zmdp.ZmdpTyped(),
        nats.NATS(),
        rabbitmq.RabbitMQ(),
        redis.RedisLists(),
        redis.RedisLists("Redis lists, batched", batched=True),
        celery.Celery(),
        taskiq.Taskiq(),
    ]


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the records of this part."""
    rounds, seconds = options.rounds, options.seconds
    for figure, _ in (*FIGURES, SHARES):
        yield {"part": PART, "figure": figure, "base": BASE, "note": NOTE}
    chosen = running.chosen(options, contenders(), QUICK)
    yield from running.in_turn(PART, chosen, rounds, tell, lambda peer, _: _measure(peer, seconds))


def _measure(peer: Peer, seconds: float) -> Iterator[dict[str, Any]]:
    with running.stack(peer, "echo") as (address, pids):
        plan = [{"outstanding": each, "warm": WARM, "seconds": seconds, "pids": pids} for each in OUTSTANDING]
        found = running.ask(peer, address, plan, len(plan) * (WARM + seconds))
    for outstanding, figures in zip(OUTSTANDING, found, strict=True):
        cpu = figures["cpu"]
        values = (figures["rate"], figures["p50"], figures["p99"], sum(cpu.values()))
        for figure, value in zip(FIGURES, values, strict=True):
            yield running.record(PART, figure, peer.name, {"outstanding": outstanding}, value)
        for group, value in cpu.items():
            yield running.record(PART, SHARES, peer.name, {"of": group, "outstanding": outstanding}, value)

"""Short requests beside a few long ones: latency percentiles of the short ones, of zmdp beside its peers.

    python bench/mixed.py [--quick] [--rounds N] [--seconds S] [--only PEER]…

100 or 200 requests a second come at random moments, the same moments for all; 5% of them take 200 ms, the others 1 ms.
Four worker processes do one request at a time each, as a Python worker with work for the CPU does; at 200 a second they
are busy for a little more than half of the time.  A short request's latency counts from the moment at which it was due.

What it compares is who gets a request.  zmdp's broker, and RabbitMQ with prefetch 1, give it to a worker that is idle,
and keep it while none is; with Redis lists idle workers fetch it.  A NATS queue group, RabbitMQ with its default
prefetch (no bound) and ZeroMQ's own round robin give it to a worker at once, busy or not, so a short request may wait
behind a long one though others are idle.  It compares no speed: at such rates the servers have nearly nothing to do.

The limit is computed: the same moments, with one queue for four workers, and no time lost.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stacks import alone, load, nats, rabbitmq, redis, roundrobin, running, zmdp
from stacks.peer import Peer

PART = "mixed"
TITLE = "Short requests beside a few long ones"
NOTE = "5% of the requests take 200 ms, the others 1 ms; 4 workers; latencies of the short ones from when they were due"
LONGER = 6
"""Percentiles take their number: so many times as long as other loads."""
STALL = 0.3
"""Seconds that a request may be sent late: if one is later, the machine has stalled, and the round is done again."""
TRIES = 3
"""What is late in all of them counts: then it is the peer's client that blocks."""
RATES = (100, 200)
SHARE = 0.05
SHORT, SLOW = "1", "200"
"""Milliseconds, as bodies say them."""
BASE = "NATS"
LIMIT = "one queue, computed"
PERCENTILES = (50, 90, 99, 100)


def contenders() -> list[Peer]:
    """Everyone who takes part."""
    return [
        zmdp.Zmdp(),
        nats.NATS(),
        rabbitmq.RabbitMQ("RabbitMQ, prefetch 1", prefetch=1),
        rabbitmq.RabbitMQ("RabbitMQ, default prefetch", prefetch=0),
        roundrobin.RoundRobin(),
        redis.RedisLists(),
    ]


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The records of this part."""
    rounds, seconds = alone.extent(options)
    seconds *= LONGER
    rates = RATES[-1:] if getattr(options, "quick", False) else RATES
    for percent in PERCENTILES:
        yield {"part": PART, "figure": _figure(percent), "base": BASE, "x": "a second", "note": NOTE}
    for number in range(rounds):
        for rate in rates:
            yield from _records(LIMIT, rate, ideal(load.schedule(rate, seconds, SHARE, seed=number)))
    chosen = [peer for peer in contenders() if alone.wanted(options, peer.name)]
    yield from running.in_turn(
        PART, chosen, rounds, tell, lambda peer, number: _measure(peer, rates, seconds, number, tell)
    )


def _measure(
    peer: Peer, rates: Sequence[int], seconds: float, number: int, tell: running.Tell
) -> Iterator[dict[str, Any]]:
    plan = [
        {"moments": load.schedule(rate, seconds, SHARE, seed=number), "short": SHORT, "slow": SLOW} for rate in rates
    ]
    for left in reversed(range(TRIES)):
        with running.stack(peer, "sleep") as (address, _):
            found = running.ask(peer, address, plan, len(plan) * seconds)
        late = max(max(each["late"], default=0.0) for each in found)
        if late < STALL or not left:
            break
        tell(f"{PART}: the load itself was up to {late:.1f} s late, so the machine is too busy: {peer.name} once more")
    for rate, latencies in zip(rates, found, strict=True):
        yield from _records(peer.name, rate, latencies["short"])


def _records(name: str, rate: int, latencies: list[float]) -> Iterator[dict[str, Any]]:
    found = sorted(latencies)
    for percent in PERCENTILES:
        value = 1e3 * load.percentile(found, percent)
        yield running.record(PART, (_figure(percent), "ms"), name, {"a second": rate}, value)


def _figure(percent: int) -> str:
    return f"latency of short requests, {'max' if percent == 100 else f'p{percent}'}"


def ideal(moments: list[tuple[float, bool]], workers: int = running.WORKERS) -> list[float]:
    """The latencies of the short requests if one queue fed all workers and nothing took time but the work."""
    free = [0.0] * workers
    latencies = []
    for due, slow in moments:
        begins = max(due, heapq.heappop(free))
        ends = begins + float(SLOW if slow else SHORT) / 1000
        heapq.heappush(free, ends)
        if not slow:
            latencies.append(ends - due)
    return latencies


if __name__ == "__main__":
    alone.main(TITLE, run)

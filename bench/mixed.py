"""Mixed loads: latency percentiles of short requests among a few long ones, for zmdp and its peers.

    python bench/suite.py --parts mixed [--quick] [--rounds N] [--seconds S] [--only PEER]…

100 or 200 requests per second arrive at random moments, the same moments for all; 5% of them take 200 ms, the others
1 ms.  Four worker processes with default settings serve them, once with handlers that block, as CPU-bound work does,
and once with handlers that await.  A short request's latency counts from the moment at which it was due.

With handlers that block, each process handles one request at a time, and at 200 per second the four are busy a little
more than half of the time.  The difference lies in which worker gets a request.  zmdp's broker, and RabbitMQ with
prefetch 1, give it to an idle worker, and keep it while there is none; with Redis lists idle workers fetch it.  A NATS
queue group, and RabbitMQ with its default prefetch (no limit), give it to a worker immediately, busy or not, so a short
request may wait behind a long one although other workers are idle.

Handlers that await run concurrently in zmdp's worker.  nats-py runs one at a time, unless the application starts a task
for each message ("a task per message").

This does not compare speed: at such rates the servers are nearly idle.  The limit is computed: the same arrival times,
one queue for four blocking workers, and no overhead.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator
from typing import Any

from stacks import load, nats, rabbitmq, redis, running, zmdp
from stacks.peer import Peer

PART = "mixed"
TITLE = "Short requests beside a few long ones"
NOTE = "5% of the requests take 200 ms, the others 1 ms; 4 workers; latencies of the short ones from when they were due"
LONGER = 6
"""Factor by which this part lasts longer than other loads: percentiles need many requests."""
STALL = 0.3
"""Seconds that a request may be sent late: if one is later, the machine has stalled, and the round is repeated."""
TRIES = 3
"""Attempts at a round; the last one counts in any case, because then the cause is that the peer's client blocks."""
RATES = (100, 200)
SHARE = 0.05
SHORT, SLOW = "1", "200"
"""Milliseconds, as sent in bodies."""
BASE = "NATS"
LIMIT = "one queue, computed"
PERCENTILES = (50, 90, 99, 100)
QUICK = ("zmdp", "NATS")
BLOCKING, AWAITING = "blocking", "awaiting"
WORK = {BLOCKING: "sleep", AWAITING: "pause"}
"""The work of workers, as named in stacks/peer.py and services.py, by the kind of handlers."""


def contenders(handlers: str = BLOCKING) -> list[Peer]:
    """Return all peers with that kind of handlers."""
    if handlers == AWAITING:
        return [zmdp.Zmdp(), nats.NATS(), nats.NATS("NATS, a task per message", tasks=True)]
    return [
        zmdp.Zmdp(),
        nats.NATS(),
        rabbitmq.RabbitMQ("RabbitMQ, prefetch 1", prefetch=1),
        rabbitmq.RabbitMQ("RabbitMQ, default prefetch", prefetch=0),
        redis.RedisLists(),
    ]


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the records of this part."""
    rounds, seconds = options.rounds, options.seconds
    seconds *= LONGER
    for percent in PERCENTILES:
        yield {"part": PART, "figure": figure(percent), "base": BASE, "note": NOTE}
    for number in range(rounds):
        for rate in RATES:
            latencies = ideal(load.schedule(rate, seconds, SHARE, seed=number))
            yield from _records(LIMIT, BLOCKING, rate, latencies)
    for handlers in WORK:
        chosen = running.chosen(options, contenders(handlers), QUICK)
        yield from running.in_turn(
            PART, chosen, rounds,
            lambda text, handlers=handlers: tell(f"{text}, {handlers} handlers"),
            lambda peer, number, handlers=handlers: _measure(peer, handlers, seconds, number, tell),
        )  # fmt: skip


def _measure(peer: Peer, handlers: str, seconds: float, number: int, tell: running.Tell) -> Iterator[dict[str, Any]]:
    plan = [
        {"moments": load.schedule(rate, seconds, SHARE, seed=number), "short": SHORT, "slow": SLOW} for rate in RATES
    ]
    for left in reversed(range(TRIES)):
        with running.stack(peer, WORK[handlers]) as (address, _):
            found = running.ask(peer, address, plan, len(plan) * seconds)
        late = max(max(each["late"], default=0.0) for each in found)
        if late < STALL or not left:
            break
        tell(f"{PART}: requests were sent up to {late:.1f} s late, so the machine is too busy: repeating {peer.name}")
    for rate, latencies in zip(RATES, found, strict=True):
        yield from _records(peer.name, handlers, rate, latencies["short"])


def _records(name: str, handlers: str, rate: int, latencies: list[float]) -> Iterator[dict[str, Any]]:
    found = sorted(latencies)
    for percent in PERCENTILES:
        value = 1e3 * load.percentile(found, percent)
        params = {"handlers": handlers, "per second": rate}
        yield running.record(PART, (figure(percent), "ms"), name, params, value)


def figure(percent: int) -> str:
    return f"latency of short requests, {'max' if percent == 100 else f'p{percent}'}"


def ideal(moments: list[tuple[float, bool]], workers: int = running.WORKERS) -> list[float]:
    """Return the latencies of the short requests if one queue fed all workers and only the work took time."""
    free = [0.0] * workers
    latencies = []
    for due, slow in moments:
        begins = max(due, heapq.heappop(free))
        ends = begins + float(SLOW if slow else SHORT) / 1000
        heapq.heappush(free, ends)
        if not slow:
            latencies.append(ends - due)
    return latencies

"""Durable accepts per second: Titanic compared with RabbitMQ's confirmed persistent messages and NATS JetStream.

    python bench/suite.py --parts durable [--quick] [--rounds N] [--seconds S] [--only PEER]…

One Python client submits 100-byte messages, 1 or 64 at a time, which nobody consumes; only acceptance is measured.
Unless the name says otherwise, all give the same guarantee: an accepted message is on disk.  Titanic answers after the
commit of a transaction that contains all requests that have arrived in the meantime.  RabbitMQ confirms a persistent
message in a durable queue after an fsync: a classic queue after its own (as system calls of 3.10 show), a quorum queue,
here with one node, after that of the log.  JetStream with `sync_interval: always` syncs each message; otherwise its
server syncs every 2 minutes, and messages accepted since then are lost if the machine fails.  The limit is a file that
is overwritten and synced, without another process.

All files are in the folder for temporary files ($TMPDIR): if that is in memory, syncing costs nothing.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from stacks import disk, nats, rabbitmq, running, titanic
from stacks.peer import Peer

PART = "durable"
TITLE = "Durable accepts"
NOTE = "100-byte messages, one client process in Python; what is accepted is on the disk, unless the name says else"
OUTSTANDING = (1, 64)
BASE = "Titanic, SQLite"
QUICK = (BASE, "RabbitMQ, classic queue")
WARM = 0.5
"""Seconds of warm-up under load before measuring."""
FIGURES = (("durable accepts per second", "1/s"), ("time to accept, p50", "ms"), ("time to accept, p99", "ms"))


def contenders() -> list[Peer]:
    """Return all peers."""
    return [
        titanic.Titanic(),
        titanic.TitanicPostgres(),
        rabbitmq.Durable("RabbitMQ, classic queue", queue_type="classic"),
        rabbitmq.Durable("RabbitMQ, quorum queue", queue_type="quorum"),
        nats.JetStream("JetStream, sync_interval: always", always=True),
        nats.JetStream("JetStream, fsync every 2 minutes", always=False),
        disk.Disk(),
    ]


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the records of this part."""
    rounds, seconds = options.rounds, options.seconds
    for figure, _ in FIGURES:
        yield {"part": PART, "figure": figure, "base": BASE, "note": NOTE}
    chosen = running.chosen(options, contenders(), QUICK)
    yield from running.in_turn(PART, chosen, rounds, tell, lambda peer, _: _measure(peer, seconds))


def _measure(peer: Peer, seconds: float) -> Iterator[dict[str, Any]]:
    load = {"warm": WARM, "seconds": seconds, "pids": {}, "size": disk.SIZE}
    plan = [{"outstanding": each, **load} for each in OUTSTANDING]
    with running.stack(peer, "echo", workers=0) as (address, _):
        found = running.ask(peer, address, plan, len(plan) * (WARM + seconds))
    for outstanding, figures in zip(OUTSTANDING, found, strict=True):
        for figure, value in zip(FIGURES, (figures["rate"], figures["p50"], figures["p99"]), strict=True):
            yield running.record(PART, figure, peer.name, {"outstanding": outstanding}, value)

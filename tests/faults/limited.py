"""One limit of a service under everything that can call it, while workers and Titanic are killed.

    cd tests && python -m faults.limited [--seconds 300] [--every 7] [--callers 16] [--no-frames]

Processes with a client each, Titanic, and DataFrames of eight partitions call one service with a limit.  The handlers
write to the ledger when they start and end, on the clock that all processes of a machine share.  What they have seen
must be possible within the limit: never more at once, and no more starts in any time than the rate allows.  A handler
starts somewhat after its request, which is what the limit counts, so there are two figures for the rate: by the starts
of the handlers, which a busy machine delays, and by the earliest and latest moments at which each request can have
started, which proves that there were too many if it is above 0.
"""

import random
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import click
from faults.ledger import Entry, LedgerReader
from faults.programs import Database, Program, database
from faults.referee import SHOWN, Verdict
from faults.services import LIMIT
from faults.site import Site
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.clients import Client

BEATS: Final = ("--heartbeat", "0.5", "--liveness", "240")
"""Only the end of a connection is noticed, however slow the machine is."""
LEASE: Final = 5.0
SERVICES: Final = ("titanic.request", "titanic.reply", "titanic.close", "faults.limited")
WORKERS: Final = 3
AT_ONCE: Final = LIMIT.concurrency or 0


class LimitedSite(Site):
    """A broker, Titanic and workers, and callers of the one service."""

    def __init__(self, folder: Path, rng: random.Random, db: Database, callers: int, *, frames: bool) -> None:
        super().__init__(folder, rng, db)
        self.killed: dict[int, float] = {}
        """The processes that were killed, and when."""
        endpoint = free_endpoint()
        self.run("broker", "broker", "mdp-broker", "--bind", endpoint, *BEATS)
        titanic = ("titanic", "serve", "--db", db.url, "--lease", str(LEASE), "--broker", endpoint, *BEATS)
        self._victims = [self.run("titanic", "titanic", *titanic)]
        for at in range(WORKERS):
            worker = ("mdworker", "faults.services:services", "--only", "faults.limited", "--broker", endpoint, *BEATS)
            self._victims.append(self.run("workers", f"worker-{at}", *worker))
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            for each in SERVICES:
                eventually(lambda each=each: client.available(each))
        kinds = [("limited", f"group-{at}") for at in range(callers)] + [("limited-titanic", "0.5")]
        kinds += [("limited-frames",)] if frames else []
        for at, kind in enumerate(kinds):
            self.run("caller", f"caller-{at}", *kind, MDP_BROKER=endpoint)

    def kill(self, program: Program | None, *, away: float = 0.0) -> None:
        """Kill a program, and note when: what its process ran has ended then."""
        if program is not None:
            self.killed[program.pid] = time.monotonic()
        super().kill(program, away=away)

    def kill_one(self) -> None:
        """Kill Titanic or a worker."""
        self.kill(self.victim(self._victims))


@dataclass(frozen=True)
class Figures:
    """What the handlers have seen of the limit."""

    starts: int
    at_once: int
    """Most executions at once."""
    excess: float
    """Most starts above those that the rate allows, in any time, by the clocks of the handlers."""
    proven: float
    """The same by when the requests can have started: no more than 0."""
    used: float
    """The share of the rate that was used while callers called, after the burst."""

    def __str__(self) -> str:
        return (
            f"{self.starts} starts, at most {self.at_once} at once ({AT_ONCE} allowed); starts above the rate in any "
            f"time: {self.excess:.3f} as the handlers saw it, {self.proven:.3f} proven (0 allowed); "
            f"{self.used:.2%} of the rate used (target 97 %)"
        )

    def broken(self) -> list[str]:
        """Say where the limit was not kept."""
        return [f"the limit was not kept: {self}"] if self.at_once > AT_ONCE or self.proven > 0 else []


def figures(entries: Sequence[Entry], killed: dict[int, float], until: float = float("inf")) -> Figures:
    """Return what the entries of the handlers say about the limit; callers called until `until`."""
    starts = sorted((each.at, each.detail) for each in entries if each.event == "executed")
    finished = {each.detail: each.at for each in entries if each.event == "finished"}
    begun = [at for at, _ in starts]
    ended = sorted(finished.get(mark) or killed[int(mark.split(".")[0])] for _, mark in starts)
    # When a request starts, all but seven of those before it have ended.
    earliest = [ended[at - AT_ONCE] if at >= AT_ONCE else float("-inf") for at in range(len(begun))]
    seconds = min(until, begun[-1]) - begun[0]
    count = bisect_right(begun, until) - LIMIT.at_once
    return Figures(
        len(starts),
        max(at + 1 - bisect_right(ended, when) for at, when in enumerate(begun)),
        _excess(begun, begun),
        _excess(earliest, begun),
        count * LIMIT.interval / seconds if seconds else 0.0,
    )


def _excess(earliest: Sequence[float], latest: Sequence[float]) -> float:
    """Return the most starts above those that the rate allows in any time, if each start was between these moments."""
    begins = accumulate((when / LIMIT.interval - at for at, when in enumerate(earliest)), max)
    ends = (at + 1 - LIMIT.at_once - when / LIMIT.interval for at, when in enumerate(latest))
    return max(map(sum, zip(begins, ends, strict=True)))


def limited(
    folder: Path, *, seconds: float = 300.0, every: float = 7.0, callers: int = 16, frames: bool = True, seed: int = 1,
    least: int = 0,
) -> tuple[Verdict, LimitedSite, Figures]:  # fmt: skip
    """Run it for so long, and until there were `least` calls; return the ledger's verdict, the site and the figures."""
    rng = random.Random(seed)
    with database("sqlite", folder) as db:
        site = LimitedSite(folder, rng, db, callers, frames=frames)
        try:
            until = time.monotonic() + seconds
            while (
                time.monotonic() < until or sum(call.ended is not None for call in site.referee.calls.values()) < least
            ):
                site.wait(rng.uniform(0.5, 1.5) * every)
                site.kill_one()
                site.referee.read()
            stopped = time.monotonic()
            site.recover(site.look)
            site.broken += site.end_callers(site.look)
            site.close()
        except BaseException:
            site.kill_all()
            raise
    site.referee.read()
    verdict = site.referee.judge(site.faults)
    found = figures(list(LedgerReader(site.ledger).new_entries()), site.killed, stopped)
    site.broken += [*verdict.broken, *found.broken()]
    return verdict, site, found


@click.command()
@click.option("--seconds", default=300.0, show_default=True, help="For which programs are killed.")
@click.option("--every", default=7.0, show_default=True, help="Average seconds from one kill to the next.")
@click.option("--callers", default=16, show_default=True, help="Number of client processes.")
@click.option("--frames/--no-frames", default=True, show_default=True, help="Also call from DataFrames (needs Java).")
@click.option("--seed", default=1, show_default=True, help="Decides the faults.")
def main(**settings: object) -> None:
    """Call a service with a limit in every way while programs are killed, and check that the limit holds."""
    with tempfile.TemporaryDirectory(prefix="limited-") as folder:
        verdict, site, found = limited(Path(folder), **settings)  # type: ignore[arg-type]
    kinds = Counter(name.rsplit("-", 2)[0] for name in site.referee.calls)
    click.echo(f"{len(site.killed)} kills\n{dict(kinds)}\n{verdict.counts}\n{found}")
    for each in site.broken[:SHOWN]:
        click.echo(f"WRONG: {each}")
    sys.exit(bool(site.broken))


if __name__ == "__main__":
    main()

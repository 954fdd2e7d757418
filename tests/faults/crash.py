"""Kill real brokers, Titanics and workers under load, and check that no accepted request is lost.

cd tests && python -m faults.crash --kills 200 --db sqlite --titanics 1 --seed 1
cd tests && python -m faults.crash --kills 200 --db postgres --titanics 2

The seed decides what happens to which program, and the pauses in between; what the program is doing at that moment
depends on the machine.  Exit code 1 means that something is wrong; the folder with database, logs and ledger is kept.
"""

import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from faults.programs import NOBODY, Database, database
from faults.referee import SHOWN, Verdict
from faults.site import Site
from support.databases import wrong_counts
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.clients import Client
from zmdp.titanic.api.schedules import occurrence_key, parse_schedule
from zmdp.titanic.db import store
from zmdp.titanic.db.store.models import NOT_ENDED, StoredRequest, StoredSchedule

SERVICES: Final = (
    "titanic.request", "titanic.reply", "titanic.close", "faults.work", "faults.parts", "faults.quick",
)  # fmt: skip
HEARTBEAT, LIVENESS, LEASE = 0.2, 40, 2.0
SCHEDULES: Final = 20
"""Of one second each; nobody executes what they submit."""
KEPT: Final = "0.7"
"""The part of the requests that are not closed, so that they can be audited."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    db: str = "sqlite"
    titanics: int = 1
    kills: int = 200
    seed: int = 1
    pause: float = 0.6
    """Average seconds between two faults."""
    least: int = 100
    """Minimum number of calls that have ended; on a slow machine the run continues after the last kill to reach it."""


class CrashSite(Site):
    """A broker, Titanics that share a database, workers, and callers of Titanic."""

    db: Database

    def __init__(self, plan: Plan, db: Database, folder: Path) -> None:
        super().__init__(folder, random.Random(plan.seed), db)
        endpoint = free_endpoint()
        beats = ("--heartbeat", str(HEARTBEAT), "--liveness", str(LIVENESS))
        self.run("broker", "broker", "mdp-broker", "--bind", endpoint, "--drain-timeout", "2", *beats)
        serve = ("titanic", "serve", "--db", db.url, "--lease", str(LEASE), "--broker", endpoint, *beats)
        for at in range(plan.titanics):
            self.run("titanic", f"titanic-{at}", *serve)
        for at in range(4):
            self.run("workers", f"worker-{at}", "mdworker", "faults.services:services", "--broker", endpoint, *beats)
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            for each in SERVICES:
                eventually(lambda each=each: client.available(each))
        now = float(int(time.time()))
        with db.engine.begin() as connection:
            for number in range(SCHEDULES):
                frames = [b"s%d" % number, NOBODY.encode(), b""]
                made = parse_schedule(frames, {"every": 1000, "missed": "all"}, now)
                store.edit_schedules(connection, [store.Edit("add", made.name, "", now, made)])
        for at, command in enumerate((("titanic", KEPT), ("titanic", KEPT), ("waiting",))):
            self.run("caller", f"caller-{at}", *command, MDP_BROKER=endpoint)

    def inject(self) -> None:
        """Inject a fault: into one of the programs, into all, or into the database."""
        faults = [(0.15, lambda: [self.kill(each) for each in self._rng.sample(self.programs, len(self.programs))])]
        for role, kills, ends, freezes in (("broker", 2, 0.3, 0.3), ("titanic", 4, 0.7, 1.2), ("workers", 4, 0.5, 0.5)):
            programs = [each for each in self.programs if each.role == role]
            faults += [
                (kills, lambda programs=programs: self.kill(self.victim(programs))),
                (ends, lambda programs=programs: self.terminate(self.victim(programs))),
                (freezes, lambda programs=programs: self.freeze(self.victim(programs), self._rng.uniform(3, 10))),
            ]  # longer than a lease, or heartbeat × liveness
        if self.db.cluster is not None:
            faults += [(1.0, self.cut_database), (1.0, self.restart_database)]
        self.disturb(faults)

    @property
    def kills(self) -> int:
        """How many programs were killed."""
        return sum(fault.what.startswith("kill") for fault in self.faults)

    def audit(self) -> Iterator[str]:
        """Compare the tables, once nothing runs any more, with the ledger."""
        columns = (StoredRequest.uuid, StoredRequest.state, StoredRequest.key, StoredRequest.service)
        stored = self.db.rows(*columns)
        rows = [row for row in stored if row.service != NOBODY]
        states = {row.uuid.hex: row.state for row in rows}
        for name, call in self.referee.calls.items():
            if call.uuid and not call.closed and call.uuid not in states:
                yield f"{name} ({call.uuid}) was accepted and is not there"
        # Without a key, a request that was closed may be stored again by a Titanic that was frozen with it.
        keys = Counter(row.key for row in rows if row.key is not None)
        yield from (f"{count} requests were stored for the key {key}" for key, count in keys.items() if count > 1)
        for name in keys:
            if (call := self.referee.calls.get(name)) is not None and call.closed:
                yield f"{name} ({call.uuid}) was closed and is there"
        yield from (f"request {uuid} is {state}" for uuid, state in states.items() if state in NOT_ENDED)
        scheduled = Counter(row.key for row in stored if row.service == NOBODY)
        yield from (f"{count} requests were stored for {key}" for key, count in scheduled.items() if count > 1)
        due = {
            occurrence_key(each.name, each.created + second)
            for each in self.db.rows(StoredSchedule.name, StoredSchedule.created, StoredSchedule.last)
            for second in range(1, round((each.last or each.created) - each.created) + 1)
        }
        yield from (f"the occurrence {key} was not submitted, or too early" for key in due ^ scheduled.keys())
        if any(wrong := wrong_counts(self.db.engine)):
            yield f"counts of rows, and what is kept instead: {wrong}"


def crash(plan: Plan, folder: Path, *, quiet: bool = False) -> tuple[Verdict, CrashSite]:
    """Run the plan, and return what the ledger says and the site, in which `broken` has all that is wrong."""
    rng = random.Random(plan.seed)
    with database(plan.db, folder) as db:
        site = CrashSite(plan, db, folder)
        try:
            while not _ended(site):  # so that there is a load to disturb
                site.wait(0.5)
                site.referee.read()
            while site.kills < plan.kills or _ended(site) < plan.least:
                site.wait(rng.expovariate(1 / plan.pause))
                site.referee.read()
                if site.kills < plan.kills:
                    site.inject()
                if not quiet:
                    click.echo(f"{site.kills} kills, {len(site.faults)} faults, {_ended(site)} calls", err=True)
            site.recover(site.look)
            site.broken += site.end_callers(site.look)
            site.referee.read()
            until = time.monotonic() + TIMEOUT_SECONDS  # those without a key whose callers have given up
            while not db.all_ended() and time.monotonic() < until:
                site.wait(0.1)
            verdict = site.referee.judge(site.faults)
            site.broken += [*verdict.broken, *site.audit()]
            site.close()
        except BaseException:
            site.kill_all()
            raise
    return verdict, site


def _ended(site: CrashSite) -> int:
    return sum(call.ended is not None for call in site.referee.calls.values())


@click.command()
@click.option("--kills", default=200, show_default=True, help="Number of processes to kill.")
@click.option("--db", type=click.Choice(["sqlite", "postgres"]), default="sqlite", show_default=True)
@click.option("--titanics", default=1, show_default=True, help="Number of Titanics that share the database.")
@click.option("--seed", default=1, show_default=True, help="Decides the faults.")
@click.option("--pause", default=Plan.pause, show_default=True, help="Average seconds between two faults.")
def main(**settings: object) -> None:
    """Kill brokers, Titanics and workers under load, and check whether a request is lost."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    click.echo(f"in {folder}", err=True)
    verdict, site = crash(Plan(**settings), folder)  # type: ignore[arg-type]
    click.echo(f"{Counter(fault.what for fault in site.faults)}\n{verdict.counts}")
    for each in site.broken[:SHOWN]:
        click.echo(f"WRONG: {each}")
    if site.broken:
        sys.exit(f"kept: {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

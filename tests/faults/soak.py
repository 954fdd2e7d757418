"""Run everything at once, for hours, while everything fails: are the promises kept, and does nothing grow?

cd tests && python -m faults.soak --hours 2

The time is divided into two halves.  In each, faults hit one side and the network, while the programs of the other
side live on, so that their memory can be watched; then everything is replaced under load, without faults.  The exit
code is 1 if an invariant is broken.  `build/soak` has the report beside ledger and logs.
"""

import random
import shutil
import sys
import time
from pathlib import Path

import click
import sqlalchemy as sa
from faults.fault import GRACE_SECONDS
from faults.monitor import Monitor
from faults.programs import Database, database
from faults.referee import SHOWN
from faults.report import Soak, write
from faults.soak_site import SIDES, SoakSite
from support.databases import wrong_counts

FOLDER = Path(__file__).parents[2] / "build" / "soak"
TICK_SECONDS = 0.1
SAMPLE_SECONDS = 5.0
TELL_SECONDS = 60.0
FAULT_SECONDS = 6.0
"""The mean time between two faults."""
CHAOS = 0.8
"""The part of a half in which faults are injected; the rest is for recovery and the replacement, and without faults."""


class Run:
    """One soak: looks after the site and samples it while something else goes on."""

    def __init__(self, db: Database, folder: Path, seconds: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._seed = seed
        self._db = db
        self._seconds = seconds
        self.site = SoakSite(db, folder, self._rng)
        self.referee = self.site.referee
        self.monitor = Monitor()
        self.began = time.monotonic()
        self._sample_at = self._tell_at = self._read_at = self.began
        self._replaced: list[tuple[float, float]] = []

    def look(self) -> None:
        """Look after the programs, and sample them if it is time."""
        now = time.monotonic()
        self.site.look()
        if now >= self._sample_at:
            self._sample_at = now + SAMPLE_SECONDS
            self.monitor.sample(now, [*self.site.programs, *self.site.callers])
            self.monitor.note_calls(now, self.referee.read())
            self._read_at = now
            self._measure_database(now)
        if now >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            verdict = self.referee.judge(self.site.faults, complete_to=self._read_at)
            counts = {name: count for name, count in verdict.counts.items() if name != "lost"}  # some go on
            click.echo(f"{(now - self.began) / 60:6.1f} min, {len(self.site.faults)} faults, {counts}")

    def _measure_database(self, now: float) -> None:
        try:
            with self._db.engine.connect() as connection:
                size = connection.scalar(sa.text("SELECT pg_database_size(current_database())"))
        except sa.exc.DBAPIError:
            return  # it is just being restarted
        self.monitor.database.append((now, int(size or 0)))

    def wait(self, seconds: float) -> None:
        """Look for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(TICK_SECONDS)

    def half(self, side: str) -> None:
        """Disturb a side and the network, let everything recover, replace it, and go on without faults."""
        until = time.monotonic() + self._seconds / 2
        while time.monotonic() < until - (1 - CHAOS) * self._seconds / 2:
            self.wait(self._rng.expovariate(1 / FAULT_SECONDS))
            self.site.disturb_side(side)
        self.site.recover(self.look)
        self.wait(GRACE_SECONDS)
        began = time.monotonic()
        try:
            self.site.replace_all(self.look)
        except AssertionError as error:
            self.site.broken.append(f"the replacement did not end: {error}")
        self._replaced.append((began, time.monotonic()))
        self.wait(until - time.monotonic())

    def end(self) -> Soak:
        """End the callers, judge, and end everything."""
        late = self.site.end_callers(self.look)
        self.referee.read()
        verdict = self.referee.judge(self.site.faults)
        broken = [*late, *verdict.broken, *self.monitor.leaks()]
        if not self._db.all_ended():
            broken.append("the database has requests that have not ended, although all replies were fetched")
        self.site.close()
        if any(wrong := wrong_counts(self._db.engine)):
            broken.append(f"counts of rows, and what is kept instead: {wrong}")
        return Soak(
            self.began, time.monotonic() - self.began, self._seed, verdict, [*broken, *self.site.broken],
            self.site.faults, self._replaced, self.monitor,
        )  # fmt: skip


def soak(hours: float, seed: int, folder: Path) -> Soak:
    """Run a soak in an empty folder, and write its report there."""
    with database("postgres", folder) as db:
        run = Run(db, folder, 3600 * hours, seed)
        try:
            run.site.start()
            for side in reversed(SIDES):
                run.half(side)
            found = run.end()
        except BaseException:
            run.site.kill_all()
            raise
    write(found, folder)
    return found


@click.command()
@click.option("--hours", default=2.0, show_default=True, help="How long; may be a fraction.")
@click.option("--seed", default=1, show_default=True, help="Decides which faults are injected, and when.")
def main(hours: float, seed: int) -> None:
    """Run a soak."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    found = soak(hours, seed, FOLDER)
    click.echo(f"{found.verdict.counts}\nreport: {FOLDER / 'report.md'}")
    for each in found.broken[:SHOWN]:
        click.echo(f"BROKEN: {each}", err=True)
    sys.exit(bool(found.broken))


if __name__ == "__main__":
    main()

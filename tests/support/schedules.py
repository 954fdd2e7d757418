"""Kills Titanics that share schedules, and checks that every occurrence was submitted exactly once."""

import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from support.processes import POLL_SECONDS, Process, process
from support.titanics import QUICK, connected

from zmdp.titanic import store
from zmdp.titanic.schedules import occurrence_key, parse_schedule
from zmdp.titanic.store.tables import SCHEDULES, R, S


@dataclass(frozen=True)
class Report:
    """What came of it."""

    kills: int
    submitted: int
    expected: int
    twice: list[str]
    never: list[str]


def survive(
    url: str, endpoint: str, *, titanics: int, schedules: int, occurrences: int, kills: int, seed: int, limit: float
) -> Report:
    """Run Titanics with schedules of one second; kill one after another, and start it again.

    Ends once each schedule has so many occurrences and so many Titanics were killed, or fails after `limit` seconds.
    """
    rng, until, killed = random.Random(seed), time.monotonic() + limit, 0
    start = float(int(time.time()))
    _add(url, schedules, start)
    with ExitStack() as stack:

        def started() -> Process:
            return stack.enter_context(process("titanic", "serve", "--broker", endpoint, "--db", url, *QUICK))

        running = [started() for _ in range(titanics)]
        while (done := _done(url, start)) < occurrences or killed < kills:
            assert time.monotonic() < until, f"{done} of {occurrences} occurrences after {limit} s: {running[0].stderr}"
            # Anywhere in the second; those that have not begun to serve are killed as well, but not all.
            time.sleep(rng.uniform(POLL_SECONDS, 1.5))
            if killed * occurrences <= kills * done:
                at = rng.randrange(titanics)
                running[at].kill()
                running[at] = started()
                killed += 1
        for each in running:
            each.kill()
    return _report(url, start, killed)


def _add(url: str, schedules: int, start: float) -> None:
    with connected(url) as connection:
        for number in range(schedules):
            options = {"every": 1000, "missed": "all"}
            made = parse_schedule([b"s%d" % number, b"nobody", b""], options, start)
            store.edit_schedules(connection, [store.Edit("add", made.name, "", start, made)])


def _done(url: str, start: float) -> int:
    """Return how many occurrences of the slowest schedule were submitted."""
    with connected(url) as connection:
        return int(connection.scalar(sa.select(sa.func.coalesce(sa.func.min(S.last), start))) or 0) - int(start)


def _report(url: str, start: float, kills: int) -> Report:
    with connected(url) as connection:
        found: Counter[Any] = Counter(connection.scalars(sa.select(R.key)))
        ends = connection.execute(sa.select(SCHEDULES.c.name, SCHEDULES.c.last)).all()
    expected = {
        occurrence_key(name, start + second) for name, last in ends for second in range(1, int(last - start) + 1)
    }
    return Report(
        kills,
        submitted=found.total(),
        expected=len(expected),
        twice=sorted(key for key, count in found.items() if count > 1),
        never=sorted(expected - found.keys()) + sorted(found.keys() - expected),
    )

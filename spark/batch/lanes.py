"""A Spark session shared by several requests, one lane each, and made anew when it is lost."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from ..session import forget, is_alive, is_connect
from .jobs import may_reach_out
from .progress import ClassicProgress, ConnectProgress, Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("zmdp.spark")

_POOL: Final = "spark.scheduler.pool"
_OUTWARD: Final = {"ScriptTransformation": "TRANSFORM … USING", "CallMethodViaReflection": "reflect"}
"""Nodes of a plan that run a program or call Java, and how they are written."""


class Lane(Protocol):
    """What one request at a time runs on."""

    session: "SparkSession"

    def begin(self, job: str) -> None:
        """Called first in the thread that runs the job: `cancel` ends what it starts in Spark from now on."""

    def count(self, job: str) -> None:
        """Called in that thread next: `progress` counts what it starts in Spark from now on."""

    def cancel(self, job: str) -> None:
        """End what runs in Spark of `job`; from any thread, any number of times."""

    def progress(self) -> Progress:
        """How far the latest job has come; from any thread."""

    def reaches_out(self, sql: str, table: "DataFrame") -> str | None:
        """What in a query, of which `table` is the plan, would run a program or call Java."""

    def alive(self) -> bool:
        """Whether the session can still run something."""


class ClassicLane:
    """A session on the driver's own context, with a FAIR pool: requests share the cluster."""

    def __init__(self, session: "SparkSession", pool: str) -> None:
        self.session = session
        self._context = session.sparkContext
        self._pool = pool
        self._progress: ClassicProgress | None = None

    def begin(self, job: str) -> None:
        """A tag and a pool: they are this thread's, and end with it."""
        self._progress = None
        self._context.addJobTag(job)
        self._context.setLocalProperty(_POOL, self._pool)

    def count(self, job: str) -> None:
        """A job group, which is this thread's as well."""
        self._context.setJobGroup(job, job)
        self._progress = ClassicProgress(self._context, job)

    def cancel(self, job: str) -> None:
        """SparkSession.interruptTag would do nothing from another thread."""
        self._context.cancelJobsWithTag(job)

    def progress(self) -> Progress:
        """Asks the driver; a few milliseconds."""
        progress = self._progress
        return Progress() if progress is None else progress.now()

    def reaches_out(self, sql: str, table: "DataFrame") -> str | None:
        """Spark has read it: its plan tells."""
        del sql
        plan = str(table._jdf.queryExecution().analyzed().toJSON())
        return next((name for node, name in _OUTWARD.items() if f'.{node}"' in plan), None)

    def alive(self) -> bool:
        """Whether the JVM and the cluster are there."""
        return is_alive(self.session)


class ConnectLane:
    """A session of its own on a Connect server."""

    def __init__(self, session: "SparkSession") -> None:
        self.session = session
        self._progress = ConnectProgress()
        session.registerProgressHandler(self._progress)  # type: ignore[arg-type]  # it is called, no more

    def begin(self, job: str) -> None:
        """Tags are a thread's there, too."""
        self.session.addTag(job)

    def count(self, job: str) -> None:
        """A session has one job at a time."""
        del job
        self._progress.begin()

    def cancel(self, job: str) -> None:
        """Interrupts the operations with that tag."""
        self.session.interruptTag(job)

    def progress(self) -> Progress:
        """What the server has told."""
        return self._progress.now()

    def reaches_out(self, sql: str, table: "DataFrame") -> str | None:
        """Its plan is the server's: what can be told from the text must do."""
        del table
        return may_reach_out(sql)

    def alive(self) -> bool:
        """Whether the server answers."""
        with suppress(Exception):
            return bool(self.session.version)
        return False


class Lanes:
    """`count` lanes on a session that `open_session` makes; when it is lost it is made again, for whoever asks next."""

    def __init__(self, open_session: Callable[[], "SparkSession"], count: int) -> None:
        self._open_session = open_session
        self._count = count
        self._changed = threading.Condition()
        self._all: list[Lane] = []
        self._free: list[Lane] = []
        self._lost = True
        self._opening = False

    def take(self, timeout: float) -> Lane | None:
        """A free lane, to be given back; None if there is none within `timeout` seconds.

        Raises what `open_session` raises if there is no session and none can be made.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._opening and (self._lost or self._free), timeout):
                return None
            if not self._lost:
                lane = self._free.pop(0)
                if not isinstance(lane, ClassicLane) or lane.alive():  # of Connect that is a question to the server
                    return lane
                self._lost = True
            self._opening = True
        try:
            self._open()
        finally:
            with self._changed:
                self._opening = False
                self._changed.notify_all()
        return self.take(timeout)

    def _open(self) -> None:
        if self._all:
            log.error("the Spark session is lost: another is started")
            for lane in self._all:
                forget(lane.session)
        first = self._open_session()
        made: list[Lane]
        if is_connect(first):
            made = [ConnectLane(first), *(ConnectLane(self._open_session()) for _ in range(self._count - 1))]
        else:
            # Of pools that have as much the one whose name comes first goes first: were there more of them than cores,
            # the last would starve.
            pools = max(1, min(self._count, first.sparkContext.defaultParallelism))
            made = [ClassicLane(first.newSession(), f"lane-{number % pools}") for number in range(self._count)]
        with self._changed:
            self._all, self._free, self._lost = made, list(made), False

    def give(self, lane: Lane, *, failed: bool = False) -> bool:
        """It is free again.  After a job has `failed`: whether that was because the session is lost."""
        lost = failed and not lane.alive()
        with self._changed:
            if lane in self._all:  # else another session is there already
                self._free.append(lane)
                self._lost = self._lost or lost
            self._changed.notify_all()
        return lost

    def close(self) -> None:
        """End the session."""
        with self._changed:
            lanes, self._all, self._free, self._lost = self._all, [], [], True
        for lane in lanes:
            forget(lane.session)

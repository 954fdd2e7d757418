"""A pool of Spark sessions, one for each running request, reopened when Spark is lost."""

import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..session import is_alive, is_connect, stop_quietly
from .jobs import unsafe_word
from .progress import ClassicProgress, ConnectProgress, Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("zmdp.spark")

_POOL_PROPERTY: Final = "spark.scheduler.pool"
_UNSAFE_NODES: Final = {"ScriptTransformation": "TRANSFORM … USING", "CallMethodViaReflection": "reflect"}
"""Plan nodes that run a program or call Java, and the SQL that produces them."""
_ALIAS_LINE: Final = re.compile(r"^[\s:+|-]*SubqueryAlias (.+)$", re.MULTILINE)
"""A table in the text of an analyzed plan."""
_NAME_PART: Final = re.compile(r"`((?:[^`]|``)+)`|([^.`]+)")
_FOR_QUERIES: Final = {
    "spark.sql.runSQLOnFiles": "false",  # csv.`/etc/passwd`
    "spark.sql.variable.substitute": "false",  # ${env:PASSWORD}, and a text other than the one that was checked
    "spark.sql.maxPlanStringLength": str((1 << 31) - 16),  # `tables_read` needs all of it
}
"""Spark's settings for what callers' queries may not do."""
_ONLY_FOR_QUERIES: Final = ("spark.sql.runSQLOnFiles", "spark.sql.variable.substitute")


class ClassicSession:
    """A session for one request at a time, on the driver's own SparkContext, in a FAIR scheduler pool."""

    number = 0
    """The session's number while it is acquired: no two that are have the same."""

    def __init__(self, session: "SparkSession", settings: Mapping[str, str], pools: int) -> None:
        self.spark = session
        self.settings = settings
        """Spark's settings with which the pool has made it; Spark keeps catalogs once they are used."""
        self._context = session.sparkContext
        self._pools = pools
        self._progress: ClassicProgress | None = None

    @property
    def scheduler_pool(self) -> str:
        """The pool in which Spark schedules its jobs."""
        return f"pool-{self.number % self._pools}"

    def begin(self, job: str) -> None:
        """Make the session this thread's active one, and tag its Spark jobs for `cancel` and `progress`.

        Call it first in the job's thread.
        """
        self.spark._jsparkSession.setActiveSession(self.spark._jsparkSession)
        self._context.addJobTag(job)
        self._context.setLocalProperty(_POOL_PROPERTY, self.scheduler_pool)
        self._context.setJobGroup(job, job)
        self._progress = ClassicProgress(self._context, job)

    def cancel(self, job: str) -> None:
        """Cancel what Spark runs for `job`.  Safe from any thread, any number of times."""
        # By the context: `SparkSession.interruptTag` has no effect from another thread.
        self._context.cancelJobsWithTag(job)

    def progress(self) -> Progress:
        """Return the progress of the latest job; takes a few milliseconds.  Safe from any thread."""
        progress = self._progress
        return Progress() if progress is None else progress.now()

    def find_unsafe(self, sql: str, df: "DataFrame") -> str | None:
        """Return the part of the query `sql`, planned as `df`, that would run a program or call Java, or None."""
        del sql
        plan = str(df._jdf.queryExecution().analyzed().toJSON())
        return next((name for node, name in _UNSAFE_NODES.items() if f'.{node}"' in plan), None)

    def tables_read(self, df: "DataFrame") -> set[tuple[str, ...]]:
        """Return the tables of catalogs that `df` reads, as (catalog, …, table).  Raises what Spark raises."""
        return _tables_in(str(df._jdf.queryExecution().analyzed().toString()))

    def tables_in_failure(self, error: Any) -> set[tuple[str, ...]] | None:
        """Return the tables of catalogs that Spark had found when the analysis of a query failed; None if unknown."""
        with suppress(Exception):  # only some of Spark's errors have a plan
            return _tables_in(str(error._origin.plan().get().toString()))
        return None

    def is_usable(self) -> bool:
        """Whether the session can still run jobs."""
        return is_alive(self.spark)

    def retire(self) -> None:
        """Release what the session alone uses: here nothing, for all sessions share the driver's context."""


class ConnectSession:
    """A session for one request at a time, on a Spark Connect server; its methods do what `ClassicSession`'s do."""

    number = 0

    def __init__(self, session: "SparkSession", settings: Mapping[str, str]) -> None:
        self.spark = session
        self.settings = settings
        self._reported = ConnectProgress()
        session.registerProgressHandler(self._reported)  # type: ignore[arg-type]  # only needs to be callable

    def begin(self, job: str) -> None:
        """Make the session active and set a tag, which Spark Connect keeps per thread as well; reset the counters."""
        self.spark._active_session.session = self.spark  # type: ignore[attr-defined]  # Connect's class has it
        self.spark.addTag(job)
        self._reported.begin()

    def cancel(self, job: str) -> None:
        """Interrupt the operations with the job's tag."""
        self.spark.interruptTag(job)

    def progress(self) -> Progress:
        """Return what the server has reported."""
        return self._reported.now()

    def find_unsafe(self, sql: str, df: "DataFrame") -> str | None:
        """Search the text of the query: the plan stays on the server."""
        del df
        return unsafe_word(sql)

    def tables_read(self, df: "DataFrame") -> set[tuple[str, ...]]:
        """Search the plans of the query, of which the server only returns the text."""
        # All four plans: a query may contain the title of one, so where the analyzed plan ends cannot be told.  The
        # parsed plan has no tables yet, and the optimized one no aliases.
        return _tables_in(str(df._explain_string(extended=True)))  # type: ignore[operator]  # Connect's class has it

    def tables_in_failure(self, error: object) -> None:
        """Return None: the server's error has a plan only as a part of its text, which the query can imitate."""

    def is_usable(self) -> bool:
        """Whether the server answers."""
        with suppress(Exception):
            return bool(self.spark.version)
        return False

    def retire(self) -> None:
        """End the session on the server."""
        stop_quietly(self.spark)


JobSession: TypeAlias = ClassicSession | ConnectSession


def permit_everything(session: "SparkSession") -> None:
    """Permit a job what queries may not do."""
    for name in _ONLY_FOR_QUERIES:
        session.conf.set(name, "true")


def name_parts(name: str) -> tuple[str, ...]:
    """Return the parts of a name as Spark writes it, for example lake.shop.`a.b`, without quotes."""
    return tuple(quoted.replace("``", "`") or plain for quoted, plain in _NAME_PART.findall(name))


def _tables_in(plan: str) -> set[tuple[str, ...]]:
    """Return the tables of catalogs in the text of an analyzed plan, as (catalog, …, table)."""
    # Each table of a catalog has its full name as an alias, views only their own.
    names = map(name_parts, _ALIAS_LINE.findall(plan))
    return {name for name in names if len(name) > 1}


class SessionPool:
    """Up to `count` sessions made with `open_session`, with Spark `settings` of their own.

    Sessions are used again unless the request may have changed them.  When Spark is lost, the next `acquire` opens it
    again.
    """

    def __init__(
        self, open_session: Callable[[], "SparkSession"], count: int, settings: Mapping[str, str] | None = None
    ) -> None:
        self._open_session = open_session
        self._settings = dict(settings or {})
        self._numbers: queue.PriorityQueue[int] = queue.PriorityQueue()
        """The numbers of the sessions that can still be acquired."""
        for number in range(count):
            self._numbers.put(number)
        self._count = count
        self._free: list[JobSession] = []
        self._first: SparkSession | None = None
        """The classic session from which all others are made, which share its context; None with Spark Connect."""
        self._opening = threading.Lock()

    def open(self) -> None:
        """Open a session before the first `acquire`.  Raises what `open_session` raises."""
        session = self.acquire(0)
        if session is not None:
            self.release(session)

    def acquire(self, timeout: float) -> JobSession | None:
        """Return a free session, or None if none becomes free within `timeout` seconds.

        Return it with `release`.  Raises what `open_session` raises if Spark is lost and cannot be reopened.
        """
        try:
            number = self._numbers.get(timeout=timeout)
        except queue.Empty:
            return None
        session = None
        try:
            if self._opening.acquire(timeout=timeout):
                try:
                    session = self._take()
                    session.number = number
                finally:
                    self._opening.release()
        finally:
            if session is None:
                self._numbers.put(number)
        return session

    def _take(self) -> JobSession:
        """Return a free session, or a new one."""
        settings = self._settings
        while self._free:
            session = self._free.pop()
            # Only classic sessions are checked: asking a Connect server takes a round trip.
            if session.settings is settings and (isinstance(session, ConnectSession) or session.is_usable()):
                return session
            session.retire()
        if self._first is not None and not is_alive(self._first):
            log.error("the Spark session is lost; opening another")
            stop_quietly(self._first)
            self._first = None
        opened = self._open_session() if self._first is None else self._first
        if is_connect(opened):
            made: JobSession = ConnectSession(opened, settings)
        else:
            self._first = opened
            # Spark serves equally loaded pools in order of their names, so with more pools than cores the last would
            # starve.
            pools = max(1, min(self._count, opened.sparkContext.defaultParallelism))
            made = ClassicSession(opened.newSession(), settings, pools)
        for name, value in {**settings, **_FOR_QUERIES}.items():
            made.spark.conf.set(name, value)
        return made

    def configure(self, settings: Mapping[str, str]) -> None:
        """Use other Spark settings for requests that begin from now on."""
        if self._settings != settings:
            self._settings = dict(settings)

    def release(self, session: JobSession, *, failed: bool = False, changed: bool = False) -> bool:
        """Return a session to the pool, which does not use it again if the request may have `changed` it.

        After a request has `failed`, return whether Spark was lost.
        """
        lost = failed and not session.is_usable()
        if lost:
            self._settings = dict(self._settings)  # the other sessions are lost too: use none that was made with these
        if lost or changed:
            session.retire()
        else:
            self._free.append(session)
        self._numbers.put(session.number)
        return lost

    def close(self) -> None:
        """Stop Spark, or the free sessions of a Spark Connect server."""
        while self._free:
            self._free.pop().retire()
        if self._first is not None:
            stop_quietly(self._first)

"""A pool of Spark sessions, one for each running request, reopened when Spark is lost."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ..session import is_alive, is_connect, stop_quietly
from .jobs import unsafe_word
from .progress import ClassicProgress, ConnectProgress, Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("zmdp.spark")

_POOL_PROPERTY: Final = "spark.scheduler.pool"
_UNSAFE_NODES: Final = {"ScriptTransformation": "TRANSFORM … USING", "CallMethodViaReflection": "reflect"}
"""Plan nodes that run a program or call Java, and the SQL that produces them."""
_ALIAS_CLASS: Final = "org.apache.spark.sql.catalyst.AliasIdentifier"
_ALIAS_LINE: Final = re.compile(r"^[\s:+|-]*SubqueryAlias (.+)$", re.MULTILINE)
_NAME_PART: Final = re.compile(r"`(?:[^`]|``)+`|[^.`]+")


class JobSession:
    """A session that runs one request at a time: on the driver's own SparkContext, in a FAIR scheduler pool."""

    def __init__(self, session: "SparkSession", fair_pool: str) -> None:
        self.spark = session
        self._context = session.sparkContext
        self._fair_pool = fair_pool
        self._progress: ClassicProgress | None = None

    def begin(self, job: str) -> None:
        """Tag this thread's Spark jobs, so that `cancel` finds them.  Call it first in the job's thread."""
        self._progress = None
        self._context.addJobTag(job)
        self._context.setLocalProperty(_POOL_PROPERTY, self._fair_pool)

    def track_progress(self, job: str) -> None:
        """Count the Spark jobs that this thread starts from now on.  Call it after `begin`."""
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
        # Each table of a catalog has its full name as an alias in the analyzed plan, views only their own.
        plan = str(df._jdf.queryExecution().analyzed().toJSON())
        if _ALIAS_CLASS not in plan:
            return set()
        return {name for name in _qualified(json.loads(plan)) if len(name) > 1}

    def is_usable(self) -> bool:
        """Whether the session can still run jobs."""
        return is_alive(self.spark)

    def retire(self) -> None:
        """Release what the session alone uses: here nothing, for all sessions share the driver's context."""


class ConnectSession(JobSession):
    """A session of its own on a Spark Connect server."""

    def __init__(self, session: "SparkSession") -> None:
        self.spark = session
        self._reported = ConnectProgress()
        session.registerProgressHandler(self._reported)  # type: ignore[arg-type]  # only needs to be callable

    def begin(self, job: str) -> None:
        """Set a tag, which Spark Connect keeps per thread as well."""
        self.spark.addTag(job)

    def track_progress(self, job: str) -> None:
        """Reset the counters: a Connect session runs one job at a time."""
        del job
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
        """Search the server's description of the plan."""
        text = str(df._explain_string(extended=True))  # type: ignore[operator]  # Connect's class has it
        analyzed = text.partition("== Analyzed Logical Plan ==")[2].partition("== Optimized Logical Plan ==")[0]
        names = (tuple(_NAME_PART.findall(line)) for line in _ALIAS_LINE.findall(analyzed))
        return {name for name in names if len(name) > 1}

    def is_usable(self) -> bool:
        """Whether the server answers."""
        with suppress(Exception):
            return bool(self.spark.version)
        return False

    def retire(self) -> None:
        """End the session on the server."""
        stop_quietly(self.spark)


def _qualified(found: object) -> Iterator[tuple[str, ...]]:
    """Yield the full names in a plan."""
    if isinstance(found, list):
        for each in found:
            yield from _qualified(each)
    elif isinstance(found, dict):
        if found.get("product-class") == _ALIAS_CLASS:
            qualifier = found["qualifier"]  # a list if it is empty, otherwise text: "[a, b]"
            parts = qualifier.strip("[]").split(", ") if isinstance(qualifier, str) else qualifier
            yield (*map(str, parts), str(found["name"]))
        for each in found.values():
            yield from _qualified(each)


class SessionPool:
    """Up to `count` sessions made with `open_session`, with Spark `settings` of their own.

    When Spark is lost, the next `acquire` opens the sessions again.
    """

    def __init__(
        self, open_session: Callable[[], "SparkSession"], count: int, settings: Mapping[str, str] | None = None
    ) -> None:
        self._open_session = open_session
        self._count = count
        self._settings = dict(settings or {})
        self._changed = threading.Condition()
        self._all: list[JobSession] = []
        self._free: list[JobSession] = []
        self._lost = True
        self._outdated = False
        self._opening = False

    def open(self) -> None:
        """Open the sessions before the first `acquire`.  Raises what `open_session` raises."""
        session = self.acquire(0)
        if session is not None:
            self.release(session)

    def acquire(self, timeout: float) -> JobSession | None:
        """Return a free session, or None if none becomes free within `timeout` seconds.

        Return it with `release`.  Raises what `open_session` raises if Spark is lost and cannot be reopened.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._opening and (self._lost or self._free), timeout):
                return None
            if not self._lost:
                session = self._free.pop(0)
                # Only classic sessions are checked: asking a Connect server takes a round trip.
                if isinstance(session, ConnectSession) or session.is_usable():
                    return session
                self._lost = True
            self._opening = True
        try:
            self._open()
        finally:
            with self._changed:
                self._opening = False
                self._changed.notify_all()
        return self.acquire(timeout)

    def _open(self) -> None:
        if self._outdated and self._all[0].is_usable():  # sessions in use are retired when they are released
            for each in self._free:
                each.retire()
        elif self._all:
            log.error("the Spark session is lost; opening another")
            for each in self._all:
                stop_quietly(each.spark)
        first = self._open_session()
        made: list[JobSession]
        if is_connect(first):
            made = [ConnectSession(first), *(ConnectSession(self._open_session()) for _ in range(self._count - 1))]
        else:
            # Spark serves equally loaded pools in order of their names, so with more pools than cores the last would
            # starve.
            pools = max(1, min(self._count, first.sparkContext.defaultParallelism))
            made = [JobSession(first.newSession(), f"pool-{number % pools}") for number in range(self._count)]
        with self._changed:
            for each in made:
                for name, value in self._settings.items():
                    each.spark.conf.set(name, value)
            self._all, self._free, self._lost, self._outdated = made, list(made), False, False

    def configure(self, settings: Mapping[str, str]) -> None:
        """Use other Spark settings for requests that begin from now on."""
        with self._changed:
            if self._settings != settings:
                self._settings = dict(settings)
                if not self._lost:  # Spark keeps catalogs once they are used, so only new sessions have others
                    self._lost = self._outdated = True

    def release(self, session: JobSession, *, failed: bool = False) -> bool:
        """Return a session to the pool.  After a job has `failed`, return whether Spark was lost."""
        lost = failed and not session.is_usable()
        with self._changed:
            known = session in self._all  # otherwise the pool has been reopened since
            if known:
                self._free.append(session)
                self._lost = self._lost or lost
            self._changed.notify_all()
        if not known:
            session.retire()
        return lost

    def close(self) -> None:
        """Stop all sessions."""
        with self._changed:
            sessions, self._all, self._free, self._lost = self._all, [], [], True
        for each in sessions:
            stop_quietly(each.spark)

"""A pool of Spark sessions, one for each running request, reopened when Spark is lost."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...mdp.codes import Code
from ...mdp.errors import ServiceError
from ..session import is_alive, is_connect, stop_quietly
from .catalogue.roles import ROLES_NEED_PLAN, Role
from .parsing import not_in_queries, unsafe_word
from .progress import ClassicProgress, ConnectProgress, Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("zmdp.spark")

NUMBERS_PER_SESSION: Final = 8
_POOL_PROPERTY: Final = "spark.scheduler.pool"
_CALL_JAVA: Final = ("reflect", "java_method", "try_reflect")
"""Functions that queries do not have."""
_FOR_QUERIES: Final = {
    "spark.sql.runSQLOnFiles": "false",  # csv.`/etc/passwd`
    "spark.sql.variable.substitute": "false",  # ${env:PASSWORD}, and a text other than the one that was checked
}
"""Spark's settings that forbid features to callers' queries."""


class _Session:
    """Base of the sessions of Classic and of Connect; each is for one request at a time."""

    number = 0
    """The session's number while it is acquired: no two that are have the same, and later ones have lower ones."""

    def __init__(self, session: "SparkSession", settings: Mapping[str, str]) -> None:
        self.spark = session
        self.settings = settings
        """Spark's settings with which the pool has made it; Spark keeps catalogs once they are used."""

    def restrict(self) -> None:
        """Remove the functions that call Java, as far as they are not the server's: the session is for queries."""

    def retire(self) -> None:
        """Release the session's own resources: none, if all sessions share the driver's context."""


class ClassicSession(_Session):
    """A session on the driver's own SparkContext, in a FAIR scheduler pool."""

    def __init__(self, session: "SparkSession", settings: Mapping[str, str]) -> None:
        super().__init__(session, settings)
        self._context = session.sparkContext
        self._scala: Any = session._jvm.scala  # type: ignore[union-attr]  # None only after Spark has been stopped
        self._progress: ClassicProgress | None = None

    @property
    def scheduler_pool(self) -> str:
        """The pool in which Spark schedules its jobs.

        Of pools that have no running tasks, Spark serves the one whose name comes first.
        """
        return f"request-{self.number:05}"

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
        """Cancel the Spark jobs of `job`.  Safe from any thread, any number of times."""
        # By the context: `SparkSession.interruptTag` has no effect from another thread.
        self._context.cancelJobsWithTag(job)

    def progress(self) -> Progress:
        """Return the progress of the latest job; takes a few milliseconds.  Safe from any thread."""
        progress = self._progress
        return Progress() if progress is None else progress.now()

    def restrict(self) -> None:
        """Remove the functions that call Java: the session is for queries."""
        functions = self.spark._jsparkSession.sessionState().functionRegistry()
        for each in self._list(functions.listFunction()):  # versions of Spark qualify the names differently
            if each.funcName() in _CALL_JAVA:
                functions.dropFunction(each)

    def parse(self, sql: str, args: Any, role: Role) -> None:
        """Parse a query of `role`.  Raises what Spark raises, and `ServiceError` if it cannot be checked."""
        del args, role
        self.spark._jsparkSession.sessionState().sqlParser().parsePlan(sql)

    def tables_read(self, df: "DataFrame") -> set[tuple[str, ...]]:
        """Return the tables and views of catalogs that `df` reads, as (catalog, …, table).

        Raises `ServiceError` if it would run a program.
        """
        return self._tables_in(df._jdf.queryExecution().analyzed())

    def tables_in_failure(self, error: Any) -> set[tuple[str, ...]] | None:
        """Return the tables of catalogs that Spark had found when the analysis of a query failed; None if unknown."""
        with suppress(Exception):  # only some of Spark's errors have a plan
            return self._tables_in(error._origin.plan().get())
        return None

    def _tables_in(self, plan: Any) -> set[tuple[str, ...]]:
        """Walk the nodes of an analyzed plan and of its subqueries, which Spark itself finds in the expressions."""
        tables = set()
        itself = getattr(self._scala.Predef, "$conforms")()
        for root in (plan, *self._list(plan.subqueriesAll())):
            for node in self._list(root.map(itself)):
                kind = node.nodeName()
                if kind == "ScriptTransformation":
                    raise not_in_queries("TRANSFORM … USING")
                if kind == "SubqueryAlias":  # has the full name of a catalog's table; callers write short ones
                    alias = node.identifier()
                    tables.add((*self._list(alias.qualifier()), alias.name()))
        return {name for name in tables if len(name) > 1}

    def _list(self, sequence: Any) -> Any:
        return self._scala.jdk.javaapi.CollectionConverters.asJava(sequence)

    def is_usable(self) -> bool:
        """Whether the session can still run jobs."""
        return is_alive(self.spark)


class ConnectSession(_Session):
    """A session on a Spark Connect server; its methods do what `ClassicSession`'s do."""

    def __init__(self, session: "SparkSession", settings: Mapping[str, str]) -> None:
        super().__init__(session, settings)
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
        """Return the progress that the server has reported."""
        return self._reported.now()

    def parse(self, sql: str, args: Any, role: Role) -> None:
        """Refuse a query by its text or its role; let the server parse, and analyze, others."""
        if not role.reads_everything:
            raise ServiceError(Code.NOT_ALLOWED, f"{role.title} may run no queries: {ROLES_NEED_PLAN}")
        if (word := unsafe_word(sql)) is not None:
            raise not_in_queries(word)
        self.spark.sql(sql, args=args)

    def tables_read(self, df: "DataFrame") -> set[tuple[str, ...]]:
        """Return nothing: the server decides which tables the batch may read."""
        del df
        return set()

    def tables_in_failure(self, error: object) -> None:
        """Return None."""

    def is_usable(self) -> bool:
        """Whether the server answers."""
        with suppress(Exception):
            return bool(self.spark.version)
        return False

    def retire(self) -> None:
        """End the session on the server."""
        stop_quietly(self.spark)


JobSession: TypeAlias = ClassicSession | ConnectSession


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
        self._left = threading.Semaphore(count)
        self._numbers = frozenset(range(NUMBERS_PER_SESSION * count))
        self._used: set[int] = set()
        """The numbers of the sessions that are acquired."""
        self._free: list[JobSession] = []
        self._first: SparkSession | None = None
        """The classic session from which all others are made, which share its context; None with Spark Connect."""
        self._opening = threading.Lock()

    def open(self) -> None:
        """Open a session before the first `acquire`.  Raises what `open_session` raises."""
        session = self.acquire(0)
        if session is not None:
            self.release(session)

    def acquire(self, timeout: float, *, new: bool = False) -> JobSession | None:
        """Return a free session for queries, or a `new` one for a job, or None after `timeout` seconds without any.

        Return it with `release`.  Raises what `open_session` raises if Spark is lost and cannot be reopened.
        """
        if not self._left.acquire(timeout=timeout):
            return None
        session = None
        try:
            if self._opening.acquire(timeout=timeout):
                try:
                    session = self._take(new=new)
                    session.number = self._next_number()
                    self._used.add(session.number)
                finally:
                    self._opening.release()
        finally:
            if session is None:
                self._left.release()
        return session

    def _next_number(self) -> int:
        """Return a number below those in use, as long as there is one: see `ClassicSession.scheduler_pool`."""
        used = self._used.copy()
        free = self._numbers - used
        return max({number for number in free if number < min(used, default=len(self._numbers))} or free)

    def _take(self, *, new: bool) -> JobSession:
        settings = self._settings
        while self._free and not new:
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
            made = ClassicSession(opened.newSession(), settings)
        for name, value in (settings if new else {**settings, **_FOR_QUERIES}).items():
            made.spark.conf.set(name, value)
        if not new:
            made.restrict()
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
        self._used.discard(session.number)
        self._left.release()
        return lost

    def close(self) -> None:
        """Stop Spark, or the free sessions of a Spark Connect server."""
        while self._free:
            self._free.pop().retire()
        if self._first is not None:
            stop_quietly(self._first)

"""Group commit: concurrent work on the database shares a transaction, on one thread.

While a transaction runs, work for the next one is collected.  Results are delivered once the transaction is committed.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...mdp.backoff import doubled, jittered
from ...mdp.codes import Code
from ...mdp.errors import TitanicError
from ...mdp.histogram import Histogram
from .postgresql import READ_ONLY_STATE
from .schema import absolute, file_identity, shown

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Connection, Sequence[Item]], Sequence[Result]]
"""Processes a batch of items and returns a result for each."""

MAX_REASON_CHARS: Final = 300
"""Maximum length of the database's error message, as callers get it."""

RETRY_SECONDS: Final = (0.1, 2.0)
"""The first and the longest pause before work that the database must accept is repeated."""
LOG_SECONDS: Final = 5.0
"""Minimum interval between log lines about failing transactions."""
CLOSE_POLL_SECONDS: Final = 0.005
"""Interval at which `close` checks whether the thread has ended."""
LOCK_STATES: Final = frozenset({"40001", "40P01", "55P03"})
"""PostgreSQL's SQLSTATEs for conflicts with other transactions: they concern single items, not the database."""
LOCK_TIMEOUT_STATE: Final = "55P03"
"""The one of these for a lock that was waited for long enough."""
SHORT_LOCK_MS: Final = 20
"""How long each item waits for locks after a transaction with all of them has waited in vain.  If each waited as long
again, the thread would be held up for so long that Titanic could not renew its lease."""
DISK_FULL_STATE: Final = "53100"
"""PostgreSQL's SQLSTATE for a full disk."""

COMMIT_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds."""
BATCH_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Upper bounds in items."""

log = logging.getLogger("zmdp.titanic")


class StoreError(TitanicError):
    """A transaction failed.  The message says why; `text` is what callers may see of it."""

    def __init__(self, message: str, text: str | None = None) -> None:
        super().__init__(message, code=int(Code.FAILED), text=message if text is None else text, reason="database")


class CommitMetrics:
    """The transactions of one database thread."""

    __slots__ = ("failures", "items", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram([0] * (len(COMMIT_BOUNDS) + 1))
        """How long those that were committed took."""
        self.items = Histogram([0] * (len(BATCH_BOUNDS) + 1))
        """How many requests, outcomes or other items they had."""
        self.failures = 0
        """Transactions that failed."""

    def committed(self, seconds: float, items: int) -> None:
        """Count a transaction that was committed."""
        self.seconds.add(bisect_left(COMMIT_BOUNDS, seconds), seconds)
        self.items.add(bisect_left(BATCH_BOUNDS, items), items)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name, ready for JSON."""
        return {
            "seconds": _told(self.seconds, COMMIT_BOUNDS),
            "items": _told(self.items, BATCH_BOUNDS),
            "failures": self.failures,
        }


def _told(histogram: Histogram, bounds: Sequence[float]) -> dict[str, Any]:
    return {"bounds": list(bounds), "buckets": list(histogram.buckets), "sum": round(histogram.total, 6)}


class _Job(NamedTuple):
    """An item for one kind of work, and the future for its result."""

    work: Work[Any, Any]
    item: Any
    future: "asyncio.Future[Any]"


_Groups = dict[Work[Any, Any], list[_Job]]


class _Delivery(NamedTuple):
    """A future and its result, or its exception if the work failed."""

    future: "asyncio.Future[Any]"
    result: Any
    failed: bool


class BatchExecutor:
    """A thread with a database connection, for the current event loop.

    Args:
        name: The thread's name.
        engine: The database.
        order: The kinds of work, in the order in which a transaction performs them.
        metrics: Counts the transactions.
    """

    def __init__(
        self, name: str, engine: Engine, order: Sequence[Work[Any, Any]], metrics: CommitMetrics | None = None
    ) -> None:
        self._engine = engine
        self._metrics = metrics or CommitMetrics()
        self._order = {work: position for position, work in enumerate(order)}
        self._file = file_identity(engine.url)
        self._loop = asyncio.get_running_loop()
        self._groups: _Groups = {}
        """Work for the next transaction."""
        self._changed = threading.Condition()
        self._due = False
        """Whether to begin a transaction: the event loop's turn in which its first work was submitted has ended."""
        self._closed = False
        self._log_at = 0.0
        self._failed_at: float | None = None
        self._items = self._transactions = 0
        self.failing = False
        """Whether the database has failed to store the last item that it must accept."""
        self._connection: Connection | None = None
        """Used only by the thread, which keeps it open between transactions."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work[Item, Result], item: Item) -> "asyncio.Future[Result]":
        """Perform `work` for `item` in the next transaction.  The future raises `StoreError` if that fails."""
        job = _Job(work, item, self._loop.create_future())
        with self._changed:
            if self._closed:
                job.future.set_exception(StoreError("Titanic is shutting down"))
                return job.future
            group = self._groups.get(work)
            if group is None:
                if not self._groups:  # at the end of the event loop's turn, so that all its work shares a transaction
                    self._loop.call_soon(self._begin)
                group = self._groups[work] = []
            group.append(job)
        return job.future

    def insist(self, work: Work[Item, Result], item: Item, done: Callable[[Result], None], tries: int = 0) -> None:
        """Perform `work` for `item` until the database accepts it, then call `done` with the result."""
        self.submit(work, item).add_done_callback(partial(self._insisted, work, item, done, tries))

    def _insisted(
        self,
        work: Work[Item, Result],
        item: Item,
        done: Callable[[Result], None],
        tries: int,
        future: "asyncio.Future[Result]",
    ) -> None:
        self.failing = future.exception() is not None
        if self.failing:
            self._loop.call_later(jittered(doubled(*RETRY_SECONDS, tries)), self.insist, work, item, done, tries + 1)
        else:
            done(future.result())

    def _begin(self) -> None:
        with self._changed:
            self._due = True
            self._changed.notify()

    async def close(self) -> None:
        """Perform the work that was submitted, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        while self._thread.is_alive():  # not `join` in a thread, which could not be cancelled
            await asyncio.sleep(CLOSE_POLL_SECONDS)
        await asyncio.sleep(0)  # delivers the last results
        self._engine.dispose()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                groups, self._groups, self._due = self._groups, {}, False
            if not groups:
                self._disconnect()
                log.debug("%s: %d items in %d transactions", self._thread.name, self._items, self._transactions)
                return
            outcomes = self._perform(groups)
            self._loop.call_soon_threadsafe(_deliver, outcomes)

    def _perform(self, groups: _Groups, *, waited: bool = False) -> list[_Delivery]:
        """Perform work, and return its results.  `waited`, if it has waited for locks before."""
        try:
            try:
                return self._transact(groups, waited=waited)
            except sa.exc.DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                # The database was restarted, or the connection was lost.  All work is idempotent, so it can be repeated
                # even if the transaction was committed and only the answer was lost.
                return self._transact(groups, waited=waited)
        except Exception as error:  # noqa: BLE001 - every error goes to the callers
            self._metrics.failures += 1
            jobs = [job for work in self._in_order(groups) for job in groups[work]]
            if len(jobs) > 1 and _is_full(error):
                return self._perform_smaller_half_first(jobs, error)
            as_a_whole = isinstance(error, sa.exc.OperationalError | sa.exc.InternalError | StoreError)
            state = getattr(error.orig, "sqlstate", "") if isinstance(error, sa.exc.DBAPIError) else ""
            if (not as_a_whole or state in LOCK_STATES) and len(jobs) > 1:
                # One broken job must not fail the others.
                waited = state == LOCK_TIMEOUT_STATE
                return [outcome for job in jobs for outcome in self._perform(_grouped([job]), waited=waited)]
            return self._fail(jobs, error)

    def _perform_smaller_half_first(self, jobs: Sequence[_Job], error: Exception) -> list[_Delivery]:
        """Store what fits on a full disk: one large job must not fail the others.

        If a job does not fit, larger ones are not tried, so few transactions fail however many jobs there are.
        """
        ordered = sorted(jobs, key=_size)
        half = len(ordered) // 2
        outcomes = self._perform(_grouped(ordered[:half]))
        if any(each.failed for each in outcomes):
            return [*outcomes, *self._fail(ordered[half:], error)]
        return [*outcomes, *self._perform(_grouped(ordered[half:]))]

    def _fail(self, jobs: Sequence[_Job], error: Exception) -> list[_Delivery]:
        """Log the error and return it for each job, each time as a new object: a traceback grows when it is raised."""
        self._log(error, max(map(_size, jobs)) if _is_full(error) else None)
        return [_Delivery(job.future, _store_error(error), failed=True) for job in jobs]

    def _in_order(self, groups: _Groups) -> list[Work[Any, Any]]:
        return sorted(groups, key=self._order.__getitem__)

    def _transact(self, groups: _Groups, *, waited: bool) -> list[_Delivery]:
        outcomes: list[_Delivery] = []
        self._transactions += 1
        began, items_before = time.monotonic(), self._items
        self._check_file()  # before connecting, which would create a new file
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            with self._connection.begin():
                if waited:
                    self._connection.exec_driver_sql(f"SET LOCAL lock_timeout = {SHORT_LOCK_MS}")
                for work in self._in_order(groups):
                    items = [job.item for job in groups[work]]
                    self._items += len(items)
                    results = work(self._connection, items)
                    if len(results) != len(items):
                        raise ValueError(f"{work!r} gave {len(results)} results for {len(items)} items")
                    outcomes += (
                        _Delivery(job.future, result, failed=False)
                        for job, result in zip(groups[work], results, strict=True)
                    )
                self._check_file()
        except BaseException:
            self._disconnect()
            raise
        self._metrics.committed(time.monotonic() - began, self._items - items_before)
        self._log_success()
        return outcomes

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _log(self, error: Exception, size: int | None) -> None:
        """Log the error, at a limited rate: while the database has a problem, everything fails.

        `size` is that of an item that does not fit on a full disk, in bytes.
        """
        now = time.monotonic()
        if not isinstance(error, sa.exc.DBAPIError | StoreError):
            log.error("bug in a transaction", exc_info=error)
        elif self._failed_at is None or now >= self._log_at:
            self._log_at = now + LOG_SECONDS
            unfit = "" if size is None else f"; it has no room for an item of {size} bytes"
            log.error("%s: transaction failed: %s%s", shown(absolute(self._engine.url)), _store_error(error), unfit)
        self._failed_at = now

    def _log_success(self) -> None:
        """Log the recovery once no transaction has failed for a while: some can succeed while others fail."""
        if self._failed_at is not None and time.monotonic() >= self._failed_at + LOG_SECONDS:
            self._failed_at = None
            log.warning("%s: the database works again", shown(absolute(self._engine.url)))

    def _check_file(self) -> None:
        """Detect that the SQLite file was removed or replaced: SQLite would write to the old file, which is lost."""
        if self._file != file_identity(self._engine.url):
            if self._connection is not None:  # the next use connects to the new file
                self._connection.invalidate()
            self._engine.dispose()
            raise StoreError("the database file was removed or replaced: put it back, or restart Titanic")


def _grouped(jobs: Sequence[_Job]) -> _Groups:
    groups: _Groups = {}
    for job in jobs:
        groups.setdefault(job.work, []).append(job)
    return groups


def _size(job: _Job) -> int:
    """Return the bytes of bodies in a job."""
    return _bytes_in(job.item)


def _bytes_in(item: Any) -> int:
    if isinstance(item, tuple):
        return sum(map(_bytes_in, item))
    return len(item) if isinstance(item, bytes) else 0


def _is_full(error: Exception) -> bool:
    """Return whether the database's disk is full."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else None
    if isinstance(cause, sqlite3.Error):
        return cause.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    return getattr(cause, "sqlstate", "") == DISK_FULL_STATE


def _store_error(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return StoreError(str(error))
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    reason = " ".join(str(cause).split())[:MAX_REASON_CHARS] or type(cause).__name__
    if getattr(cause, "sqlstate", "") in LOCK_STATES:
        return StoreError(reason, "another transaction holds a lock, perhaps on the same key: try again")
    if isinstance(error, sa.exc.DBAPIError) and not isinstance(error.orig, sqlite3.Error) and _is_away(error):
        return StoreError(reason, "the database cannot be reached")  # without its address, which callers must not see
    return StoreError(reason)


def _is_away(error: sa.exc.DBAPIError) -> bool:
    if getattr(error.orig, "sqlstate", "") == READ_ONLY_STATE:
        return False  # it was reached
    return error.connection_invalidated or error.statement is None


def _deliver(outcomes: list[_Delivery]) -> None:
    for future, result, failed in outcomes:
        if future.done():  # cancelled
            continue
        if failed:
            future.set_exception(result)
        else:
            future.set_result(result)

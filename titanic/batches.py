"""Group commit: what many ask of the database at the same time is done in one transaction, on one thread.

While a transaction is under way the next batch gathers; a batch is everything that came meanwhile.  What was asked is
answered only once the transaction is committed.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ..mdp.codes import Code
from ..mdp.errors import TitanicError
from .schema import file_identity

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Connection, Sequence[Item]], Sequence[Result]]
"""Does a batch of one kind: as many results as items."""

MAX_REASON: Final = 300
"""Characters of the database's complaint that callers are told."""

LOG_EVERY: Final = 5.0
"""Seconds between two log lines about what fails."""
CLOSING: Final = 0.005
"""Seconds between two looks at whether the thread has ended."""
LOCKED: Final = frozenset({"40001", "40P01", "55P03"})
"""What PostgreSQL says if somebody else is at the same rows: that is about some jobs, not about the database."""

log = logging.getLogger("zmdp.titanic")


class StoreError(TitanicError):
    """The database has not done it.  Says why; `text` is what callers may know of it."""

    def __init__(self, message: str, text: str | None = None) -> None:
        super().__init__(message, code=int(Code.FAILED), text=message if text is None else text)


class _Job(NamedTuple):
    work: Work[Any, Any]
    item: Any
    future: "asyncio.Future[Any]"


Outcome = tuple[_Job, Any, Exception | None]


class Batches:
    """A thread with a connection, for the event loop in which this is made.

    `order` are the kinds of work, in the order in which they are done within a transaction.
    """

    def __init__(self, name: str, engine: Engine, order: Sequence[Work[Any, Any]]) -> None:
        self._engine = engine
        self._order = {work: position for position, work in enumerate(order)}
        self._file = file_identity(engine.url)
        self._loop = asyncio.get_running_loop()
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._log_at = 0.0
        self._failed_at: float | None = None
        self._done = self._transactions = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Work[Item, Result], item: Item) -> "asyncio.Future[Result]":
        """Have `work` done for `item`, in the next transaction.  The future raises `StoreError` if that fails."""
        future: asyncio.Future[Result] = self._loop.create_future()
        with self._changed:
            if self._closed:
                future.set_exception(StoreError("Titanic is ending"))
                return future
            self._jobs.append(_Job(work, item, future))
            if len(self._jobs) == 1:
                self._changed.notify()
        return future

    async def close(self) -> None:
        """Do what was asked for, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        while self._thread.is_alive():  # not `join` in another thread: nobody could give that up
            await asyncio.sleep(CLOSING)
        await asyncio.sleep(0)  # what the thread delivered last
        self._engine.dispose()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                jobs, self._jobs = self._jobs, []
                if not jobs:
                    log.info("%s: %d jobs in %d transactions", self._thread.name, self._done, self._transactions)
                    return
            outcomes = self._perform(jobs)
            self._loop.call_soon_threadsafe(_deliver, outcomes)

    def _perform(self, jobs: list[_Job]) -> list[Outcome]:
        try:
            try:
                return self._transact(jobs)
            except sa.exc.DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                # The database was restarted since, or the connection was cut.  All work can be repeated, even if the
                # transaction was committed and only the answer was lost.
                return self._transact(jobs)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            as_a_whole = isinstance(error, sa.exc.OperationalError | sa.exc.InternalError | StoreError)
            if as_a_whole and isinstance(error, sa.exc.DBAPIError):
                as_a_whole = getattr(error.orig, "sqlstate", "") not in LOCKED
            if not as_a_whole and len(jobs) > 1:
                # Whatever is wrong with one of them, the others are done.
                return [outcome for job in jobs for outcome in self._perform([job])]
            self._log(error)
            return [(job, None, _store_error(error)) for job in jobs]  # one each: a traceback grows when it is raised

    def _transact(self, jobs: list[_Job]) -> list[Outcome]:
        groups: dict[Work[Any, Any], list[_Job]] = defaultdict(list)
        for job in jobs:
            groups[job.work].append(job)
        outcomes: list[Outcome] = []
        self._done += len(jobs)
        self._transactions += 1
        self._check_file()  # before it is opened, which would make another
        with self._engine.begin() as connection:
            for work in sorted(groups, key=self._order.__getitem__):
                results = work(connection, [job.item for job in groups[work]])
                outcomes += [(job, result, None) for job, result in zip(groups[work], results, strict=True)]
            try:
                self._check_file()
            except StoreError:
                connection.invalidate()
                raise
        self._log_success()
        return outcomes

    def _log(self, error: Exception) -> None:
        """Tell the operator, now and then: while the database is in trouble, everything fails."""
        now = time.monotonic()
        if not isinstance(error, sa.exc.DBAPIError | StoreError):
            log.error("the database was not even asked", exc_info=error)
        elif self._failed_at is None or now >= self._log_at:
            self._log_at = now + LOG_EVERY
            log.error("not done: %s", _store_error(error))
        self._failed_at = now

    def _log_success(self) -> None:
        """Tell that it works again, but only after a while: reading may still work where writing fails."""
        if self._failed_at is not None and time.monotonic() >= self._failed_at + LOG_EVERY:
            self._failed_at = None
            log.warning("the database works again")

    def _check_file(self) -> None:
        """A SQLite file that was removed or replaced is still written to, and nobody will ever see it again."""
        if self._file != file_identity(self._engine.url):
            self._engine.dispose()
            raise StoreError("the database file was removed or replaced: put it back, or restart Titanic")


def _store_error(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return StoreError(str(error))
    told = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    reason = " ".join(str(told).split())[:MAX_REASON] or type(told).__name__
    if getattr(told, "sqlstate", "") in LOCKED:
        return StoreError(reason, "somebody else is at it, with the same key perhaps: try again")
    if isinstance(error, sa.exc.DBAPIError) and not isinstance(error.orig, sqlite3.Error) and _is_away(error):
        return StoreError(reason, "the database cannot be reached")  # its address is nobody's business
    return StoreError(reason)


def _is_away(error: sa.exc.DBAPIError) -> bool:
    return error.connection_invalidated or error.statement is None


def _deliver(outcomes: list[Outcome]) -> None:
    for (_, _, future), result, error in outcomes:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

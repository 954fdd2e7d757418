"""Group commit: what many ask of the database at the same time is done in one transaction, on one thread.

While a transaction is under way the next batch gathers; a batch is everything that came meanwhile.  What was asked is
answered only once the transaction is committed.
"""

import asyncio
import logging
import sqlite3
import threading
import time
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


class _Group(NamedTuple):
    """Items for one kind of work, and the futures that get the results."""

    items: list[Any]
    futures: "list[asyncio.Future[Any]]"


_Groups = dict[Work[Any, Any], _Group]


class _Outcome(NamedTuple):
    """Futures and their results, or their exceptions if the work failed."""

    futures: "list[asyncio.Future[Any]]"
    results: Sequence[Any]
    failed: bool


class Batches:
    """A thread with a connection, for the event loop in which this is made.

    `order` are the kinds of work, in the order in which they are done within a transaction.
    """

    def __init__(self, name: str, engine: Engine, order: Sequence[Work[Any, Any]]) -> None:
        self._engine = engine
        self._order = {work: position for position, work in enumerate(order)}
        self._file = file_identity(engine.url)
        self._loop = asyncio.get_running_loop()
        self._groups: _Groups = {}
        """Work for the next transaction."""
        self._changed = threading.Condition()
        self._closed = False
        self._log_at = 0.0
        self._failed_at: float | None = None
        self._done = self._transactions = 0
        self._connection: Connection | None = None
        """Used by the thread only; kept open between transactions."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Work[Item, Result], item: Item) -> "asyncio.Future[Result]":
        """Have `work` done for `item`, in the next transaction.  The future raises `StoreError` if that fails."""
        future: asyncio.Future[Result] = self._loop.create_future()
        with self._changed:
            if self._closed:
                future.set_exception(StoreError("Titanic is ending"))
                return future
            group = self._groups.get(work)
            if group is None:
                if not self._groups:  # after this turn of the event loop, so that all its work is one transaction
                    self._loop.call_soon(self._wake)
                group = self._groups[work] = _Group([], [])
            group.items.append(item)
            group.futures.append(future)
        return future

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

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
                self._changed.wait_for(lambda: self._groups or self._closed)
                groups, self._groups = self._groups, {}
            if not groups:
                self._disconnect()
                log.info("%s: %d jobs in %d transactions", self._thread.name, self._done, self._transactions)
                return
            outcomes = self._perform(groups)
            self._loop.call_soon_threadsafe(_deliver, outcomes)

    def _perform(self, groups: _Groups) -> list[_Outcome]:
        try:
            try:
                return self._transact(groups)
            except sa.exc.DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                # The database was restarted since, or the connection was cut.  All work can be repeated, even if the
                # transaction was committed and only the answer was lost.
                return self._transact(groups)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            as_a_whole = isinstance(error, sa.exc.OperationalError | sa.exc.InternalError | StoreError)
            if as_a_whole and isinstance(error, sa.exc.DBAPIError):
                as_a_whole = getattr(error.orig, "sqlstate", "") not in LOCKED
            if not as_a_whole and sum(len(group.items) for group in groups.values()) > 1:
                # Whatever is wrong with one of them, the others are done.
                alone = [
                    {work: _Group([item], [future])}
                    for work in self._in_order(groups)
                    for item, future in zip(*groups[work], strict=True)
                ]
                return [outcome for each in alone for outcome in self._perform(each)]
            self._log(error)
            return [  # an exception for each: a traceback grows when it is raised
                _Outcome(futures, [_store_error(error) for _ in futures], failed=True) for _, futures in groups.values()
            ]

    def _in_order(self, groups: _Groups) -> list[Work[Any, Any]]:
        return sorted(groups, key=self._order.__getitem__)

    def _transact(self, groups: _Groups) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        self._transactions += 1
        self._check_file()  # before it is opened, which would make another
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            with self._connection.begin():
                for work in self._in_order(groups):
                    items, futures = groups[work]
                    self._done += len(items)
                    results = work(self._connection, items)
                    if len(results) != len(items):
                        raise ValueError(f"{work!r} gave {len(results)} results for {len(items)} items")
                    outcomes.append(_Outcome(futures, results, failed=False))
                self._check_file()
        except BaseException:
            self._disconnect()
            raise
        self._log_success()
        return outcomes

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

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
            if self._connection is not None:  # it opens the right file when it is used again
                self._connection.invalidate()
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


def _deliver(outcomes: list[_Outcome]) -> None:
    for futures, results, failed in outcomes:
        for future, result in zip(futures, results, strict=True):
            if future.done():  # nobody waits any more
                continue
            if failed:
                future.set_exception(result)
            else:
                future.set_result(result)

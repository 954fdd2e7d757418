"""Write rows as requests exactly once: tasks stage them, and the attempts that count are committed together.

Tasks may be retried or run twice, and writes repeated; in the end somebody says which attempts count.
`titanic/db/store/staging.py` has the SQL.
"""

import logging
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ....mdp.codes import Code
from ....mdp.errors import TitanicError
from ...db import schema as schemas
from ...db.store import count_waiting, staging
from ...server.counters import DEFAULT_MAX_PER_SERVICE
from .rows import RowConverter, bounded
from .transfer import check_database, connect_arrow, open_database

DEFAULT_WAIT_SECONDS: Final = 600
POLL_SECONDS: Final = 1.0
"""Pause between two looks whether there is room for the rows of a write."""
TELL_SECONDS: Final = 10.0
"""Interval at which a write that waits for room says so."""

log = logging.getLogger("zmdp.titanic")


@dataclass(frozen=True)
class ArrowWrite:
    """One write: where to, and how rows become requests.  It can be pickled, for tasks in other processes."""

    db: str
    rows: RowConverter
    write: str
    """Identifies this write."""
    max_waiting: int = DEFAULT_MAX_PER_SERVICE
    """Maximum number of requests to one service that have not ended, with those of this write."""
    wait: float = DEFAULT_WAIT_SECONDS
    """Seconds to wait for room."""

    def check(self, named: staging.Write | None = None) -> bool:
        """Return whether the write `named` was committed before, by this process or another.

        Raises `SchemaError` if the tables do not have this release's version, `TitanicError` if they cannot be read.
        """
        with self._opened() as engine:
            check_database(engine)
            with engine.begin() as connection:
                return named is not None and staging.was_committed(connection, named)

    def stage(self, batches: Iterable[pa.RecordBatch], task: int) -> staging.Accepted | None:
        """Stage all rows of an attempt of a task; None if there are none.  Raises `StagingLost`."""
        number: int | None = None
        done = 0
        with self._opened() as engine:
            try:
                with connect_arrow(self.db, write=True) as connection:
                    for batch in bounded(batches):
                        if number is None:
                            with engine.begin() as transaction:
                                number = staging.begin(transaction, self.write, time.time())
                        rows = self.rows.convert(batch, number, done, task)
                        if not connection.stage(staging.touch(number, time.time()), rows):
                            raise staging.StagingLost("the write has ended without this attempt, which was too late")
                        done += rows.num_rows
            except BaseException:
                if number is not None:
                    with suppress(sa.exc.SQLAlchemyError), engine.begin() as transaction:  # else swept later, by age
                        staging.discard(transaction, [number])
                raise
        return None if number is None else staging.Accepted(number, done)

    def commit(self, named: staging.Write | None, staged: Sequence[staging.Accepted]) -> None:
        """Accept the rows of these attempts, unless the write `named` was committed before, and delete all others.

        Waits until there is room for them, so that one write does not take all the room that a Titanic has.

        Raises `TitanicError` if nothing was written.
        """
        with self._opened() as engine:
            try:
                self._wait_for_room(engine, named, staged)
                with engine.begin() as connection:
                    committed = staging.commit(connection, named, staged, time.time())
                    self._discard(connection, () if committed else staged)
            except sa.exc.DBAPIError as error:
                detail = " ".join(str(error.orig).split())
                raise TitanicError(
                    f"{schemas.shown(engine.url)} could not commit the write: {detail}. Nothing was written, unless "
                    "the connection was lost during the commit",
                    code=500,
                ) from None
            _sweep(engine, sum(each.rows for each in staged))

    def _wait_for_room(self, engine: Engine, named: staging.Write | None, staged: Sequence[staging.Accepted]) -> None:
        """Wait until each service has room for its rows.  Raises `TitanicError` if it never has, or not in time."""
        with engine.begin() as connection:
            if named is not None and staging.was_committed(connection, named):
                return
            rows = staging.count_by_service(connection, staged)
        now = time.monotonic()
        until, tell_at = now + self.wait, now
        while True:
            with engine.begin() as connection:
                waiting = count_waiting(connection)
            full = next((each for each in rows if waiting.get(each, 0) + rows[each] > self.max_waiting), None)
            if full is None:
                return
            limit = f"max_waiting is {self.max_waiting}, {waiting.get(full, 0)} requests to {full} have not ended"
            if rows[full] > self.max_waiting or now >= until:
                raise TitanicError(
                    f"no room for the {rows[full]} rows of this write: {limit}. Nothing was written. Write fewer at a "
                    "time, or set the options max_waiting (with `titanic serve --max-waiting-per-service`) or wait",
                    code=Code.QUEUE_FULL,
                )
            if now >= tell_at:
                tell_at = now + TELL_SECONDS
                log.warning("the write of %d rows waits for room: %s", rows[full], limit)
            time.sleep(POLL_SECONDS)
            now = time.monotonic()

    def abort(self, staged: Sequence[staging.Accepted]) -> None:
        """Delete everything that was staged."""
        with self._opened() as engine:
            with engine.begin() as connection:
                self._discard(connection, staged)
            _sweep(engine, sum(each.rows for each in staged))

    def _discard(self, connection: Connection, staged: Sequence[staging.Accepted]) -> None:
        """Discard these attempts, and whatever else of this write is left."""
        staging.discard(connection, [each.staging for each in staged])
        staging.discard_write(connection, self.write)

    @contextmanager
    def _opened(self) -> Generator[Engine]:
        engine = open_database(self.db, write=True)
        try:
            yield engine
        finally:
            engine.dispose()


def _sweep(engine: Engine, ours: int) -> None:
    """Delete `ours` staged rows and some of dead writers.  If that fails, the next write tries again."""
    if engine.dialect.name == "postgresql":
        with suppress(sa.exc.DBAPIError), engine.begin() as connection:  # others are writing, or may not truncate
            staging.clear(connection)
    left = ours + staging.OF_OTHERS
    with suppress(sa.exc.SQLAlchemyError):
        while left > 0:
            with engine.begin() as connection:
                swept = staging.sweep(connection, time.time())
            if swept is None:
                return
            left -= swept

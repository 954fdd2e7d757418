"""Write rows as requests exactly once: tasks stage them, and the attempts that count are committed together.

Tasks may be retried or run twice, and writes repeated; in the end somebody says which attempts count.
`titanic/store/staging.py` has the SQL.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...mdp.errors import TitanicError
from .. import schema as schemas
from ..store import staging
from .connection import check_database, connect_arrow, open_database
from .rows import RowConverter, bounded


@dataclass(frozen=True)
class ArrowWrite:
    """One write: where to, and how rows become requests.  It can be pickled, for tasks in other processes."""

    db: str
    rows: RowConverter
    write: str
    """Identifies this write."""

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

        Raises `TitanicError` if nothing was written.
        """
        with self._opened() as engine:
            try:
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
    def _opened(self) -> Iterator[Engine]:
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

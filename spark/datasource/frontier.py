"""Up to which number every request is there that will ever be: how far a stream may read without skipping one.

Requests have two numbers, `id` (as they are accepted) and `ended` (as they end).  On SQLite one transaction writes at
a time, so their numbers are committed in order, and the latest one is the frontier.  On PostgreSQL whoever was given 7
may commit before whoever was given 6.  But an INSERT or UPDATE locks the table (ROW EXCLUSIVE, which hinders nobody)
before it takes a number, and holds that lock until its transaction has ended.  So: read the latest number, then who
holds such a lock; once all of those have ended, nothing up to that number is missing any more.  Those who come later
get higher numbers, so the wait has an end.
"""

import time
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...mdp.errors import TitanicError

NUMBERS: Final = {"accepted": "id", "ended": "ended"}
"""By which number requests are read, for each kind of events."""
PAUSE: Final = 0.005
"""Seconds between two looks at who has ended."""
_LATEST: Final = {
    ("sqlite", "id"): "SELECT seq FROM sqlite_sequence WHERE name = 'titanic_requests'",
    ("sqlite", "ended"): "SELECT value FROM titanic_counters WHERE name = 'ended'",
    ("postgresql", "id"): "SELECT last_value FROM titanic_requests_id_seq WHERE is_called",
    ("postgresql", "ended"): "SELECT last_value FROM titanic_ended WHERE is_called",
}
# A transaction prepared for two-phase commit goes on under another name, which begins with -1.
_WRITING: Final = (
    "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND relation = 'titanic_requests'::regclass AND mode = 'RowExclusiveLock'"
)
_PREPARED: Final = "-1/"


class Frontier:
    """How far the requests at `engine` may be read, in the order of `number`: `id` or `ended`."""

    def __init__(self, engine: Engine, number: str) -> None:
        self._engine = engine
        self._latest = sa.text(_LATEST[engine.dialect.name, number])
        # On PostgreSQL each statement by itself: nothing is kept open, and each sees what was committed before it.
        self._isolation = "AUTOCOMMIT" if engine.dialect.name == "postgresql" else "SERIALIZABLE"
        self._ahead = 0
        self._writing: set[str] = set()
        """Who could still add to what is up to `_ahead`."""
        self.safe = 0
        """The last number known to be safe."""
        self.known = False
        """Whether `safe` was found out yet, or is only where it begins."""

    def advance(self, patience: float) -> int:
        """How far it is safe to read; waits up to `patience` (seconds) for transactions that are under way."""
        with self._engine.connect().execution_options(isolation_level=self._isolation) as connection:
            if connection.dialect.name == "sqlite":
                self.safe, self.known = self._number(connection), True
                return self.safe
            until = time.monotonic() + patience
            wanted = self._number(connection)
            while not self._look(connection) >= wanted and time.monotonic() < until:
                time.sleep(PAUSE)
            return self.safe

    def _look(self, connection: Connection) -> int:
        if self._writing:
            self._writing = {
                each for each in self._who(connection) if each in self._writing or each.startswith(_PREPARED)
            }
        if not self._writing:
            self.safe, self.known = self._ahead, self.known or self._ahead > 0
            self._ahead = self._number(connection)  # first this, and then who is writing
            self._writing = self._who(connection) if self._ahead > self.safe else set()
            if not self._writing:
                self.safe, self.known = self._ahead, True
        return self.safe

    def _number(self, connection: Connection) -> int:
        return int(connection.scalar(self._latest) or 0)

    def _who(self, connection: Connection) -> set[str]:
        return set(connection.scalars(sa.text(_WRITING)))

    def check(self) -> None:
        """Raises `TitanicError` if nobody's locks can be seen there."""
        if self._engine.dialect.name == "postgresql":
            with self._engine.connect() as connection:
                if connection.scalar(sa.text("SELECT pg_is_in_recovery()")):
                    raise TitanicError(
                        "a stream reads from PostgreSQL's primary: on a standby it cannot be seen who is writing",
                        code=500,
                    )

"""Find the offset up to which a stream can read without skipping a request that commits late.

Requests have two numbers: `id`, assigned when they are accepted, and `ended`, assigned when they end.  On SQLite one
transaction writes at a time, so numbers are committed in order and the latest number is safe.  On PostgreSQL, the
transaction that was assigned 7 may commit before the one that was assigned 6.  But an INSERT or UPDATE locks the table
(ROW EXCLUSIVE, which blocks neither readers nor writers) before it is assigned a number, and holds the lock until its
transaction ends.  So `SafeOffset` reads the latest number, then the transactions that hold such a lock; once all of
these have ended, no further numbers up to that one can appear.  Later transactions get higher numbers, so the wait is
bounded by the transactions that were open at its start.
"""

import time
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...mdp.errors import TitanicError

NUMBERS: Final = {"accepted": "id", "ended": "ended"}
"""The number by which each kind of event is ordered."""
POLL_SECONDS: Final = 0.005
"""Interval at which open transactions are checked."""
SETTLE_SECONDS: Final = 10.0
"""How long to keep a connection while waiting for the first safe offset."""
_LATEST: Final = {
    ("sqlite", "id"): "SELECT seq FROM sqlite_sequence WHERE name = 'titanic_requests'",
    ("sqlite", "ended"): "SELECT value FROM titanic_counters WHERE name = 'ended'",
    ("postgresql", "id"): "SELECT last_value FROM titanic_requests_id_seq WHERE is_called",
    ("postgresql", "ended"): "SELECT last_value FROM titanic_ended WHERE is_called",
}
# A transaction prepared for two-phase commit continues under another name, which starts with -1.
_WRITERS: Final = (
    "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND relation = 'titanic_requests'::regclass AND mode = 'RowExclusiveLock'"
)
_PREPARED: Final = "-1/"


class SafeOffset:
    """The offset up to which requests can be read in the order of `number`, `id` or `ended`."""

    def __init__(self, engine: Engine, number: str) -> None:
        self._engine = engine
        self._latest = sa.text(_LATEST[engine.dialect.name, number])
        self._ahead = 0
        self._writing: set[str] = set()
        """Transactions that may still commit numbers up to `_ahead`."""
        self.safe = 0
        """The last number known to be safe."""
        self.known = False
        """Whether `safe` has been determined, rather than being the initial 0."""

    def advance(self, wait: float) -> int:
        """Return the safe offset, after waiting up to `wait` seconds for open transactions."""
        with self._engine.connect() as connection:  # on PostgreSQL, each statement sees what was committed before it
            if connection.dialect.name == "sqlite":
                self.safe, self.known = self._number(connection), True
                return self.safe
            until = time.monotonic() + wait
            wanted = self._number(connection)
            while self._poll(connection) < wanted and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            return self.safe

    def settle(self) -> int:
        """Return the safe offset; waits until the transactions that were open at the first call have ended."""
        while not self.known:
            self.advance(SETTLE_SECONDS)
        return self.safe

    def _poll(self, connection: Connection) -> int:
        if self._writing:
            self._writing = {
                each for each in self._writers(connection) if each in self._writing or each.startswith(_PREPARED)
            }
        if not self._writing:
            self.safe, self.known = self._ahead, self.known or self._ahead > 0
            self._ahead = self._number(connection)  # must be read before the writers
            self._writing = self._writers(connection) if self._ahead > self.safe else set()
            if not self._writing:
                self.safe, self.known = self._ahead, True
        return self.safe

    def _number(self, connection: Connection) -> int:
        return int(connection.scalar(self._latest) or 0)

    def _writers(self, connection: Connection) -> set[str]:
        return set(connection.scalars(sa.text(_WRITERS)))

    def check(self) -> None:
        """Raise `TitanicError` if the server does not show the locks of writers."""
        if self._engine.dialect.name == "postgresql":
            with self._engine.connect() as connection:
                if connection.scalar(sa.text("SELECT pg_is_in_recovery()")):
                    raise TitanicError(
                        "connect the stream to PostgreSQL's primary: a standby does not show open transactions",
                        code=500,
                    )

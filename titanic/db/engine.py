"""The database as a running Titanic uses it: prepared at the start, then through threads that commit in groups."""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, Engine

from ...mdp.codes import Code
from ...mdp.errors import TitanicError
from . import schema, store
from .group_commit import BatchExecutor, CommitMetrics

KEY_LOCK_SECONDS: Final = 1.0
"""How long a request with a key waits for another transaction with the same key."""
ACCEPTS: Final = (store.accept, store.fire)
WRITES: Final = (
    *ACCEPTS, store.add_partials, store.finish, store.reschedule, store.close, store.maintain, store.claim,
    store.release, store.pending_after, store.edit_schedules, store.catch_up,
    store.declare_service_schedules,
)  # fmt: skip
"""The order of statements within a transaction.  A PARTIAL must be stored before its FINAL."""
READS: Final = (
    store.fetch,
    store.fetch_reply,
    store.fetch_request,
    store.fetch_partials,
    store.progress,
    store.next_occurrence,
    store.list_schedules,
)

log = logging.getLogger("zmdp.titanic")


class Database:
    """The threads of a Titanic that use its database, and the database's clock.

    Args:
        engine: The database, from `prepare`.
        clock: Its clock.
        commits: Counts the transactions of each thread that writes, `writer` and `keys`.
    """

    def __init__(self, engine: Engine, clock: store.Clock, commits: Mapping[str, CommitMetrics]) -> None:
        self.clock = clock
        self.reader = BatchExecutor("titanic-reader", schema.open_engine(engine.url, write=False), READS)
        """Executes statements that read."""
        self.writer = BatchExecutor("titanic-writer", engine, WRITES, commits["writer"])
        """Executes statements that write."""
        self.keyed = self.writer
        """Stores requests with keys."""
        if not schema.is_sqlite(engine.url):
            # Another program may have inserted a key and not committed.  Requests without keys must not wait.
            locking = schema.open_engine(engine.url, lock_timeout=KEY_LOCK_SECONDS)
            self.keyed = BatchExecutor("titanic-keys", locking, ACCEPTS, commits["keys"])

    async def close(self) -> None:
        """Perform the work that was submitted, and end the threads."""
        async with AsyncExitStack() as closing:  # which closes all, even if one fails, and the reader last
            for each in dict.fromkeys((self.reader, self.writer, self.keyed)):
                closing.push_async_callback(each.close)


def prepare(url: URL, clock: store.Clock, lease: float) -> tuple[Engine, str]:
    """Return an engine that writes, and the database's identity, and set `clock` by the database's.

    The engine waits for locks so briefly that a `lease` of so many seconds can be renewed meanwhile, which is due after
    a third of it: a transaction with locked rows may come before as well as after.

    A SQLite file is created and migrated.  Raises `SchemaError` if PostgreSQL's tables have another version, and
    `TitanicError` if its server only reads.
    """
    engine = schema.open_engine(url, create=True, lock_timeout=min(schema.BUSY_TIMEOUT_SECONDS, lease / 4))
    try:
        if schema.is_sqlite(url):
            before, now = schema.upgrade(engine)
            if before != now:
                log.info("%s: migrated tables: %s → %s", schema.shown(url), before or "none", now)
            if network := schema.network_file_system(Path(str(url.database))):
                log.warning(
                    "%s is on a network file system (%s): SQLite keeps requests only if a single host uses the file "
                    "and the file system's locks work; use a local disk, or PostgreSQL",
                    schema.shown(url),
                    network,
                )
        with engine.connect() as connection:
            if not schema.is_sqlite(url):
                schema.check(connection, url)
                if connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "on":
                    raise TitanicError(
                        f"{schema.shown(url)} only reads: it is a standby, or default_transaction_read_only is set; "
                        "name the primary, or several hosts and target_session_attrs=read-write",
                        code=Code.FAILED,
                    )
                store.set_clock(connection, clock)
                if connection.exec_driver_sql("SHOW fsync").scalar() != "on":
                    log.warning("the PostgreSQL server runs with fsync=off: commits may not survive a power failure")
            return engine, schema.identity(connection)
    finally:
        engine.dispose()  # it reconnects when it is used

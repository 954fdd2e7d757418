"""The programs of a run and its database: how they are started, ended and disturbed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from support.processes import BIN, TIMEOUT_SECONDS

from zmdp.titanic.db import schema
from zmdp.titanic.db.store.models import NOT_ENDED, StoredRequest

HERE: Final = Path(__file__).parents[1]
NOBODY: Final = "nobody"
"""A service that nobody offers."""


class Program:
    """A command that is restarted whenever it has ended."""

    def __init__(self, role: str, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.role = role
        self.name = name
        self._command = [str(BIN / command[0]), *command[1:]]
        self._log = (folder / f"{name}.log").open("a+b")
        self._env = {**os.environ, **env}
        self.thaw_at: float | None = None
        """When it continues, if it is frozen."""
        self.must_end_by: float | None = None
        """When it must have ended, if it was sent SIGTERM."""
        self.start()

    def start(self) -> None:
        self.thaw_at = self.must_end_by = None
        self.note("started")
        self._started_at = self._log.seek(0, os.SEEK_END)
        self._popen = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=HERE, env=self._env
        )

    def note(self, what: str) -> None:
        """Write a line of the harness to its log."""
        self._log.write(f"───── {datetime.now():%H:%M:%S.%f} {what}\n".encode())
        self._log.flush()

    def has_said(self, text: str) -> bool:
        """Return whether its log since the last start contains the text."""
        self._log.seek(self._started_at)
        return text.encode() in self._log.read()

    def signal(self, number: signal.Signals) -> None:
        self.note(number.name)
        self._popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._popen.wait()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ended(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._popen.poll()

    def is_undisturbed(self) -> bool:
        return self.thaw_at is None and self.must_end_by is None and self.ended() is None

    def close(self) -> int:
        """End it for good; return the exit code."""
        if self.ended() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            return self._popen.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL
        finally:
            self._log.close()


class Database:
    """A SQLite file, or a PostgreSQL cluster from tests/support/postgres.py."""

    def __init__(self, url: str, cluster: Any = None) -> None:
        self.url = url
        self.cluster = cluster
        self.disturbed_at = float("-inf")
        parsed = schema.database_url(url)
        self.engine = sa.create_engine(parsed, poolclass=sa.NullPool)

    def cut(self) -> None:
        """Terminate all connections except the harness's own."""
        self.disturbed_at = time.monotonic()
        ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
        with self.engine.connect() as connection:
            connection.exec_driver_sql(ours + "backend_type = 'client backend'")

    def restart(self) -> None:
        """Restart the server like after a crash: `immediate` waits for no connection."""
        self.disturbed_at = time.monotonic()
        self.cluster.restart("immediate")
        self.disturbed_at = time.monotonic()

    def rows(self, *columns: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(*columns)).all())

    def all_ended(self) -> bool:
        """Return whether no request to a service waits or runs; False if the database does not answer."""
        waiting = sa.exists().where(StoredRequest.state.in_(NOT_ENDED), StoredRequest.service != NOBODY)
        try:
            with self.engine.connect() as connection:
                return not connection.scalar(sa.select(waiting))
        except sa.exc.DBAPIError:
            return False


@contextmanager
def database(kind: str, folder: Path) -> Iterator[Database]:
    """Yield the database for one run; on PostgreSQL with its tables."""
    if kind == "sqlite":
        yield Database(f"sqlite:///{folder / 'titanic.db'}")
        return
    from support.postgres import cluster

    with cluster(fsync=True) as postgres:
        found = Database(postgres.url(), postgres)
        subprocess.run([BIN / "titanic", "db", "upgrade", "--db", found.url], check=True, stdout=sys.stderr)
        yield found

"""The history of a batch: a record of each job, in a SQLite file that survives the driver."""

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from ...mdp.errors import SettingError
from ...workers import Request

MAX_RECORDS: Final = 10_000
MAX_TEXT: Final = 10_000
"""Characters kept of a query and of an error."""
MAX_TRACEBACK: Final = 100_000
"""Characters kept of a traceback: the last ones, which have the exception."""
MAX_LISTED: Final = 100
_PRUNE_EVERY: Final = 500
"""After so many new records, the oldest are deleted."""

_METADATA = sa.MetaData()
_JOBS = sa.Table(
    "jobs",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("job", sa.Text, nullable=False, unique=True),
    sa.Column("driver", sa.Text, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("user", sa.Text, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False, index=True),
    sa.Column("service", sa.Text, nullable=False),
    sa.Column("what", sa.Text, nullable=False),
    sa.Column("started", sa.Float, nullable=False, index=True),
    sa.Column("ended", sa.Float),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("format", sa.Text),
    sa.Column("rows", sa.Integer),
    sa.Column("path", sa.Text),
    sa.Column("code", sa.Integer),
    sa.Column("error", sa.Text),
    sa.Column("traceback", sa.Text),
    sa.Column("ui", sa.Text),
)
_PUBLIC: Final = ("job", "driver", "user", "service", "started", "ended", "state")
"""What everybody may see of a job."""
_PRIVATE: Final = ("what", "format", "rows", "path", "code", "error", "ui")
LOST: Final = "the driver ended during the job: it was killed, perhaps for its memory, or its machine was lost"

log = logging.getLogger("zmdp.spark")


class History:
    """Records of jobs in the SQLite file `path`, which several drivers on a machine may share.  Safe from any thread.

    Raises `SettingError` if the file cannot be opened.  Later failures are logged: they must not fail jobs.
    """

    def __init__(self, path: Path | None, driver: str) -> None:
        self._driver = driver
        self._host = socket.gethostname()
        self._added = 0
        self._lock = threading.Lock()
        url = sa.URL.create("sqlite", database=":memory:" if path is None else str(path))
        options = {"check_same_thread": False, "timeout": 10}
        self._engine = sa.create_engine(url, connect_args=options, poolclass=sa.StaticPool)  # used under the lock
        sa.event.listen(self._engine, "connect", _configure)
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            _METADATA.create_all(self._engine)
            with self._engine.begin() as connection:
                self._mark_lost(connection)
        except (OSError, sa.exc.DBAPIError) as error:
            self._engine.dispose()
            raise SettingError(f"--history {path}: {getattr(error, 'orig', error)}") from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._engine.dispose()

    def _mark_lost(self, connection: sa.Connection) -> None:
        """Mark as lost the jobs of drivers that have ended: this one before its restart, and others on this host."""
        running = connection.execute(sa.select(_JOBS).where(_JOBS.c.state == "running", _JOBS.c.host == self._host))
        lost = [row.number for row in running if row.driver == self._driver or not _alive(row.pid)]
        ended = {"state": "lost", "code": 502, "error": LOST}  # when is not known
        connection.execute(sa.update(_JOBS).where(_JOBS.c.number.in_(lost)).values(ended))

    def begin(self, job: str, *, user: str, service: str, what: str, request_id: str = "") -> None:
        """Record that a job starts."""
        values = {
            "job": job, "driver": self._driver, "host": self._host, "pid": os.getpid(), "user": user,
            "request_id": request_id, "service": service, "what": what[:MAX_TEXT], "started": time.time(),
            "state": "running",
        }  # fmt: skip
        self._write(sa.insert(_JOBS).values(values))
        self._added += 1
        if self._added % _PRUNE_EVERY == 0:
            self.prune(None)

    def losses(self, request_id: str, user: str, what: str) -> tuple[int, str]:
        """Return how often Spark was lost during a request, which Titanic repeats under the same id; and the error."""
        if not request_id:
            return 0, ""
        same = (_JOBS.c.request_id == request_id, _JOBS.c.user == user, _JOBS.c.what == what[:MAX_TEXT])
        query = sa.select(_JOBS.c.error).where(*same, _JOBS.c.state == "lost").order_by(_JOBS.c.number.desc())
        found = self._read(query)
        return len(found), str(found[0]["error"]) if found else ""

    def end(self, job: str, state: str, **found: Any) -> None:
        """Record the end of a job: `done`, `failed` or `cancelled`, with its result or its error."""
        for name, kept in (("error", slice(MAX_TEXT)), ("traceback", slice(-MAX_TRACEBACK, None))):
            if found.get(name) is not None:  # surrogates, which SQLite does not take, are those of files' names
                found[name] = found[name][kept].encode(errors="replace").decode()
        self._write(sa.update(_JOBS).where(_JOBS.c.job == job).values(state=state, ended=time.time(), **found))

    def prune(self, older_than: float | None) -> None:
        """Delete records older than `older_than` seconds, and the oldest beyond `MAX_RECORDS`."""
        newest = sa.select(_JOBS.c.number).order_by(_JOBS.c.number.desc()).offset(MAX_RECORDS).limit(1)
        old = _JOBS.c.number <= sa.func.coalesce(newest.scalar_subquery(), -1)
        if older_than is not None:
            old |= _JOBS.c.started < time.time() - older_than
        self._write(sa.delete(_JOBS).where(old, _JOBS.c.state != "running"))

    def _write(self, change: sa.Executable) -> None:
        try:
            with self._lock, self._engine.begin() as connection:
                connection.execute(change)
        except sa.exc.DBAPIError as error:
            log.error("the history of jobs cannot be written: %s", error.orig)

    def rows(self, caller: Request | None, job: str | None = None) -> list[dict[str, Any]]:
        """Return the latest `MAX_LISTED` jobs as `caller` may see them, or only `job`, with its traceback.

        None is who can read the file itself, and sees everything.
        """
        query = sa.select(_JOBS).order_by(_JOBS.c.number.desc()).limit(MAX_LISTED)
        private = _PRIVATE if job is None else (*_PRIVATE, "traceback")
        if job is not None:
            query = query.where(_JOBS.c.job == job)
        found = []
        for row in self._read(query):
            allowed = caller is None or caller.may_manage(row["user"])
            found.append({name: row[name] if allowed or name in _PUBLIC else None for name in _PUBLIC + private})
        return found

    def _read(self, query: sa.Select[Any]) -> list[Mapping[str, Any]]:
        with self._lock, self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def _configure(connection: Any, record: object) -> None:
    del record
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a record more or less after a power failure does not matter


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier process with the same number, as in a container: this one has only just started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True

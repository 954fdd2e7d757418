"""The history of a batch: a record of each job, in a SQLite file that survives the driver."""

import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

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

_SCHEMA: Final = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;  -- a record more or less after a power failure does not matter
CREATE TABLE IF NOT EXISTS jobs (
    number integer PRIMARY KEY, job text NOT NULL UNIQUE, driver text NOT NULL, host text NOT NULL,
    pid integer NOT NULL, user text NOT NULL, request_id text NOT NULL, service text NOT NULL, what text NOT NULL,
    started real NOT NULL, ended real, state text NOT NULL,
    format text, rows integer, path text, code integer, error text, traceback text, ui text
);
CREATE INDEX IF NOT EXISTS ix_jobs_request_id ON jobs (request_id);
CREATE INDEX IF NOT EXISTS ix_jobs_started ON jobs (started);
"""
_PUBLIC: Final = ("job", "driver", "user", "service", "started", "ended", "state")
"""The columns that everybody may see."""
_PRIVATE: Final = ("what", "format", "rows", "path", "code", "error", "ui")
LOST: Final = "the driver ended during the job: it was killed, perhaps for its memory, or its machine was lost"

log = logging.getLogger("zmdp.spark")


class History:
    """Records of jobs in the SQLite file `path`, which several drivers on a machine may share.  Safe from any thread.

    Raises `SettingError` if the file cannot be opened.  Later failures are logged: they must not fail jobs.
    """

    def __init__(self, path: Path, driver: str) -> None:
        self._driver = driver
        self._host = socket.gethostname()
        self._added = 0
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = sqlite3.connect(path, timeout=10, check_same_thread=False)
            with ExitStack() as stack:
                self._file = stack.enter_context(closing(file))
                self._file.row_factory = sqlite3.Row
                self._file.executescript(_SCHEMA)
                self._mark_lost()
                stack.pop_all()  # it stays open
        except (OSError, sqlite3.Error) as error:
            raise SettingError(f"--history {path}: {error}") from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _mark_lost(self) -> None:
        """Mark as lost the jobs of drivers that have ended: this one before its restart, and others on this host."""
        running = self._read("SELECT * FROM jobs WHERE state = 'running' AND host = ?", self._host)
        lost = [(LOST, row["number"]) for row in running if row["driver"] == self._driver or not _alive(row["pid"])]
        with self._file:  # when they ended is not known
            self._file.executemany("UPDATE jobs SET state = 'lost', code = 502, error = ? WHERE number = ?", lost)

    def begin(self, job: str, *, user: str, service: str, what: str, request_id: str = "") -> None:
        """Record that a job starts."""
        values = {
            "job": job, "driver": self._driver, "host": self._host, "pid": os.getpid(), "user": user,
            "request_id": request_id, "service": service, "what": what[:MAX_TEXT], "started": time.time(),
            "state": "running",
        }  # fmt: skip
        names = ", ".join(values)
        self._write(f"INSERT INTO jobs ({names}) VALUES (:{names.replace(', ', ', :')})", values)  # noqa: S608 - our own
        self._added += 1
        if self._added % _PRUNE_EVERY == 0:
            self.prune(None)

    def losses(self, request_id: str, user: str, what: str) -> tuple[int, str]:
        """Return how often Spark was lost during a request, which Titanic repeats under the same id; and the error."""
        if not request_id:
            return 0, ""
        same = "request_id = ? AND user = ? AND what = ? AND state = 'lost'"
        query = f"SELECT error FROM jobs WHERE {same} ORDER BY number DESC"  # noqa: S608 - our own text
        found = self._read(query, request_id, user, what[:MAX_TEXT])
        return len(found), str(found[0]["error"]) if found else ""

    def end(self, job: str, state: str, **found: Any) -> None:
        """Record the end of a job: `done`, `failed` or `cancelled`, with its result or its error."""
        for name, kept in (("error", slice(MAX_TEXT)), ("traceback", slice(-MAX_TRACEBACK, None))):
            if found.get(name) is not None:  # surrogates, which SQLite does not take, are those of files' names
                found[name] = found[name][kept].encode(errors="replace").decode()
        found |= {"state": state, "ended": time.time()}
        changes = ", ".join(f"{name} = :{name}" for name in found)
        self._write(f"UPDATE jobs SET {changes} WHERE job = :job", {**found, "job": job})  # noqa: S608 - our own names

    def prune(self, older_than: float | None) -> None:
        """Delete records older than `older_than` seconds, and the oldest beyond `MAX_RECORDS`."""
        before = float("-inf") if older_than is None else time.time() - older_than
        self._write(
            "DELETE FROM jobs WHERE state <> 'running' AND (started < :before OR number <= "
            "(SELECT number FROM jobs ORDER BY number DESC LIMIT 1 OFFSET :most))",
            {"before": before, "most": MAX_RECORDS},
        )

    def _write(self, change: str, values: Mapping[str, Any]) -> None:
        try:
            with self._lock, self._file:
                self._file.execute(change, values)
        except sqlite3.Error as error:
            log.error("the history of jobs cannot be written: %s", error)

    def rows(self, caller: Request, job: str | None = None) -> list[dict[str, Any]]:
        """Return the latest `MAX_LISTED` jobs as `caller` may see them, or only `job`, with its traceback."""
        private = _PRIVATE if job is None else (*_PRIVATE, "traceback")
        query = "SELECT * FROM jobs WHERE job = coalesce(?, job) ORDER BY number DESC LIMIT ?"
        found = [(row, caller.may_manage(row["user"])) for row in self._read(query, job, MAX_LISTED)]
        names = _PUBLIC + private
        return [{name: row[name] if allowed or name in _PUBLIC else None for name in names} for row, allowed in found]

    def _read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._file.execute(query, values).fetchall()


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

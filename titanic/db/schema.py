"""Titanic's database: its URL, how it is opened, and the version of its tables.

SQLite, the default, is a file with a write-ahead log and `synchronous=FULL`, so a commit is on disk when it returns.
PostgreSQL needs `psycopg`, which the extra `postgres` has.
"""

import os
import re
import shlex
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL, Connection, Engine, make_url

from ...mdp.errors import SettingError, TitanicError
from . import postgresql
from .store.models import VERSION_TABLE, Identity

DEFAULT_DB: Final = "sqlite:///titanic.db"
BUSY_TIMEOUT_SECONDS: Final = 5
"""How long to wait for a lock, and for a connection."""
WAL_BYTES: Final = 64 << 20
"""Size to which SQLite's write-ahead log shrinks again after a large transaction."""
_DRIVERS: Final = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_PAIRS: Final = re.compile(r"\s*\w+\s*=")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_VARIABLE: Final = re.compile(r"\$(\w+|\{\w*\}?)")
_SEVERAL_HOSTS: Final = "postgresql://USER@/NAME?host=HOST1:PORT&host=HOST2:PORT"
_ENCODED: Final = "special characters in a password are written in hex, such as %40 for @ and %2F for /"
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "lustre"}
)
_UPGRADE_LOCK: Final = 0x7A6D6470
"""Key of the PostgreSQL advisory lock that migrations take."""


class SchemaError(TitanicError):
    """The tables have a version that this release cannot work with.  The message says what to do."""


def database_url(db: str | URL) -> URL:
    """Return the URL of `db`, with its driver: `sqlite:///FILE`, `postgresql://USER@HOST/NAME`, or just a file.

    Raises:
        SettingError: It is something else.  The message shows no password.
    """
    url = (_parsed(db) if "://" in db else _file(db)) if isinstance(db, str) else db
    backend = url.drivername.partition("+")[0]
    if backend not in _DRIVERS:
        raise SettingError(f"{url.drivername!r} is not supported: Titanic needs sqlite:///FILE or postgresql://…")
    if backend == "sqlite" and (
        not url.database or ":memory:" in url.database or url.query or url.host or url.username
    ):
        raise SettingError(
            "Titanic needs a SQLite file, without query parameters: sqlite:///FILE, or sqlite:////FOLDER/FILE"
        )
    return url.set(drivername=_DRIVERS[backend])


def _parsed(db: str) -> URL:
    hosts, _, rest = db.partition("://")[2].partition("?")[0].partition("/")
    try:
        url = make_url(db)
    except (sa.exc.ArgumentError, ValueError):  # whose message would show a password
        hint = f"several hosts are given as {_SEVERAL_HOSTS}" if "," in hosts else _ENCODED
        raise SettingError(
            f"not a database URL: Titanic needs sqlite:///FILE or postgresql://USER@HOST/NAME; {hint}"
        ) from None
    if "@" in (url.host or "") or (url.host and "@" in rest):  # what is shown would be part of a password
        raise SettingError(f"the database URL's password or user is not encoded: {_ENCODED}")
    return url


def _file(db: str) -> URL:
    """Return the URL of a file.  Raises `SettingError` if the name is rather meant to be something else."""
    if _PAIRS.match(db):
        meant = "NAME=VALUE settings, as libpq takes them"
    elif scheme := _SCHEME.match(db):
        meant = f"a URL, but has no :// after {scheme[1]}"
    elif variable := _VARIABLE.search(db):
        meant = f"the value of {variable[0]}, which nothing has put in its place"
    else:
        return URL.create("sqlite", database=db)
    raise SettingError(f"the database looks like {meant}: Titanic needs sqlite:///FILE or postgresql://USER@HOST/NAME")


def shown(url: URL) -> str:
    """Return `url` for display: without the driver, and with *** instead of the password."""
    secret = {name: "***" for name in ("password", "sslpassword") if name in url.query}
    plain = url.set(drivername=url.drivername.partition("+")[0]).update_query_dict(secret)
    return plain.render_as_string(hide_password=True)


def absolute(url: URL) -> URL:
    """Return `url` with the absolute path of a SQLite file."""
    return url.set(database=str(Path(url.database or "").absolute())) if is_sqlite(url) else url


def is_sqlite(url: URL) -> bool:
    """Return whether the database is a SQLite file."""
    return url.drivername.startswith("sqlite")


def open_engine(
    url: URL,
    *,
    write: bool = True,
    create: bool = False,
    lock_timeout: float = BUSY_TIMEOUT_SECONDS,
    busy_timeout: float = BUSY_TIMEOUT_SECONDS,
) -> Engine:
    """Return an engine for the database at `url`.

    Args:
        url: A URL from `database_url`.
        write: If false, connections can only read, and a SQLite file may be read-only.
        create: If false, a SQLite file must exist.
        lock_timeout: Seconds that PostgreSQL waits for another transaction's lock.
        busy_timeout: Seconds that SQLite waits for another program's lock.

    Raises:
        SettingError: The driver is not installed, the hosts and ports are invalid, or there is no such file.
    """
    if is_sqlite(url):
        path = Path(str(url.database))
        if not create and not path.exists():
            raise SettingError(f"there is no database {path}: `titanic serve` creates it; see --db")
        if path.is_dir():
            raise SettingError(f"{path} is a folder: the database must be a file")
        if path.exists() and not path.is_file():
            raise SettingError(f"{path} is a device, a pipe or a socket: the database must be a file")
        folder = path.resolve().parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise SettingError(f"{path}: there is no folder {folder}")
        return _sqlite(url, write=write, busy_timeout=busy_timeout)
    try:
        return postgresql.open_engine(url, lock_timeout=lock_timeout)
    except sa.exc.ArgumentError as error:
        raise SettingError(f"{shown(url)}: {error}") from None


def _sqlite(url: URL, *, write: bool, busy_timeout: float) -> Engine:
    engine = sa.create_engine(url, connect_args={"timeout": busy_timeout})

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        del record
        connection.isolation_level = None  # `begin` below begins transactions, not Python's sqlite3
        connection.execute("PRAGMA foreign_keys=ON")
        if write:
            use_wal(connection)
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        else:
            connection.execute("PRAGMA query_only=ON")

    @sa.event.listens_for(engine, "do_connect")
    def open_file(dialect: Any, record: Any, arguments: Any, parameters: Any) -> Any:
        del dialect, record
        return None if write else _connect_for_reading(*arguments, **parameters)

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A deferred transaction that reads first and then writes fails if another program has written in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _connect_for_reading(path: str, **parameters: Any) -> Any:
    """Connect to the file, which may be read-only.

    SQLite reads a file with a write-ahead log only if it can create two files beside it, or is told that nobody writes
    to the file (`immutable`).  That is certain if there is no log, because one exists while Titanic has the file open.
    """
    connection = sqlite3.connect(path, **parameters)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode & 0xFF not in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}:
            raise
        if not os.access(path, os.R_OK, effective_ids=True) or os.path.exists(f"{path}-wal"):
            raise
        return sqlite3.connect(f"{Path(path).absolute().as_uri()}?immutable=1", uri=True, **parameters)
    except BaseException:
        connection.close()
        raise
    return connection


def explain(error: sa.exc.DBAPIError, url: URL) -> str:
    """Return the cause of an error of the database, in one line."""
    reason = " ".join(str(error.orig).split())
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    path = str(url.database)
    if code in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY} and is_sqlite(url):
        folder = Path(path).absolute().parent
        if not os.path.exists(path):
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                reason = "the file system is read-only"
            elif not os.access(folder, os.W_OK, effective_ids=True):
                reason = "no permission to write there"
            return f"the file cannot be created in the folder {folder}: {reason}"
        if not os.access(path, os.R_OK, effective_ids=True):
            return "permission denied: the file cannot be read"
        if code == sqlite3.SQLITE_CANTOPEN and os.path.exists(f"{path}-wal"):
            return f"permission denied: SQLite cannot open the write-ahead log {path}-wal ({reason})"
        if not os.access(path, os.W_OK, effective_ids=True):
            return f"the file is read-only ({reason})"
        if not os.access(folder, os.W_OK, effective_ids=True):
            return f"the file's folder is read-only, and SQLite must create files in it ({reason})"
    return reason


def use_wal(connection: Any) -> None:
    """Switch to WAL, which the file remembers.  SQLite does not wait while another program does the same, so this
    function does.  Raises `SettingError` if the file system cannot do it."""
    until = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            if mode != "wal":
                raise SettingError(
                    "SQLite cannot keep a write-ahead log on the database's file system: put the file on a local disk, "
                    "or use PostgreSQL"
                )
            return


def network_file_system(path: Path) -> str | None:
    """Return the type of the file system of `path` if other hosts may have it too, such as `nfs`."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for mount in mounts:
            where, _, what = mount.partition(" - ")
            if where.split()[2] == number:
                kind = what.split()[0]
                return kind if kind in NETWORK_FILE_SYSTEMS else None
    return None


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def config(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration for the migrations in this package."""
    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations").replace("%", "%%"))
    if connection is not None:
        found.attributes["connection"] = connection
    return found


def head() -> str:
    """Return the version of the tables that this release works with."""
    return str(ScriptDirectory.from_config(config()).get_current_head())


def current(connection: Connection) -> str | None:
    """Return the version of the database's tables, or None if there are none."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def check(connection: Connection, url: URL) -> None:
    """Raise `SchemaError` if this release does not work with the tables."""
    version = current(connection)
    if version == head():
        return
    if version is not None and version not in _known():
        raise SchemaError(
            f"{shown(url)} has tables of version {version}, from a newer zmdp (this one knows up to {head()}): "
            "upgrade zmdp",
            code=500,
        )
    state = "has no tables yet" if version is None else f"has tables of version {version}; this zmdp needs {head()}"
    raise SchemaError(f"{shown(url)} {state}: run `titanic db upgrade --db {shlex.quote(shown(url))}`", code=500)


def identity(connection: Connection) -> str:
    """Return the identity that the database got with its tables."""
    return connection.execute(sa.select(Identity.id)).scalar_one()


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Migrate the tables to this release's version, and return the versions before and after.

    Raises:
        SchemaError: The tables were migrated by a newer release.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
        before = current(connection)
        if before is not None and before not in _known():
            check(connection, engine.url)
        command.upgrade(config(connection), "head")
    return before, head()


def _known() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}


def file_identity(url: URL) -> tuple[int, int] | None:
    """Return the identity of a SQLite file, to detect its replacement; None if it is gone, or not a file."""
    if is_sqlite(url):
        with suppress(OSError):
            found = os.stat(str(url.database))
            return found.st_dev, found.st_ino
    return None

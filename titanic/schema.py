"""The database: where it is, how it is opened, and whether its tables are the ones that this version knows.

SQLite, the default, is a file beside the process: WAL, `synchronous=FULL`, so that what is committed is on the disk.
PostgreSQL is reached through `psycopg` (`pip install zmdp[postgres]`).
"""

import os
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

from ..mdp.errors import SettingError, TitanicError
from .store.models import VERSION_TABLE

DEFAULT_DB: Final = "sqlite:///titanic.db"
BUSY: Final = 5
"""Seconds to wait for somebody else's lock, and for a connection."""
FROZEN: Final = 3
"""Seconds after which PostgreSQL ends a transaction in which nothing happens: sooner than others give up its locks."""
_DRIVERS: Final = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_UPGRADE_LOCK: Final = 0x7A6D6470
"""Of PostgreSQL's advisory locks, the one that those who migrate take."""


class SchemaError(TitanicError):
    """The database's tables are not the ones that this version works with; says what to do."""


def database_url(db: str | URL) -> URL:
    """`db` with the driver to use: `sqlite:///FILE`, `postgresql://USER@HOST/NAME`, or a file's path.

    Raises `SettingError` for anything else.
    """
    try:
        url = db if isinstance(db, URL) else make_url(db) if "://" in db else URL.create("sqlite", database=db)
    except (sa.exc.ArgumentError, ValueError):  # its text would show a password
        raise SettingError(
            "--db is no database URL: Titanic takes sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    backend = url.drivername.partition("+")[0]
    if backend not in _DRIVERS:
        raise SettingError(f"{url.drivername!r} is not supported: Titanic takes sqlite:///FILE or postgresql://…")
    if backend == "sqlite" and (not url.database or ":memory:" in url.database or url.query):
        raise SettingError("Titanic's SQLite is a file, without further settings: sqlite:///FILE")
    return url.set(drivername=_DRIVERS[backend])


def shown(url: URL) -> str:
    """`url` as people write it, without the password."""
    secret = {name: "***" for name in ("password", "sslpassword") if name in url.query}
    plain = url.set(drivername=url.drivername.partition("+")[0]).update_query_dict(secret)
    return plain.render_as_string(hide_password=True)


def is_sqlite(url: URL) -> bool:
    """Whether it is a file."""
    return url.drivername.startswith("sqlite")


def open_engine(
    url: URL, *, write: bool = True, create: bool = False, lock_timeout: float = BUSY, busy_timeout: float = BUSY
) -> Engine:
    """An engine for the database at `url`.  Unless `create`, a SQLite file must exist.

    `lock_timeout` (seconds) is how long PostgreSQL waits for somebody else's lock, `busy_timeout` how long SQLite does.

    Raises `SettingError` if its driver is not installed or the file is not there.
    """
    if is_sqlite(url):
        path = Path(str(url.database))
        if not create and not path.exists():
            raise SettingError(f"there is no database {path}: `titanic serve` makes it; see --db")
        if path.is_dir():
            raise SettingError(f"{path} is a folder: --db takes a file")
        if not path.parent.is_dir():
            raise SettingError(f"{path}: there is no folder {path.parent}")
        return _sqlite(url, write=write, busy_timeout=busy_timeout)
    # What is answered with 200 is on the disk, whatever the server's default.  Nobody's lock holds us up for ever, nor
    # do our own others, if this host vanishes in the middle of a transaction.
    ours = (
        f"-c synchronous_commit=on -c lock_timeout={lock_timeout * 1000:.0f} "
        f"-c idle_in_transaction_session_timeout={BUSY * 1000}"
    )
    given = url.query.get("options", "")
    settings: dict[str, Any] = {
        # The plan of a prepared statement would outlive the table sizes that it was made for.
        "prepare_threshold": None,
        "application_name": "titanic",
        "connect_timeout": BUSY,
        "tcp_user_timeout": 4 * BUSY * 1000,
        "keepalives_idle": BUSY,
        "options": f"{given if isinstance(given, str) else ' '.join(given)} {ours}".strip(),
    }
    settings = {name: value for name, value in settings.items() if name == "options" or name not in url.query}
    try:
        return sa.create_engine(url, connect_args=settings, pool_size=2, pool_recycle=3600)
    except ImportError as error:  # also where psycopg is there, but not its libpq
        raise SettingError(f"PostgreSQL needs psycopg: pip install 'zmdp[postgres]' ({error})") from None


def _sqlite(url: URL, *, write: bool, busy_timeout: float) -> Engine:
    engine = sa.create_engine(url, connect_args={"timeout": busy_timeout})

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        del record
        connection.isolation_level = None  # transactions begin where `begin` below says so, not where Python guesses
        connection.execute("PRAGMA foreign_keys=ON")
        if write:
            _use_wal(connection)
            connection.execute("PRAGMA synchronous=FULL")
        else:
            connection.execute("PRAGMA query_only=ON")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later could not wait for another writer.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _use_wal(connection: Any) -> None:
    """Go over to WAL, which the file then remembers.  SQLite does not wait for others who do the same: we do."""
    until = time.monotonic() + BUSY
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, for the migrations that are installed with this package."""
    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parent.with_name("migrations")).replace("%", "%%"))
    if connection is not None:
        found.attributes["connection"] = connection
    return found


def head() -> str:
    """The version of the tables that this release works with."""
    return str(ScriptDirectory.from_config(config()).get_current_head())


def current(connection: Connection) -> str | None:
    """The version of the database's tables; None if there are none."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def check(connection: Connection, url: URL) -> None:
    """Raises `SchemaError` if the tables are not the ones that this release works with."""
    version = current(connection)
    if version == head():
        return
    if version is not None and version not in _known():
        raise SchemaError(
            f"{shown(url)} has tables of version {version}, made by a newer zmdp (this one knows up to {head()}): "
            "upgrade zmdp",
            code=500,
        )
    state = "has no tables yet" if version is None else f"has tables of version {version}, this zmdp needs {head()}"
    raise SchemaError(f"{shown(url)} {state}: run `titanic db upgrade --db {shown(url)}`", code=500)


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Bring the tables to this release's version; returns the version before and after.

    Raises `SchemaError` for tables of a newer release.
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
    """What tells a SQLite file from another of the same name; None if it is gone, or not a file."""
    if is_sqlite(url):
        with suppress(OSError):
            found = os.stat(str(url.database))
            return found.st_dev, found.st_ino
    return None

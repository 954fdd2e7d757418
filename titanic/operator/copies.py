"""Copies of a SQLite database: a backup, while Titanics and others use it, and a move to PostgreSQL."""

import os
import sqlite3
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from ...mdp.codes import Code
from ...mdp.errors import SettingError, TitanicError
from ..db import schema
from ..db.store.models import COUNTERS, ENDED_SEQUENCE, KEYS, PARTS, REQUESTS, SCHEDULES, Base

PAGES_AT_ONCE: Final = 1024
"""Pages that are copied before Python looks whether somebody has interrupted it."""
ROWS_AT_ONCE: Final = 1000
"""Maximum number of rows that are inserted at a time."""
BYTES_AT_ONCE: Final = 16 << 20
"""Size of bodies from which fewer are."""
_MOVED: Final = (REQUESTS, PARTS, KEYS, SCHEDULES, Base.metadata.tables["titanic_written"])
"""The tables whose rows are moved.  Leases end, PostgreSQL keeps the counts itself and has an identity of its own, and
what Spark has staged is not accepted yet, so Spark writes it again."""
_SIDECARS: Final = ("-wal", "-shm", "-journal")
"""The endings of files that SQLite would take for a part of the database beside them."""


# ── a backup ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def back_up(engine: Engine, target: Path) -> int:
    """Copy the SQLite database of a reading `engine`, as it is at one moment, to a new file, and return its size.

    The copy is one file, on disk when this returns.  It appears when it is complete; until then its name ends in
    `.part`, and it is deleted if anything fails.

    Raises:
        SettingError: There is such a file, or no such folder.
        TitanicError: The database has no tables, or the copy cannot be written.
    """
    for each in (target, *(target.with_name(target.name + more) for more in _SIDECARS)):
        if os.path.lexists(each):
            raise SettingError(f"{each} exists: choose the name of a new file for the backup")
    if not target.parent.is_dir():
        raise SettingError(f"{target}: there is no folder {target.parent}")
    try:
        with _new_file(target) as part, engine.begin() as connection:
            if schema.current(connection) is None:  # this also decides which moment is copied
                raise TitanicError(f"{schema.shown(engine.url)} has no tables of Titanic", code=Code.FAILED)
            os.chmod(part, os.stat(str(engine.url.database)).st_mode & 0o777)
            _copy_pages(connection, part)
            return part.stat().st_size
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TitanicError(f"cannot write the backup {target}: {reason}", code=Code.FAILED) from None


@contextmanager
def _new_file(target: Path) -> Generator[Path]:
    """Yield an empty file, which takes the name `target` at the end of the block, or is deleted if that fails."""
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        yield part
        os.fsync(descriptor)
        if os.path.lexists(target):
            raise SettingError(f"{target} exists by now")
        part.rename(target)
    except BaseException:
        for each in (part, *(Path(name + more) for more in _SIDECARS)):
            each.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _copy_pages(connection: Connection, part: Path) -> None:
    source: Any = connection.connection.driver_connection
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        copy.execute("PRAGMA synchronous=OFF")  # the whole file is synchronized in the end
        # The open transaction keeps the moment.  Without it, the copy would begin again whenever somebody writes.
        source.backup(copy, pages=PAGES_AT_ONCE, progress=lambda *_: None)
        copy.execute("PRAGMA journal_mode=DELETE")  # a single file, which can be copied and read without more


# ── a move to PostgreSQL ─────────────────────────────────────────────────────────────────────────────────────────────


def move(source: URL, target: Engine) -> dict[str, int]:
    """Copy everything from the SQLite database `source` to the empty tables of `target`, on PostgreSQL, in one
    transaction, and return how many rows of each table.  The file stays as it is.

    Raises:
        SettingError: There is no such file.
        SchemaError: The tables of either do not have this release's version.
        TitanicError: Another program has the file open, or `target` is not empty.
    """
    with _alone(source) as reading, target.begin() as writing:
        schema.check(reading, source)
        schema.check(writing, target.url)
        names = ", ".join(table.name for table in _MOVED)
        writing.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")  # a Titanic may be there already
        for table in _MOVED:
            if writing.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
                raise TitanicError(
                    f"{schema.shown(target.url)} is not empty ({table.name} has rows), so nothing was moved",
                    code=Code.FAILED,
                )
        moved = {table.name: _move_rows(reading, writing, table) for table in _MOVED}
        latest = "SELECT max(seq) FROM sqlite_sequence WHERE name = 'titanic_requests'"
        ended = sa.select(COUNTERS.c.value).where(COUNTERS.c.name == "ended")
        _advance_sequence(writing, f"{REQUESTS.name}_id_seq", reading.exec_driver_sql(latest).scalar())
        _advance_sequence(writing, ENDED_SEQUENCE.name, reading.scalar(ended))
    return moved


@contextmanager
def _alone(url: URL) -> Generator[Connection]:
    """Yield a connection in a transaction to a SQLite file that no other program has open until the end."""
    path = str(url.database)
    if not os.path.isfile(path):
        raise SettingError(f"there is no database {path}")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        return connection

    engine = sa.create_engine(url, creator=connect, poolclass=sa.NullPool)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN EXCLUSIVE"))
    try:
        with engine.begin() as connection:
            yield connection
    except sa.exc.DBAPIError as error:
        if not isinstance(error.orig, sqlite3.Error):  # an error of the other database
            raise
        reason = schema.explain(error, url)
        if error.orig.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            reason = "another program has it open: stop Titanic first, or what it stores meanwhile is not moved"
        raise TitanicError(f"{schema.shown(url)}: {reason}", code=Code.FAILED) from None


def _move_rows(reading: Connection, writing: Connection, table: sa.Table) -> int:
    rows = reading.execute(sa.select(table).order_by(*table.primary_key))
    count = 0
    for some in _bounded(rows):
        writing.execute(sa.insert(table), some)
        count += len(some)
    return count


def _bounded(rows: Iterable[sa.Row[Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in parts that fit into memory."""
    some: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        some.append(row._asdict())
        size += sum(len(value) for value in row if isinstance(value, bytes))
        if len(some) == ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _advance_sequence(connection: Connection, name: str, used: int | None) -> None:
    """Let a sequence go on after the last number that was used."""
    if used:
        connection.execute(sa.select(sa.func.setval(name, used)))

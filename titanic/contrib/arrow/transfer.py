"""Move rows between Titanic's database and Arrow: PostgreSQL through ADBC, which uses COPY, SQLite through Python."""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ....mdp.errors import SettingError, TitanicError
from ....mdp.program.extras import install_command
from ...db import postgresql, schema
from .columns import BODY_COLUMNS
from .packing import UUID_BYTES, hexadecimal

if TYPE_CHECKING:
    from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement

LOCK_TIMEOUT_SECONDS: Final = 60.0
"""How long to wait for locks: many tasks write at a time."""
MAX_ROWS: Final = 10_000
"""Maximum number of rows in a batch from SQLite."""
MAX_BYTES: Final = 4 << 20
"""Size from which a batch ends."""


def open_database(db: str, *, write: bool) -> Engine:
    """Return an engine for the database at `db`.  Raises `SettingError` if it or its driver is missing."""
    return schema.open_engine(
        schema.database_url(db), write=write, lock_timeout=LOCK_TIMEOUT_SECONDS, busy_timeout=LOCK_TIMEOUT_SECONDS
    )  # fmt: skip


def check_database(engine: Engine) -> None:
    """Raise `SchemaError` if the tables do not have this release's version, `TitanicError` if they cannot be read."""
    try:
        with engine.connect() as connection:
            schema.check(connection, engine.url)
    except sa.exc.DBAPIError as error:
        detail = " ".join(str(error.orig).split())
        raise TitanicError(f"cannot read {schema.shown(engine.url)}: {detail}", code=500) from None


@contextmanager
def connect_arrow(db: str, *, write: bool) -> "Generator[Sqlite | Postgresql]":
    """Connect to the database at `db` for the block.  Raises `SettingError` if it or its driver is missing."""
    url = schema.database_url(db)
    if schema.is_sqlite(url):
        engine = open_database(db, write=write)
        try:
            with engine.connect() as connection:
                yield Sqlite(connection)
        finally:
            engine.dispose()
    else:
        try:
            from adbc_driver_manager import AdbcConnection  # noqa: PLC0415 - not needed for SQLite

            database = _postgresql(postgresql.libpq_uri(url))
        except ImportError as error:
            raise SettingError(
                f"PostgreSQL as Arrow needs ADBC: {install_command('spark', 'postgres')} ({error})"
            ) from None
        with AdbcConnection(database) as connection:
            # Staged rows do not survive a crash of the server anyway.
            yield Postgresql(
                connection, postgresql.begin_statement(url, lock_timeout=LOCK_TIMEOUT_SECONDS, durable=False)
            )


@lru_cache(maxsize=4)
def _postgresql(uri: str) -> "AdbcDatabase":
    """Return a database without a connection, but with the server's types, which take some 50 ms to read."""
    import adbc_driver_postgresql  # noqa: PLC0415 - not needed for SQLite

    database: AdbcDatabase = adbc_driver_postgresql.connect(uri)
    return database


class Postgresql:
    """A connection to PostgreSQL.  `begin` begins a transaction: ADBC's own would lack the settings."""

    def __init__(self, connection: "AdbcConnection", begin: str) -> None:
        self._connection = connection
        self._begin = begin

    def query(self, columns: Iterable[str], rest: str) -> Iterator[pa.RecordBatch]:
        """Yield columns of requests as the server sends them, in a transaction.  `rest` is what follows FROM.

        A UUID is 16 bytes.
        """
        names = ", ".join("uuid_send(uuid) AS uuid" if name == "uuid" else name for name in columns)
        self._do(self._begin)
        yield from self._execute(f"SELECT {names} FROM titanic_requests {rest}")  # noqa: S608 - our own
        self._do("COMMIT")

    def stage(self, touch: str, rows: pa.RecordBatch) -> bool:
        """Add rows to `titanic_staged` if `touch` returns a row, in a transaction, and return whether it did."""
        self._do(self._begin)
        wanted = bool(sum(batch.num_rows for batch in self._execute(touch)))
        if wanted:
            with self._statement(
                {"ingest.target_table": "titanic_staged", "ingest.mode": "adbc.ingest.mode.append"}
            ) as copy:
                kinds, values = rows.__arrow_c_array__()
                copy.bind(values, kinds)
                copy.execute_update()
        self._do("COMMIT")
        return wanted

    def _do(self, command: str) -> None:
        with self._statement({}) as statement:
            statement.set_sql_query(command)
            statement.execute_update()

    def _execute(self, query: str) -> Iterator[pa.RecordBatch]:
        with self._statement({"postgresql.batch_size_hint_bytes": str(MAX_BYTES)}) as statement:
            statement.set_sql_query(query)
            with pa.RecordBatchReader.from_stream(statement.execute_query()[0]) as reader:
                yield from reader

    def _statement(self, options: Mapping[str, str]) -> "AdbcStatement":
        from adbc_driver_manager import AdbcStatement  # noqa: PLC0415 - not needed for SQLite

        statement = AdbcStatement(self._connection)
        statement.set_options(**{f"adbc.{name}": value for name, value in options.items()})
        return statement


class Sqlite:
    """A connection to a SQLite file."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def query(self, columns: Collection[str], rest: str) -> Iterator[pa.RecordBatch]:
        """Yield columns of requests, in a transaction.  `rest` is what follows FROM.  A UUID is 32 hex digits."""
        large = [at for at, name in enumerate(columns) if name in BODY_COLUMNS.values()]
        with self._connection.begin():
            rows: list[tuple[object, ...]] = []
            size = 0
            statement = f"SELECT {', '.join(columns)} FROM titanic_requests {rest}"  # noqa: S608 - our own
            cursor: Any = self._connection.exec_driver_sql(statement).cursor
            for row in cursor:
                rows.append(row)
                size += sum(len(row[at] or b"") for at in large)
                if len(rows) == MAX_ROWS or size >= MAX_BYTES:
                    yield _batch(rows, columns)
                    rows, size = [], 0
            if rows:
                yield _batch(rows, columns)

    def stage(self, touch: str, rows: pa.RecordBatch) -> bool:
        """Add rows to `titanic_staged` if `touch` returns a row, in a transaction, and return whether it did."""
        uuid = rows.schema.get_field_index("uuid")
        rows = rows.set_column(uuid, "uuid", hexadecimal(rows["uuid"], UUID_BYTES))
        marks = ", ".join("?" * rows.num_columns)
        insert = f"INSERT INTO titanic_staged ({', '.join(rows.schema.names)}) VALUES ({marks})"  # noqa: S608 - our own
        with self._connection.begin():
            if not self._connection.exec_driver_sql(touch).all():
                return False
            # Directly by the driver: SQLAlchemy takes several times as long for each row.
            cursor: Any = self._connection.connection.cursor()
            cursor.executemany(insert, zip(*(column.to_pylist() for column in rows.columns), strict=True))
        return True


def _batch(rows: list[tuple[object, ...]], columns: Iterable[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(column) for column in zip(*rows, strict=True)], list(columns))

"""Move rows between Titanic's database and Arrow: PostgreSQL through ADBC, which uses COPY, SQLite through Python."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
from sqlalchemy.engine import Connection

from ...mdp.errors import SettingError
from ...titanic import schema
from .bodies import UUID_BYTES, hexadecimal
from .database import LOCK_TIMEOUT_SECONDS, open_database

if TYPE_CHECKING:
    from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement

MAX_ROWS: Final = 10_000
"""Maximum number of rows in a batch from SQLite."""
MAX_BYTES: Final = 4 << 20
"""Size from which a batch ends."""


class ArrowConnection(Protocol):
    """A connection to Titanic's database."""

    def query(self, columns: Mapping[str, pa.DataType], rest: str) -> Iterator[pa.RecordBatch]:
        """Yield the result of `SELECT columns FROM titanic_requests` and the rest of the statement, in a transaction.

        A UUID is 16 bytes or 32 hex digits.
        """

    def stage(self, touch: str, rows: pa.RecordBatch) -> bool:
        """Execute `touch` and, if it returns a row, add `rows` to `titanic_staged`, in a transaction.

        Returns whether it did.
        """


@contextmanager
def connect_arrow(db: str, *, write: bool) -> "Iterator[ArrowConnection]":
    """Connect to the database at `db` for the block.  Raises `SettingError` if it or its driver is missing."""
    url = schema.database_url(db)
    if schema.is_sqlite(url):
        engine = open_database(db, write=write)
        with closing(engine.connect()) as connection:
            yield Sqlite(connection)
        engine.dispose()
    else:
        try:
            from adbc_driver_manager import AdbcConnection  # noqa: PLC0415 - not needed for SQLite

            database = _postgresql(schema.libpq_uri(url, lock_timeout=LOCK_TIMEOUT_SECONDS))
        except ImportError as error:
            raise SettingError(
                f"PostgreSQL as a table in Spark needs ADBC: pip install 'zmdp[spark,postgres]' ({error})"
            ) from None
        with AdbcConnection(database) as connection:
            yield Postgresql(connection)


@lru_cache(maxsize=4)
def _postgresql(uri: str) -> "AdbcDatabase":
    """Return a database, which is open no connection but knows the server's types.  To ask for these takes 50 ms."""
    import adbc_driver_postgresql  # noqa: PLC0415 - not needed for SQLite

    return adbc_driver_postgresql.connect(uri)


class Postgresql:
    """A connection to PostgreSQL."""

    def __init__(self, connection: "AdbcConnection") -> None:
        self._connection = connection

    def query(self, columns: Mapping[str, pa.DataType], rest: str) -> Iterator[pa.RecordBatch]:
        """Yield the result, while the server sends it."""
        names = ", ".join("uuid_send(uuid) AS uuid" if name == "uuid" else name for name in columns)
        return self._execute(f"SELECT {names} FROM titanic_requests {rest}")  # noqa: S608 - our own

    def stage(self, touch: str, rows: pa.RecordBatch) -> bool:
        """Copy the rows to the server."""
        self._connection.set_autocommit(False)
        wanted = any(batch.num_rows for batch in self._execute(touch))
        if wanted:
            with self._statement({"ingest.target_table": "titanic_staged", "ingest.mode": "adbc.ingest.mode.append"}) as copy:
                kinds, values = rows.__arrow_c_array__()
                copy.bind(values, kinds)
                copy.execute_update()
        self._connection.commit()
        return wanted

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

    def query(self, columns: Mapping[str, pa.DataType], rest: str) -> Iterator[pa.RecordBatch]:
        """Yield the result, in batches of limited size."""
        large = [at for at, kind in enumerate(columns.values()) if pa.types.is_binary(kind)]
        with self._connection.begin():
            rows: list[tuple[object, ...]] = []
            size = 0
            statement = f"SELECT {', '.join(columns)} FROM titanic_requests {rest}"  # noqa: S608 - our own
            for row in self._connection.exec_driver_sql(statement).cursor:
                rows.append(row)
                size += sum(len(row[at] or b"") for at in large)
                if len(rows) == MAX_ROWS or size >= MAX_BYTES:
                    yield _batch(rows, columns)
                    rows, size = [], 0
            if rows:
                yield _batch(rows, columns)

    def stage(self, touch: str, rows: pa.RecordBatch) -> bool:
        """Insert the rows."""
        uuid = rows.schema.get_field_index("uuid")
        rows = rows.set_column(uuid, "uuid", hexadecimal(rows["uuid"], UUID_BYTES))
        marks = ", ".join("?" * rows.num_columns)
        insert = f"INSERT INTO titanic_staged ({', '.join(rows.schema.names)}) VALUES ({marks})"  # noqa: S608 - our own
        with self._connection.begin():
            if not self._connection.exec_driver_sql(touch).all():
                return False
            # Directly by the driver: SQLAlchemy takes several times as long for each row.
            cursor = self._connection.connection.cursor()
            cursor.executemany(insert, zip(*(column.to_pylist() for column in rows.columns), strict=True))
        return True


def _batch(rows: list[tuple[object, ...]], columns: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    values = zip(zip(*rows, strict=True), columns.values(), strict=True)
    return pa.RecordBatch.from_arrays([pa.array(column, kind) for column, kind in values], list(columns))

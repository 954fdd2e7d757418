"""SQL for whole batches: one statement for many rows, executed directly by the database's driver.

SQLAlchemy Core spends more time on a row than the database does.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection, CursorResult

ROWS_AT_ONCE: Final = 64
"""Maximum number of rows in one SQLite statement."""
BYTES_AT_ONCE: Final = 64 << 20
"""Bytes of bodies in one PostgreSQL statement, which PostgreSQL limits to 1 GB."""

Row = tuple[Any, ...]


def as_uuid(value: str | UUID) -> UUID:
    """Return a UUID that a driver has returned: SQLite's returns text."""
    return UUID(value) if isinstance(value, str) else value


class Bulk:
    """A statement that reads its rows from a table named `given`.

        CLOSE = Bulk("WITH given DELETE FROM requests WHERE id IN (SELECT id FROM given) RETURNING id", id="bigint")
        closed = CLOSE(connection, [(1,), (2,)])

    `columns` are the columns of `given` and their PostgreSQL types.  The statement must ignore rows whose first column
    is NULL.  An INSERT must start with INSERT, not with WITH: by default Python's sqlite3 begins a transaction only
    before INSERT, UPDATE and DELETE, and `enqueue` runs on the caller's connection.
    """

    def __init__(self, statement: str, **columns: str) -> None:
        self._width = len(columns)
        self._names = ", ".join(columns)
        self._types = list(columns.values())
        self._large = [at for at, type_ in enumerate(self._types) if type_ == "bytea"]
        self._statement = statement
        self._texts: dict[int, str] = {}
        """SQLite statements by number of rows."""
        # Bodies are sent in binary form: as text they are twice as large.
        marks = [f"{'%b' if type_ == 'bytea' else '%s'}::{type_}" for type_ in self._types]
        self._one = self._with(f"SELECT {', '.join(marks)}")
        self._many = self._with(f"SELECT * FROM unnest({', '.join(f'{mark}[]' for mark in marks)})")  # noqa: S608 - our own
        values = (f"CAST(:{name} AS {type_})" for name, type_ in columns.items())
        self._portable = sa.text(self._with(f"SELECT {', '.join(values)}"))
        self._columns = list(columns)

    def __call__(self, connection: Connection, rows: Sequence[Row]) -> list[Any]:
        """Execute the statement with `rows` and return the rows that it returns."""
        found: list[Any] = []
        for result in self._execute(connection, rows):
            if result.returns_rows:
                found += result.all()
        return found

    def count(self, connection: Connection, rows: Sequence[Row]) -> int:
        """Execute the statement with `rows` and return how many rows it has inserted, changed or deleted."""
        return sum(result.rowcount for result in self._execute(connection, rows))

    def _execute(self, connection: Connection, rows: Sequence[Row]) -> Iterator[CursorResult[Any]]:
        dialect = connection.dialect
        if dialect.name == "sqlite":
            yield from self._execute_on_sqlite(connection, rows)
        elif dialect.driver == "psycopg":
            for some in self._bounded(rows):
                if len(some) == 1:
                    yield connection.exec_driver_sql(self._one, tuple(some[0]))
                else:
                    yield connection.exec_driver_sql(self._many, tuple(map(list, zip(*some, strict=True))))
        else:  # another driver, of a program that calls `enqueue`
            for row in rows:
                yield connection.execute(self._portable, dict(zip(self._columns, row, strict=True)))

    def _execute_on_sqlite(self, connection: Connection, rows: Sequence[Row]) -> Iterator[CursorResult[Any]]:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            # Preparing a statement takes longer than executing it.  So there are only a few sizes, which the driver
            # keeps prepared, and rows of NULLs pad a batch to the next size.
            size = 1 << (len(some) - 1).bit_length()
            values = (*chain.from_iterable(some), *(None,) * ((size - len(some)) * self._width))
            yield connection.exec_driver_sql(self._texts.get(size) or self._text(size), values)

    def _text(self, size: int) -> str:
        row = f"({', '.join('?' * self._width)})"
        text = self._texts[size] = self._with(f"VALUES {', '.join([row] * size)}")
        return text

    def _with(self, source: str) -> str:
        return self._statement.replace("WITH given", f"WITH given({self._names}) AS ({source})", 1)

    def _bounded(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        """Split the rows into parts that fit into one statement each."""
        sizes = [sum(len(row[at] or b"") for at in self._large) for row in rows] if self._large else []
        if sum(sizes) <= BYTES_AT_ONCE:
            return [rows] if rows else []
        parts: list[Sequence[Row]] = []
        start = total = 0
        for at, size in enumerate(sizes):
            if at > start and total + size > BYTES_AT_ONCE:
                parts.append(rows[start:at])
                start, total = at, 0
            total += size
        return [*parts, rows[start:]]

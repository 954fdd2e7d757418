"""The database as the pages read and change it: with connections of its own, and seldom enough not to disturb."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...api.submission import read_uuid
from ...db import schema
from .. import admin

INTERVAL_SECONDS: Final = 1.0
"""How old the counts may be."""
SHARE: Final = 0.1
"""How much of the time counting may take, at most."""
MAX_AGE_SECONDS: Final = 60.0
"""How old the counts may be if that takes long."""
MAX_PARTS: Final = 50
"""PARTIALs of a request that are shown."""
MAX_LISTED: Final = 1000
"""Requests on a page with a list."""

Result = TypeVar("Result")


class DatabaseError(Exception):
    """The database cannot be used now; the text says why."""


class AdminDatabase:
    """The requests of one database.  The methods are coroutines; each query runs in a thread.

    `url` is the database.  Raises `DatabaseError`.
    """

    def __init__(self, url: sa.URL) -> None:
        self._url = url
        self._file = schema.file_identity(url)
        self._reading = schema.open_engine(url, write=False)
        self._writing = schema.open_engine(url)
        self._lock = threading.Lock()  # one query at a time: a visitor that asks for many pages waits
        self._stats: dict[str, Any] = {}
        self._stats_due = 0.0
        """When to count again, on the monotonic clock."""

    def close(self) -> None:
        """Close the connections."""
        self._reading.dispose()
        self._writing.dispose()

    async def stats(self) -> dict[str, Any]:
        """Return the numbers of `titanic stats`: a second old, or older if counting takes long."""
        if time.monotonic() >= self._stats_due:
            self._stats = await self._read(self._count)
        return self._stats

    def _count(self, connection: Connection) -> dict[str, Any]:
        began = time.monotonic()
        found = admin.stats(connection, time.time())
        now = time.monotonic()
        self._stats_due = now + min(max(INTERVAL_SECONDS, (now - began) / SHARE), MAX_AGE_SECONDS)
        return found

    async def search(self, which: admin.Filter, text: str) -> tuple[list[dict[str, Any]], bool]:
        """Return the newest requests that match, and whether there may be more."""
        uuid = read_uuid(text)
        rows = await self._read(lambda connection: admin.search(connection, which, text, uuid, MAX_LISTED + 1))
        return rows[:MAX_LISTED], len(rows) > MAX_LISTED

    async def show(self, uuid: UUID) -> tuple[dict[str, Any] | None, int]:
        """Return everything about a request, with the first `MAX_PARTS` of its PARTIALs, and how many it has."""
        return await self._read(
            lambda connection: (admin.show(connection, uuid, MAX_PARTS), admin.count_partials(connection, uuid))
        )

    async def retry(self, uuids: Sequence[UUID]) -> int:
        """Retry failed requests; return how many."""
        return len(await self._write(lambda connection: admin.retry(connection, uuids, time.time())))

    async def retry_all(self, service: str | None) -> int:
        """Retry the oldest failed requests, of one service or of all; return how many."""

        def change(connection: Connection) -> int:
            found = admin.matching(connection, admin.Filter(("failed",), service), 0, MAX_LISTED)
            return len(admin.retry(connection, [uuid for _, uuid in found], time.time()))

        return await self._write(change)

    async def cancel(self, uuids: Sequence[UUID]) -> int:
        """Cancel requests that have not ended; return how many."""
        return len(await self._write(lambda connection: admin.cancel(connection, uuids, time.time())))

    async def _read(self, query: Callable[[Connection], Result]) -> Result:
        return await asyncio.to_thread(self._perform, self._reading, query)

    async def _write(self, change: Callable[[Connection], Result]) -> Result:
        self._stats_due = 0.0  # something is changed
        return await asyncio.to_thread(self._perform, self._writing, change)

    def _perform(self, engine: Engine, query: Callable[[Connection], Result]) -> Result:
        if self._file != schema.file_identity(self._url):
            engine.dispose()  # its connections still have the old file
            raise DatabaseError("the file was removed or replaced")
        try:
            with self._lock, engine.begin() as connection:
                return query(connection)
        except sa.exc.DBAPIError as error:
            raise DatabaseError(schema.explain(error, self._url)) from None
        except sa.exc.SQLAlchemyError as error:
            raise DatabaseError(" ".join(str(error).split())) from None

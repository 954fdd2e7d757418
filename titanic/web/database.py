"""The database as the pages read and change it: with connections of its own, and seldom enough not to disturb."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from .. import admin, schema, store
from ..submission import read_uuid

SHARE: Final = 0.1
"""How much of the time its own queries may take, at most."""
MAX_AGE_SECONDS: Final = 60.0
"""How old a result may be in any case."""
MAX_PARTS: Final = 50
"""PARTIALs of a request that are shown."""
MAX_LISTED: Final = 1000
"""Requests on a page with a list."""

Result = TypeVar("Result")


class DatabaseError(Exception):
    """The database cannot be used now; the text says why."""


class Periodic:
    """A query for which it is enough to be made now and then: it takes a limited share of the time."""

    def __init__(self, query: Callable[[Connection], Any], interval: float) -> None:
        self._query = query
        self.value: Any = None
        self.due = 0.0
        self._interval = interval

    def perform(self, connection: Connection) -> Any:
        """Make the query, and keep the result until the next is due."""
        began = time.monotonic()
        self.value = self._query(connection)
        now = time.monotonic()
        self.due = now + min(max(self._interval, (now - began) / SHARE), MAX_AGE_SECONDS)
        return self.value

    def expire(self) -> None:
        """Make the next query due: something was changed."""
        self.due = 0.0


class AdminDatabase:
    """The requests of one database.  The methods are coroutines; each query runs in a thread.

    `url` is the database.  Raises `DatabaseError`.
    """

    def __init__(self, url: sa.URL) -> None:
        self._url = url
        self._file = schema.file_identity(url)
        self._reading = schema.open_engine(url, write=False)
        self._writing = schema.open_engine(url)
        self._lock = threading.Lock()  # one query at a time: whoever asks for many pages waits
        self._summary = Periodic(lambda connection: store.summarize(connection, time.time()), 1.0)
        self._services = Periodic(lambda connection: admin.stats(connection, time.time()), 2.0)

    def close(self) -> None:
        """Close the connections."""
        self._reading.dispose()
        self._writing.dispose()

    async def summary(self) -> store.Summary:
        """Return the counts by state, which may be a second old, or older if counting takes long."""
        found: store.Summary = await self._periodic(self._summary)
        return found

    async def services(self) -> dict[str, Any]:
        """Return what `titanic stats` shows, which may be older."""
        found: dict[str, Any] = await self._periodic(self._services)
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

    async def _periodic(self, query: Periodic) -> Any:
        if time.monotonic() >= query.due:
            return await self._read(query.perform)
        return query.value

    async def _read(self, query: Callable[[Connection], Result]) -> Result:
        return await asyncio.to_thread(self._perform, self._reading, query)

    async def _write(self, change: Callable[[Connection], Result]) -> Result:
        self._summary.expire()
        self._services.expire()
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

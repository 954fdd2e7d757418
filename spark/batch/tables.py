"""The catalogue's tables within a request: each is registered when the request first names it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from .catalogue import Catalogue, Table
from .jobs import unprocessable
from .schemas import Schemas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MISSING: Final = "TABLE_OR_VIEW_NOT_FOUND"
"""Spark's condition for a name that it does not know."""


class RequestTables:
    """Registers tables for one request, as temporary views of the files that exist when it first names them.

    Safe from any thread of a job.
    """

    def __init__(self, session: "SparkSession", catalogue: Catalogue, schemas: Schemas) -> None:
        self.catalogue = catalogue
        self._session = session
        self._schemas = schemas
        self._registered: set[str] = set()
        self._failures: dict[str, Exception] = {}
        self._lock = threading.Lock()

    def provide(self, sql: str, args: object = None) -> None:
        """Register the tables that a query names, in its text or in its arguments (`IDENTIFIER(:table)`)."""
        values: Iterable[object] = ()
        if args:
            values = args.values() if isinstance(args, dict) else args  # type: ignore[assignment]  # a list
        self._register(self.catalogue.named_in(sql, *(each for each in values if isinstance(each, str))))

    def provide_all(self) -> None:
        """Register all tables."""
        self._register(self.catalogue.tables.values())

    def _register(self, tables: Iterable[Table]) -> None:
        """Register tables that are not yet registered.  One that cannot be read may not be needed: see `explain`."""
        for table in tables:
            with self._lock:
                if table.name in self._registered:
                    continue
                try:
                    # A job may have created a view of that name itself, which it gets.
                    self._schemas.open(self._session, table).createTempView(table.name)
                except Exception as error:  # noqa: BLE001 - Spark raises anything
                    self._failures[table.name] = error
                    continue
                self._registered.add(table.name)
                self._failures.pop(table.name, None)

    def check_catalogs(self, names: Iterable[tuple[str, ...]]) -> None:
        """Raise `ServiceError` 422 if one of these tables, (catalog, …, table), is not in a catalog of the file."""
        for name in sorted(names):
            if name[0] not in self.catalogue.catalogs:
                known = ", ".join(sorted(self.catalogue.catalogs)) or "none"
                raise unprocessable(f"{'.'.join(name)}: queries may not read the catalog {name[0]}; allowed: {known}")
            if any("/" in part for part in name):  # Iceberg and Delta take paths as names
                raise unprocessable(f"{'.'.join(name)}: queries may not name files")

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to report for `error`: why a table could not be read, rather than that it is missing."""
        if not self._failures or _MISSING not in str(error):
            return error
        missing = ""
        with suppress(Exception):  # PySpark asks the JVM or the server
            missing = error.getMessageParameters()["relationName"].strip("`").lower()  # type: ignore[attr-defined]
        return next((each for name, each in self._failures.items() if name.lower() == missing), error)

    def remove(self) -> None:
        """Remove the views: the next request may get the same session."""
        for name in self._registered:
            self._session.catalog.dropTempView(name)


@contextmanager
def request_tables(session: "SparkSession", catalogue: Catalogue, schemas: Schemas) -> Iterator[RequestTables]:
    """Offer the catalogue's tables to a request, in its thread.  Raises what the block raises."""
    tables = RequestTables(session, catalogue, schemas)
    try:
        yield tables
    except Exception as error:
        cause = tables.explain(error)
        if cause is error:
            raise
        raise cause from None
    finally:
        with suppress(Exception):  # Spark is lost, and the views with it
            tables.remove()


# ── sessions for jobs ────────────────────────────────────────────────────────────────────────────────────────────────


def registering(session: "SparkSession", tables: RequestTables) -> "SparkSession":
    """Return the same session for Python, whose methods that name tables register these first."""
    kind: Any = type(session)
    made: Any = object.__new__(_subclass(kind))
    made.__dict__.update(session.__dict__)
    made._zmdp_tables = tables
    found: SparkSession = made
    return found


@cache
def _subclass(kind: Any) -> Any:
    """Return a subclass of a session's class, Classic's or Connect's, which both have these methods."""

    class CatalogueSession(kind):  # type: ignore[misc]  # the class is only known at run time
        _zmdp_tables: RequestTables

        def __del__(self) -> None:
            """Leave the connection open, which Connect closes otherwise: it belongs to the session of the pool."""

        def table(self, tableName: str) -> Any:  # noqa: N803 - Spark's name
            """Return a table as a DataFrame."""
            self._zmdp_tables.provide(tableName)
            return super().table(tableName)

        def sql(self, sqlQuery: str, args: Any = None, **kwargs: Any) -> Any:  # noqa: N803 - Spark's name
            """Return the result of a query as a DataFrame."""
            self._zmdp_tables.provide(sqlQuery, args)
            return super().sql(sqlQuery, args, **kwargs)

        @property
        def read(self) -> Any:
            """Return a reader."""
            reader = super().read
            reader.table = self._registering(reader.table)
            return reader

        @property
        def catalog(self) -> Any:
            """Return Spark's catalog functions."""
            return _CatalogFunctions(super().catalog, self._zmdp_tables)

        def _registering(self, read: Callable[[str], Any]) -> Callable[[str], Any]:
            def table(tableName: str) -> Any:  # noqa: N803 - Spark's name
                self._zmdp_tables.provide(tableName)
                return read(tableName)

            return table

    return CatalogueSession


class _CatalogFunctions:
    """Spark's catalog functions (`tableExists`, `listTables`, …), for which tables are registered as they name them."""

    def __init__(self, functions: Any, tables: RequestTables) -> None:
        self._functions = functions
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "listTables":
                self._tables.provide_all()
            else:
                self._tables.provide("", [*args, *kwargs.values()])
            return function(*args, **kwargs)

        return call

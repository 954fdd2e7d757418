"""The catalogue's tables within a request: each is registered when the request first names it.

They are temporary views of one session, not tables of a catalog that all sessions share.  CREATE TABLE fixes a table's
schema, for which Spark reads its files or asks its database, so a batch would start slowly and not see later changes.
It also returns no rows, rather than an error, where no files are, and none of a partition that has not been added to
the catalog.
"""

import re
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from ..failures import unprocessable
from .catalogue_file import Catalogue, Table
from .inferred_schemas import Schemas
from .roles import Role

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAME_PART: Final = re.compile(r"`((?:[^`]|``)+)`|([^.`]+)")
_MISSING: Final = "TABLE_OR_VIEW_NOT_FOUND"
"""Spark's condition for a name that it does not know."""


class RequestTables:
    """Registers tables for one request, as temporary views of the files that exist when it first names them.

    Tables that `role` may not read are not registered.  Safe from any thread of a job.
    """

    def __init__(self, session: "SparkSession", catalogue: Catalogue, schemas: Schemas, role: Role) -> None:
        self.catalogue = catalogue
        self.role = role
        self._session = session
        self._schemas = schemas
        self._registered: set[str] = set()
        self._failures: dict[str, Exception] = {}
        self._lock = threading.Lock()

    def provide(self, sql: str, args: Any = None) -> None:
        """Register the tables that a query names, in its text or in its arguments (`IDENTIFIER(:table)`)."""
        values = args.values() if isinstance(args, dict) else args or ()
        self._register(self.catalogue.named_in(sql, *(each for each in values if isinstance(each, str))))

    def provide_all(self) -> None:
        """Register all tables."""
        self._register(self.catalogue.tables.values())

    def _register(self, tables: Iterable[Table]) -> None:
        """Register tables that are not yet registered.  A table that cannot be read is no error yet: see `explain`."""
        for table in tables:
            with self._lock:
                if table.name in self._registered:
                    continue
                if not self.role.may_read(table.name):
                    self._failures[table.name] = self.role.refusal(table.name)
                    continue
                try:
                    # A job may have created a view of that name itself, which it gets.
                    self._schemas.open(self._session, table).createTempView(table.name)
                except Exception as error:  # noqa: BLE001 - Spark raises anything
                    self._failures[table.name] = error
                    continue
                self._registered.add(table.name)
                self._failures.pop(table.name, None)

    def check(self, names: Iterable[tuple[str, ...]]) -> None:
        """Raise `ServiceError` if a query may not read one of these tables, (catalog, …, table).

        422 if it is not in a catalog of the file, and 403 if only the role may not read it.
        """
        for name in sorted(names):
            self._check_catalog(name)
            if any("/" in part for part in name):  # Iceberg and Delta take paths as names
                raise unprocessable(f"{'.'.join(name)}: queries may not name files")
            if not self.role.may_read(*name):
                raise self.role.refusal(*name)

    def _check_catalog(self, name: tuple[str, ...]) -> None:
        if name[0] not in self.catalogue.catalogs:
            known = ", ".join(sorted(self.catalogue.catalogs)) or "none"
            raise unprocessable(f"{'.'.join(name)}: queries may not read the catalog {name[0]}; allowed: {known}")

    def show(self, namespace: str) -> "DataFrame":
        """Return the tables of the file, or those of a namespace in a catalog, as `SHOW TABLES` does.

        Those that the role may not read are left out.  Raises `ServiceError` 422.
        """
        import pyarrow as pa  # noqa: PLC0415

        found = [("", name, True) for name in self.role.readable(self.catalogue.tables)]
        if namespace:
            catalog, *_ = parts = name_parts(namespace)
            self._check_catalog(parts)
            listed = self._session.sql(f"SHOW TABLES IN {namespace}").collect()
            found = [
                (row.namespace, row.tableName, False)
                for row in listed
                if not row.isTemporary and self.role.may_read(catalog, *name_parts(row.namespace), row.tableName)
            ]
        schema = pa.schema({"namespace": pa.string(), "tableName": pa.string(), "isTemporary": pa.bool_()})
        rows = [dict(zip(schema.names, each, strict=True)) for each in found]
        return self._session.createDataFrame(pa.Table.from_pylist(rows, schema))

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


def name_parts(name: str) -> tuple[str, ...]:
    """Return the parts of a name as Spark writes it, for example lake.shop.`a.b`, without quotes."""
    return tuple(quoted.replace("``", "`") or plain for quoted, plain in _NAME_PART.findall(name))


@contextmanager
def request_tables(
    session: "SparkSession", catalogue: Catalogue, schemas: Schemas, role: Role
) -> Generator[RequestTables]:
    """Offer the catalogue's tables to a request, in its thread.  Raises what the block raises."""
    tables = RequestTables(session, catalogue, schemas, role)
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


def register_when_named(session: "SparkSession", tables: RequestTables) -> None:
    """Make a job's session register tables as the job names them.  No other request may use the session afterwards.

    It stays the session that Spark knows, so its DataFrames refer to it, and has all of its other methods.
    """
    found: Any = session
    found._zmdp_tables = tables
    found.__class__ = type("CatalogueSession", (_NamingMethods, type(session)), {})


class _NamingMethods:
    """Those methods of Spark's sessions, Classic's and Connect's, that name tables: they register these first."""

    _zmdp_tables: RequestTables

    def __del__(self) -> None:
        """Leave the connection to the pool, which closes it before.

        Connect's sessions close it here once more, and with it, in PySpark 4.0, threads that all of them share: the
        garbage collector would do so while another session is using them.
        """

    def table(self, tableName: str) -> Any:  # noqa: N803 - Spark's name
        """Return a table as a DataFrame."""
        self._zmdp_tables.provide(tableName)
        return super().table(tableName)  # type: ignore[misc]  # the session's class is only known at run time

    def sql(self, sqlQuery: str, args: Any = None, **kwargs: Any) -> Any:  # noqa: N803 - Spark's name
        """Return the result of a query as a DataFrame."""
        self._zmdp_tables.provide(sqlQuery, args)
        return super().sql(sqlQuery, args, **kwargs)  # type: ignore[misc]

    @property
    def read(self) -> Any:
        """Return a reader."""
        reader = super().read  # type: ignore[misc]
        read_table = reader.table

        def table(tableName: str) -> Any:  # noqa: N803 - Spark's name
            self._zmdp_tables.provide(tableName)
            return read_table(tableName)

        reader.table = table
        return reader

    @property
    def catalog(self) -> Any:
        """Return Spark's catalog functions."""
        return _CatalogFunctions(super().catalog, self._zmdp_tables)  # type: ignore[misc]


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

"""The catalogue of a batch: a TOML file with its tables, catalogs and jobs.

results = "results"              # folder for results that are too large to send
[tables.orders]
format = "parquet"               # any format that spark.read.format accepts: csv, json, orc, jdbc, …
path = "orders"                  # relative to this file, absolute, or a URL
[tables.sales]
format = "jdbc"
options = { url = "jdbc:postgresql://db/sales", dbtable = "sales", password = { env = "SALES_PASSWORD" } }
[catalogs.lake]                  # spark.sql.catalog.lake: queries may read lake.NAMESPACE.TABLE
class = "org.apache.iceberg.spark.SparkCatalog"
options = { type = "rest", uri = "http://catalog:8181", token = { env = "CATALOG_TOKEN" } }
[jobs]
wordcount = "yourpackage.jobs:wordcount"
[roles.analyst]                  # a role of the broker; without any, everyone may use everything
tables = ["orders", "lake.shop.*"]
jobs = ["wordcount"]
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ....mdp.errors import SettingError
from ....mdp.program import toml
from ....workers import Request
from .roles import EVERYTHING, ROLES_NEED_PLAN, Role

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
CATALOG_SETTINGS: Final = "spark.sql.catalog."
"""Prefix of Spark's settings for catalogs; the name of the catalog follows."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that queries can read."""

    name: str
    format: str
    path: str | None = None
    schema: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    def read(self, session: "SparkSession", schema: "StructType | None" = None) -> "DataFrame":
        """Open the table with the files that exist now; Spark infers a missing schema.  Raises what Spark raises."""
        reader = session.read.format(self.format).options(**self.options)
        given = self.schema if schema is None else schema
        if given is not None:
            reader = reader.schema(given)
        return reader.load(self.path) if self.path is not None else reader.load()


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tables and jobs (name to MODULE:FUNCTION) of a batch, and the folder for large results.

    `catalogs` are the catalogs that queries may read, by name, each with Spark's settings for it.  `roles` are those
    that may use anything; if there are none, everyone may use everything.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    results: str | None = None
    catalogs: dict[str, dict[str, str]] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)

    def role_of(self, request: Request) -> Role:
        """Return the role of a request's sender."""
        if not self.roles or request.admin:
            return EVERYTHING
        return self.roles.get(request.user, Role(request.user))

    def named_in(self, *texts: str) -> list[Table]:
        """Return the tables whose names occur in the texts of a query, even if only in a string or a comment."""
        words = {word.lower() for text in texts for word in _NAME.findall(text)}
        return [table for name, table in self.tables.items() if name.lower() in words]

    @property
    def settings(self) -> dict[str, str]:
        """Return Spark's settings for all catalogs."""
        return {name: value for each in self.catalogs.values() for name, value in each.items()}


class _Secret(str):
    """A value from the environment; catalogues that differ only in such values are equal."""

    def __repr__(self) -> str:
        return "a secret"


class _Env(msgspec.Struct, forbid_unknown_fields=True):
    env: str


_Options = dict[str, str | bool | int | float | _Env]


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    path: str | None = None
    schema: str | None = None
    options: _Options = {}


class _Catalog(msgspec.Struct, forbid_unknown_fields=True):
    java: str | None = msgspec.field(name="class", default=None)
    options: _Options = {}


class _Role(msgspec.Struct, forbid_unknown_fields=True):
    tables: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tables: dict[str, Any] = {}
    jobs: dict[str, str] = {}
    results: str | None = None
    catalogs: dict[str, Any] = {}
    roles: dict[str, Any] = {}


def read(path: Path, *, remote: bool = False) -> Catalogue:
    """Read a catalogue from a file, for a Spark Connect server if `remote`.

    Raises `SettingError`, which names the table and the problem.
    """
    found = toml.convert(toml.load(path), _File, str(path))
    for name in (*found.tables, *found.catalogs):
        if not _NAME.fullmatch(name):
            raise SettingError(f"{path}: {name!r}: the name of a table or catalog has only letters, digits and '_'")
    tables = {name: _table(name, given, path) for name, given in found.tables.items()}
    catalogs = {name: _catalog(name, given, path) for name, given in found.catalogs.items()}
    rights = {name: toml.convert(given, _Role, f"{path}: role {name}") for name, given in found.roles.items()}
    roles = {name: Role(name, given.tables, given.jobs) for name, given in rights.items()}
    for name, role in roles.items():
        if remote and role.tables and not role.reads_everything:
            raise SettingError(f"{path}: role {name}: {ROLES_NEED_PLAN}")
    return Catalogue(tables, found.jobs, found.results and _resolve(found.results, path), catalogs, roles)


def _table(name: str, given: Any, path: Path) -> Table:
    where = f"{path}: table {name}"
    table = toml.convert(given, _Table, where)
    options = _options(table.options, where)
    if table.format == "titanic" and "db" in options:
        options["db"] = _resolve(options["db"], path)
    return Table(name, table.format, table.path and _resolve(table.path, path), table.schema, options)


def _catalog(name: str, given: Any, path: Path) -> dict[str, str]:
    """Return Spark's settings for a catalog; none if it is configured elsewhere and only allowed here."""
    where = f"{path}: catalog {name}"
    catalog = toml.convert(given, _Catalog, where)
    if catalog.java is None:
        if catalog.options:
            raise SettingError(f'{where}: options need class = "…", the Java class of the catalog')
        return {}
    prefix = CATALOG_SETTINGS + name
    options = _options(catalog.options, where)
    return {prefix: catalog.java} | {f"{prefix}.{option}": value for option, value in options.items()}


def _options(given: _Options, where: str) -> dict[str, str]:
    return {option: _option(f"{where}: option {option}", value) for option, value in given.items()}


def _option(where: str, value: str | float | _Env) -> str:
    if isinstance(value, _Env):
        found = os.environ.get(value.env)
        if found is None:
            raise SettingError(f"{where}: set the environment variable {value.env}")
        return _Secret(found)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resolve(given: str, path: Path) -> str:
    """Resolve a path relative to the catalogue's folder."""
    return given if _URL.match(given) else str((path.parent / given).absolute())

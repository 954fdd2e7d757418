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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mdp import toml
from ...mdp.errors import SettingError
from ...workers import Request
from .roles import EVERYTHING, ROLES_NEED_PLAN, Role

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_TABLE: Final = {"format", "path", "schema", "options"}
_CATALOG: Final = {"class", "options"}
_ROLE: Final = {"tables", "jobs"}
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

    def read(self, session: "SparkSession", schema: "StructType | None" = None, *, merge: bool = False) -> "DataFrame":
        """Open the table with the files that exist now.  Spark infers a missing schema; `merge` reads all files for it.

        Raises what Spark raises.
        """
        options = {"mergeSchema": "true", **self.options} if merge else self.options
        reader = session.read.format(self.format).options(**options)
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
        """Return what the sender of a request may use."""
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
    """A value from the environment, which is not part of what identifies a catalogue."""

    def __repr__(self) -> str:
        return "a secret"


def read(path: Path, *, remote: bool = False) -> Catalogue:
    """Read a catalogue from a file, for a Spark Connect server if `remote`.

    Raises `SettingError`, which names the table and the problem.
    """
    found = toml.load(path)
    _check_names(found, {"tables", "jobs", "results", "catalogs", "roles"}, str(path))
    tables, jobs, catalogs, roles = (found.get(name, {}) for name in ("tables", "jobs", "catalogs", "roles"))
    if not all(isinstance(each, dict) for each in (tables, jobs, catalogs, roles)):
        raise SettingError(
            f"{path}: tables, catalogs, jobs and roles must be TOML tables: [tables.NAME], [catalogs.NAME], [jobs], "
            "[roles.NAME]"
        )
    results = found.get("results")
    for name, target in jobs.items():
        if not isinstance(target, str):
            raise SettingError(f"{path}: job {name} is {target!r}; expected MODULE:FUNCTION")
    if results is not None and not isinstance(results, str):
        raise SettingError(f"{path}: results is {results!r}; expected the path of a folder")
    made = {name: _table(name, given, path) for name, given in tables.items()}
    allowed = {name: _catalog(name, given, path) for name, given in catalogs.items()}
    admitted = {name: _role(name, given, path) for name, given in roles.items()}
    for name, role in admitted.items():
        if remote and role.tables and not role.reads_everything:
            raise SettingError(f"{path}: role {name}: {ROLES_NEED_PLAN}")
    return Catalogue(made, dict(jobs), None if results is None else _resolve(results, path), allowed, admitted)


def _table(name: str, given: Any, path: Path) -> Table:
    where = f"{path}: table {name}"
    if not _NAME.fullmatch(name):
        raise SettingError(f"{where}: a table's name consists of letters, digits and '_'")
    if not isinstance(given, dict) or not isinstance(given.get("format"), str):
        raise SettingError(f'{where}: set format = "parquet", or another format that Spark can read')
    _check_names(given, _TABLE, where)
    for each in ("path", "schema"):
        if each in given and not isinstance(given[each], str):
            raise SettingError(f"{where}: {each} is {given[each]!r}; expected a string")
    located = None if "path" not in given else _resolve(given["path"], path)
    values = _options(given.get("options", {}), where)
    if given["format"] == "titanic" and "db" in values:
        values["db"] = _resolve(values["db"], path)
    return Table(name, given["format"], located, given.get("schema"), values)


def _catalog(name: str, given: Any, path: Path) -> dict[str, str]:
    """Return Spark's settings for a catalog; none if it is configured elsewhere and only allowed here."""
    where = f"{path}: catalog {name}"
    if not _NAME.fullmatch(name):
        raise SettingError(f"{where}: a catalog's name consists of letters, digits and '_'")
    if not isinstance(given, dict):
        raise SettingError(f"{where} is {given!r}; expected [catalogs.{name}] with class and options")
    _check_names(given, _CATALOG, where)
    if "class" not in given:
        if "options" in given:
            raise SettingError(f'{where}: options need class = "…", the Java class of the catalog')
        return {}
    if not isinstance(given["class"], str):
        raise SettingError(f"{where}: class is {given['class']!r}; expected the name of a Java class")
    options = _options(given.get("options", {}), where)
    prefix = CATALOG_SETTINGS + name
    return {prefix: given["class"]} | {f"{prefix}.{option}": value for option, value in options.items()}


def _role(name: str, given: Any, path: Path) -> Role:
    where = f"{path}: role {name}"
    if not isinstance(given, dict):
        raise SettingError(f"{where} is {given!r}; expected [roles.{name}] with tables and jobs")
    _check_names(given, _ROLE, where)
    for each, patterns in given.items():
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SettingError(
                f'{where}: {each} is {patterns!r}; expected a list of patterns, such as ["orders", "x*"]'
            )
    return Role(name, **{each: tuple(patterns) for each, patterns in given.items()})


def _options(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise SettingError(f"{where}: options is {given!r}; expected {{ name = value, … }}")
    return {option: _option(f"{where}: option {option}", value) for option, value in given.items()}


def _option(where: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"env"}:
        found = os.environ.get(str(value["env"]))
        if found is None:
            raise SettingError(f"{where}: set the environment variable {value['env']}")
        return _Secret(found)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise SettingError(f'{where} is {value!r}; expected a string, a number, true, false, or {{ env = "NAME" }}')


def _resolve(given: str, path: Path) -> str:
    """Resolve a path relative to the catalogue's folder."""
    return given if _URL.match(given) else str((path.parent / given).absolute())


def _check_names(given: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in given:
        if name not in names:
            raise SettingError(f"{where}: unknown setting {name!r}; expected {', '.join(sorted(names))}")

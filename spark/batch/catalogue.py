"""The catalogue of a batch: a TOML file with its tables and jobs.

results = "results"              # folder for results that are too large to send
[tables.orders]
format = "parquet"               # any format that spark.read.format accepts: csv, json, orc, jdbc, …
path = "orders"                  # relative to this file, absolute, or a URL
[tables.sales]
format = "jdbc"
options = { url = "jdbc:postgresql://db/sales", dbtable = "sales", password = { env = "SALES_PASSWORD" } }
[jobs]
wordcount = "yourpackage.jobs:wordcount"
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mdp.errors import SettingError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_TABLE: Final = {"format", "path", "schema", "options"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table that queries can read."""

    name: str
    format: str
    path: str | None = None
    schema: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    def register(self, session: "SparkSession") -> None:
        """Register the table as a temporary view of the files that exist now.  Raises what Spark raises."""
        reader = session.read.format(self.format).options(**self.options)
        if self.schema is not None:
            reader = reader.schema(self.schema)
        (reader.load(self.path) if self.path is not None else reader.load()).createOrReplaceTempView(self.name)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tables and jobs (name to MODULE:FUNCTION) of a batch, and the folder for large results."""

    tables: dict[str, Table] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    results: str | None = None

    def named_in(self, sql: str) -> list[Table]:
        """Return the tables whose names occur in the query, even if only in a string or a comment."""
        words = {word.lower() for word in _NAME.findall(sql)}
        return [table for name, table in self.tables.items() if name.lower() in words]


def read(path: Path) -> Catalogue:
    """Read a catalogue from a file.  Raises `SettingError`, which names the table and the problem."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingError(f"{path} is not valid TOML: {error}") from None
    _check_names(found, {"tables", "jobs", "results"}, str(path))
    tables, jobs, results = found.get("tables", {}), found.get("jobs", {}), found.get("results")
    if not isinstance(tables, dict) or not isinstance(jobs, dict):
        raise SettingError(f"{path}: tables and jobs must be TOML tables: [tables.NAME], [jobs]")
    for name, target in jobs.items():
        if not isinstance(target, str):
            raise SettingError(f"{path}: job {name} is {target!r}; expected MODULE:FUNCTION")
    if results is not None and not isinstance(results, str):
        raise SettingError(f"{path}: results is {results!r}; expected the path of a folder")
    made = {name: _table(name, given, path) for name, given in tables.items()}
    return Catalogue(made, dict(jobs), None if results is None else _resolve(results, path))


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
    options = given.get("options", {})
    if not isinstance(options, dict):
        raise SettingError(f"{where}: options is {options!r}; expected {{ name = value, … }}")
    located = None if "path" not in given else _resolve(given["path"], path)
    values = {option: _option(f"{where}: option {option}", value) for option, value in options.items()}
    if given["format"] == "titanic" and "db" in values:
        values["db"] = _resolve(values["db"], path)
    return Table(name, given["format"], located, given.get("schema"), values)


def _option(where: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"env"}:
        found = os.environ.get(str(value["env"]))
        if found is None:
            raise SettingError(f"{where}: set the environment variable {value['env']}")
        return found
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

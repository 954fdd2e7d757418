"""The checks of `mdp-spark batch --check`: can each table, catalog and job of the catalogue be opened?"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...mdp.errors import SettingError
from ..session import reason
from .catalogue import Catalogue, Table
from .jobs import describe_parameters, load_jobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Check:
    """The outcome of one check, and what was found."""

    name: str
    well: bool
    found: str


def checks(session: "SparkSession", catalogue: Catalogue, jobs: Mapping[str, str]) -> Iterator[Check]:
    """Yield a check for each table, catalog and job, as soon as it is done."""
    for name, value in catalogue.settings.items():
        session.conf.set(name, value)
    for name, table in catalogue.tables.items():
        yield _checked(f"table {name}", partial(_open_table, session, table))
    for name in catalogue.catalogs:
        yield _checked(f"catalog {name}", partial(_open_catalog, session, name))
    for name in dict.fromkeys([*jobs, *load_jobs({})]):  # and those of installed packages
        yield _checked(f"job {name}", partial(_describe_job, name, jobs))


def _checked(name: str, work: Callable[[], str]) -> Check:
    try:
        return Check(name, True, work())
    except SettingError as error:
        return Check(name, False, str(error))
    except Exception as error:  # noqa: BLE001 - Spark, its data sources and a job's module can raise anything
        return Check(name, False, reason(error))


def _open_table(session: "SparkSession", table: Table) -> str:
    """Return the schema, after reading a row: only that opens a file of a table whose schema is given."""
    opened = table.read(session)
    opened.limit(1).collect()
    return opened.schema.simpleString().removeprefix("struct<").removesuffix(">")


def _open_catalog(session: "SparkSession", name: str) -> str:
    found = session.sql(f"SHOW NAMESPACES IN {name}").collect()
    return f"{len(found)} namespace{'s' * (len(found) != 1)}"


def _describe_job(name: str, jobs: Mapping[str, str]) -> str:
    own = {name: jobs[name]} if name in jobs else {}
    return f"takes {describe_parameters(load_jobs(own)[name])}"

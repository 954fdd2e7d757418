"""The checks of `mdp-spark batch --check`: can each table, catalog and job of the catalogue be opened?"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...reasons import reason
from ..parsing import job_targets, load_job, parameters_of
from .catalogue_file import Catalogue, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def checks(session: "SparkSession", catalogue: Catalogue, jobs: Mapping[str, str]) -> Iterator[tuple[str, bool, str]]:
    """Open each table, catalog and job, those of installed packages as well.

    Yield, one by one, its name, whether it could be opened, and what was found, or the error.
    """
    for name, value in catalogue.settings.items():
        session.conf.set(name, value)
    openers: dict[str, Callable[[], str]] = {}
    openers |= {f"table {name}": partial(_open_table, session, table) for name, table in catalogue.tables.items()}
    openers |= {f"catalog {name}": partial(_open_catalog, session, name) for name in catalogue.catalogs}
    openers |= {f"job {name}": partial(_open_job, name, target) for name, target in job_targets(jobs).items()}
    for name, open_ in openers.items():
        try:
            yield name, True, open_()
        except Exception as error:  # noqa: BLE001 - Spark, its data sources and a job's module can raise anything
            yield name, False, reason(error)


def _open_table(session: "SparkSession", table: Table) -> str:
    """Return the schema, after reading a row: only that opens a file of a table whose schema is given."""
    opened = table.read(session)
    opened.limit(1).collect()
    return opened.schema.simpleString().removeprefix("struct<").removesuffix(">")


def _open_catalog(session: "SparkSession", name: str) -> str:
    found = session.sql(f"SHOW NAMESPACES IN {name}").collect()
    return f"{len(found)} namespace{'s' * (len(found) != 1)}"


def _open_job(name: str, target: str) -> str:
    return f"takes ({parameters_of(load_job(name, target))})"

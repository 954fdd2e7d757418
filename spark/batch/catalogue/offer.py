"""The tables and jobs that a batch offers until it is reloaded, and the checks of `mdp-spark batch --check`."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ....workers import Request
from ...reasons import reason
from .catalogue_file import Catalogue, Table
from .inferred_schemas import Schemas
from .named_jobs import job_targets, load_job, parameters_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Offer:
    """The catalogue, the functions of the named jobs, and the schemas that Spark has inferred.

    A request keeps the offer that was current when it began.
    """

    catalogue: Catalogue = field(default_factory=Catalogue)
    jobs: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    schemas: Schemas = field(default_factory=Schemas)

    def jobs_for(self, request: Request) -> dict[str, Callable[..., Any]]:
        """Return the jobs that the sender of a request may run."""
        role = self.catalogue.role_of(request)
        return {name: function for name, function in self.jobs.items() if role.may_run(name)}

    @property
    def digest(self) -> str:
        """Return a text that is the same for equal catalogues, apart from secrets and the folder for results."""
        jobs = {name: f"{each.__module__}:{getattr(each, '__qualname__', '')}" for name, each in self.jobs.items()}
        offered = _sorted(asdict(replace(self.catalogue, jobs=jobs, results=None)))
        return hashlib.sha256(repr(offered).encode(errors="replace")).hexdigest()[:16]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many tables, catalogs and jobs there are."""
        catalogue = self.catalogue
        return {"tables": len(catalogue.tables), "catalogs": len(catalogue.catalogs), "jobs": len(self.jobs)}


def _sorted(value: Any) -> Any:
    """Return dicts as sorted lists."""
    return sorted((name, _sorted(each)) for name, each in value.items()) if isinstance(value, dict) else value


# ── mdp-spark batch --check ──────────────────────────────────────────────────────────────────────────────────────────


def checks(session: "SparkSession", catalogue: Catalogue, jobs: Mapping[str, str]) -> Iterator[tuple[str, bool, str]]:
    """Open each table, catalog and job, those of installed packages as well.

    Yield, one by one, its name, whether it could be opened, and a description or the error.
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

"""What a batch offers its callers until it is reloaded."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ....workers import Request
from .catalogue_file import Catalogue
from .inferred_schemas import Schemas


@dataclass(frozen=True, slots=True)
class Offer:
    """The catalogue, the functions of the named jobs, and what Spark has inferred of the tables.

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

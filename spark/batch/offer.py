"""What a batch offers its callers until it is reloaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...workers import Request
from .catalogue import Catalogue
from .schemas import Schemas


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
    def counts(self) -> dict[str, int]:
        """Return how many tables, catalogs and jobs there are."""
        catalogue = self.catalogue
        return {"tables": len(catalogue.tables), "catalogs": len(catalogue.catalogs), "jobs": len(self.jobs)}

"""Which tables and jobs a role of the broker may use: `[roles.NAME]` in the catalogue."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ....mdp.codes import Code
from ....mdp.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Role:
    """The tables and jobs that callers of a role may use.

    Args:
        name: The role's name; empty if the broker has no access control.
        tables: Patterns of the tables that its queries may read, as in `fnmatch`, case-sensitive: `orders`,
            `lake.shop.*`.
        jobs: Patterns of the jobs that it may run.
    """

    name: str
    tables: Sequence[str] = ()
    jobs: Sequence[str] = ()

    @property
    def reads_everything(self) -> bool:
        """Whether there is no table that it may not read."""
        return "*" in self.tables

    def may_read(self, *name: str) -> bool:
        """Return whether its queries may read a table, given the parts of its name."""
        # A part with a dot stays apart from two parts.
        full = ".".join(f"`{part}`" if "." in part or "`" in part else part for part in name)
        return any(fnmatchcase(full, pattern) for pattern in self.tables)

    def readable(self, names: Iterable[str]) -> list[str]:
        """Return those tables that it may read, sorted."""
        return sorted(filter(self.may_read, names))

    def may_run(self, job: str) -> bool:
        """Return whether it may run a job."""
        return any(fnmatchcase(job, pattern) for pattern in self.jobs)

    @property
    def title(self) -> str:
        """The role's name in errors."""
        return f"role {self.name}" if self.name else "callers without a role"

    def refusal(self, *name: str) -> ServiceError:
        """Return the error for a table that it may not read."""
        why = "" if self.name else ": the catalogue has [roles], and the broker no access control"
        return ServiceError(Code.NOT_ALLOWED, f"{self.title} may not read {'.'.join(name)}{why}")


ROLES_NEED_PLAN: Final = (
    "the batch cannot see which tables a query reads on a Spark Connect server, which has to authorise them itself. "
    'Give the role tables = ["*"] there, or run the batch with --master'
)
EVERYTHING = Role("", ("*",), ("*",))
"""The role of admins, and of everyone if the catalogue has no roles."""

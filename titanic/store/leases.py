"""Leases: which Titanic holds requests, and until when."""

from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .tables import OWNERS, W, for_both_dialects


class Lease(NamedTuple):
    """The owner of a claimed request, and when its lease ends."""

    owner: str
    until: float


def _renewal(insert: Any) -> sa.Executable:
    entered = insert(OWNERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[W.owner], set_={"lease": entered.excluded.lease}, where=W.lease < entered.excluded.lease
    )
    return found


_RENEW: Final = for_both_dialects(_renewal)


def renew(connection: Connection, lease: Lease) -> None:
    """Extend the lease, or begin it."""
    connection.execute(_RENEW[connection.dialect.name], {"owner": lease.owner, "lease": lease.until})

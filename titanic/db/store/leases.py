"""Leases: which Titanic holds requests, and until when; and the clock by which they end."""

import time
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .tables import HOLDERS, W, for_both_dialects


class Clock:
    """The clock of the database's host, on which all its Titanics agree."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        """How many seconds the database's clock is ahead of this host's monotonic clock."""

    def now(self) -> float:
        """Return seconds since 1970: by this host's clock until `set` is called."""
        # This host's clock may be stepped; until it is compared again, keys would seem to have expired.
        return time.time() if self._ahead is None else time.monotonic() + self._ahead

    def set(self, now: float) -> None:
        """Set it to what the database's clock says."""
        self._ahead = now - time.monotonic()


class Lease(NamedTuple):
    """A Titanic's lease on the requests that it has claimed, and its length in seconds."""

    holder: str
    seconds: float


def _renewal(insert: Any) -> sa.Executable:
    entered = insert(HOLDERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[W.holder],
        set_={"lease": entered.excluded.lease, "seconds": entered.excluded.seconds},
        where=W.lease < entered.excluded.lease,
    )
    return found


_RENEW: Final = for_both_dialects(_renewal)


def renew(connection: Connection, lease: Lease, now: float) -> None:
    """Extend the lease, or begin it."""
    given = {"holder": lease.holder, "lease": now + lease.seconds, "seconds": lease.seconds}
    connection.execute(_RENEW[connection.dialect.name], given)


_LATEST: Final = W.lease - W.seconds * sa.literal_column("2")


def is_invalid(now: float) -> sa.ColumnElement[bool]:
    """Return the condition that a lease ends too late: it was taken by a clock that was ahead.

    A Titanic's clock may be ahead of another's by as much as the lease is long.
    """
    return now < _LATEST

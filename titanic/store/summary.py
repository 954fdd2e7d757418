"""Count what is in the database, from its partial indexes, however many requests have ended."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .models import STATES
from .tables import HOLDERS, REQUESTS, R, W, is_in


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in the database at one moment."""

    requests: dict[str, int]
    """How many requests are in each state."""
    oldest_pending_seconds: float
    """Seconds for which the oldest pending request could have run already; 0 if there is none."""
    titanics: int
    """Titanics whose lease on their requests has not expired: those that have requests, or had some lately."""


def summarize(connection: Connection, now: float) -> Summary:
    """Count requests and Titanics."""
    counts = {state: _count(connection, is_in(state)) for state in STATES if state != "done"}
    # No index has those that are done, but one has all that have ended.
    counts["done"] = max(_count(connection, R.ended.is_not(None)) - counts["failed"], 0)
    due = connection.scalar(sa.select(sa.func.min(R.due)).where(is_in("pending")))
    titanics = connection.scalar(sa.select(sa.func.count()).select_from(HOLDERS).where(W.lease > now)) or 0
    oldest = 0.0 if due is None else max(0.0, round(now - due, 3))
    return Summary({state: counts[state] for state in STATES}, oldest, titanics)


def _count(connection: Connection, where: sa.ColumnElement[bool]) -> int:
    return connection.scalar(sa.select(sa.func.count()).select_from(REQUESTS).where(where)) or 0

"""What is in the database at one moment, from the counts that are kept."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .counts import counted, totals
from .models import STATES
from .tables import HOLDERS, W


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
    rows = counted(connection)
    found = totals(rows)
    due = min((row.due for row in rows if row.due is not None), default=now)
    titanics = connection.scalar(sa.select(sa.func.count()).select_from(HOLDERS).where(W.lease > now)) or 0
    return Summary({state: found[state] for state in STATES}, max(0.0, round(now - due, 3)), titanics)

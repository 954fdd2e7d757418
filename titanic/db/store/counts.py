"""How many requests there are, by service and state: kept by triggers in the transactions that change the requests.

`migrations/versions/0001_tables.py` has the triggers.
"""

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .models import COUNT_CHANGES, COUNTS, KEYS_STATE, NOT_ENDED, PARTIALS_STATE, STATES, R, is_in

FOLDED: Final = 5000
"""Maximum number of changes that are added to the counts at a time."""
_NUMBERS: Final = ("requests", "attempts", "deaths")
_FOLD_LOCK: Final = 0x7A6D6475
"""Key of the PostgreSQL advisory lock of the Titanic that adds the changes to the counts: others need not wait."""
_FOLD: Final = f"""
    WITH changes AS (
        DELETE FROM titanic_count_changes
        WHERE id IN (SELECT id FROM titanic_count_changes ORDER BY id LIMIT {FOLDED})
        RETURNING service, state, requests, attempts, deaths
    ), added AS (
        INSERT INTO titanic_counts AS counts (service, state, requests, attempts, deaths)
        SELECT service, state, sum(requests), sum(attempts), sum(deaths) FROM changes GROUP BY service, state
        ON CONFLICT (service, state) DO UPDATE SET requests = counts.requests + excluded.requests,
            attempts = counts.attempts + excluded.attempts, deaths = counts.deaths + excluded.deaths
    )
    SELECT count(*) FROM changes
"""  # noqa: S608 - our own


def fold(connection: Connection) -> bool:
    """Add some of the changes to the counts, and delete counts of nothing.  Return whether there may be more."""
    folded = 0
    if connection.dialect.name == "postgresql":
        if not connection.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(_FOLD_LOCK))):
            return False
        folded = connection.exec_driver_sql(_FOLD).scalar() or 0
    connection.execute(sa.delete(COUNTS).where(COUNTS.c.requests == sa.literal_column("0")))
    return folded == FOLDED


def _counts() -> sa.Subquery:
    """Return the counts with all changes; those of nothing are left out."""
    columns = ("service", "state", *_NUMBERS)
    both = sa.union_all(*(sa.select(*(table.c[each] for each in columns)) for table in (COUNTS, COUNT_CHANGES)))
    each = both.subquery()
    sums = [sa.cast(sa.func.sum(each.c[name]), sa.BigInteger).label(name) for name in _NUMBERS]
    found = sa.select(each.c.service, each.c.state, *sums).group_by(each.c.service, each.c.state)
    return found.having(sa.func.sum(each.c.requests) != sa.literal_column("0")).subquery()


def _oldest() -> sa.Select[Any]:
    counts = _counts()
    due = sa.select(sa.func.min(R.due)).where(is_in("pending"), R.service == counts.c.service).scalar_subquery()
    created = sa.select(sa.func.min(R.created)).where(R.ended.is_(None), R.service == counts.c.service)
    return sa.select(
        *counts.c,
        sa.case((counts.c.state == "pending", due)).label("due"),
        sa.case((counts.c.state.in_(NOT_ENDED), created.scalar_subquery())).label("oldest"),
    ).order_by(counts.c.service)


_COUNTED: Final = _oldest()


def counted(connection: Connection) -> Sequence[sa.Row[Any]]:
    """Return the counts: `service`, `state`, `requests`, and the sums of their `attempts` and `deaths`.

    `due` is when the first of the pending requests could have run; `oldest` is when the first of the service's requests
    that have not ended was created.  Keys and PARTIALs are counted as well, in the states `KEYS_STATE` and
    `PARTIALS_STATE`.
    """
    return connection.execute(_COUNTED).all()


def _waiting() -> sa.Select[Any]:
    counts = _counts()
    number = sa.cast(sa.func.sum(counts.c.requests), sa.BigInteger)
    return sa.select(counts.c.service, number).where(counts.c.state.in_(NOT_ENDED)).group_by(counts.c.service)


_WAITING: Final = _waiting()


def count_waiting(connection: Connection) -> dict[str, int]:
    """Return how many requests of each service have not ended."""
    return {service: count for service, count in connection.execute(_WAITING)}  # noqa: C416 - rows


def totals(rows: Sequence[sa.Row[Any]]) -> dict[str, int]:
    """Return the sums of what `counted` returned, by state."""
    found = dict.fromkeys((*STATES, KEYS_STATE, PARTIALS_STATE), 0)
    for row in rows:
        found[row.state] += row.requests
    return found

"""Periodic maintenance: due requests, expired leases, results and keys, and information for the dispatcher."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .leases import Lease, renew
from .tables import KEYS, OWNERS, REQUESTS, K, R, W, is_in

MAX_SWEEP_ROWS: Final = 5000
"""Maximum number of rows of each kind that one call changes or deletes."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The dispatcher's input for one round of maintenance."""

    lease: Lease
    """The dispatcher's lease from now on."""
    now: float
    renew: bool
    """Whether to store the lease."""
    count_up_to: int | None
    """Count the requests that have not ended, up to this number; None: do not count."""
    offered: tuple[str, ...] = ()
    """Services that have workers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Information for the dispatcher."""

    owned: dict[int, int]
    """The requests that this Titanic is running, and the numbers of their attempts."""
    services: list[str]
    """The offered services that have pending requests."""
    next_due: float | None
    """When the next delayed request is due."""
    waiting: int | None
    """How many requests have not ended."""
    clock_ahead: float
    """Seconds by which the database's clock is ahead of this host's."""
    more: bool = False
    """Whether there was more to do than one call does."""


def maintain(connection: Connection, batch: Sequence[Maintenance]) -> list[Findings]:
    """Make requests pending that are due or whose lease has expired; delete expired results and keys."""
    return [_maintain(connection, each) for each in batch]


def _maintain(connection: Connection, asked: Maintenance) -> Findings:
    if asked.renew:
        renew(connection, asked.lease)
    living = sa.select(W.owner).where(W.lease > asked.now)
    due = _unlocked(connection, [R.id], sa.and_(is_in("delayed"), R.due <= asked.now))
    lapsed = _unlocked(connection, [R.id], sa.and_(is_in("running"), R.owner.not_in(living)))
    if due or lapsed:
        back = [row.id for row in (*due, *lapsed)]
        connection.execute(sa.update(REQUESTS).where(R.id.in_(back)).values(state="pending", owner=None))
    for table, key, over in (
        (REQUESTS, [R.id], R.expires <= asked.now),
        (KEYS, [K.service, K.key], K.expires <= asked.now),
        (OWNERS, [W.owner], W.lease <= asked.now),
    ):
        old = _unlocked(connection, key, over)
        if old:
            connection.execute(sa.delete(table).where(over, sa.tuple_(*key).in_([tuple(row) for row in old])))
    owned = connection.execute(sa.select(R.id, R.attempts).where(is_in("running"), R.owner == asked.lease.owner))
    return Findings(
        owned={each.id: each.attempts for each in owned},
        services=pending_services(connection, asked.offered),
        next_due=connection.scalar(sa.select(sa.func.min(R.due)).where(is_in("delayed"))),
        waiting=None if asked.count_up_to is None else count_waiting(connection, asked.count_up_to),
        clock_ahead=_clock_ahead(connection),
        more=max(len(due), len(lapsed)) == MAX_SWEEP_ROWS,
    )


def _unlocked(connection: Connection, columns: Sequence[Any], where: Any) -> Sequence[sa.Row[Any]]:
    """Return some of the rows, without those that another program has locked: it may be frozen."""
    found = sa.select(*columns).where(where).limit(MAX_SWEEP_ROWS).with_for_update(skip_locked=True)
    return connection.execute(found).all()


def _clock_ahead(connection: Connection) -> float:
    if connection.dialect.name == "sqlite":
        return 0.0  # the file belongs to this host
    return float(connection.scalar(_DATABASE_TIME) or 0) - time.time()


_DATABASE_TIME: Final = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))


def pending_services(connection: Connection, offered: Sequence[str]) -> list[str]:
    """Return the services that have pending requests: one index lookup per service, however many requests there are."""
    if not offered:
        return []
    names = sa.values(sa.column("service", sa.Text), name="offered").data([(name,) for name in offered]).cte("offered")
    some = sa.exists().where(is_in("pending"), R.service == names.c.service)
    return list(connection.scalars(sa.select(names.c.service).where(some)))


def pending_after(connection: Connection, batch: Sequence[tuple[str, int]]) -> list[list[str]]:
    """For each name and limit, return that many services with pending requests whose names come after it, in order."""
    return [_pending_after(connection, *each) for each in batch]


def _pending_after(connection: Connection, after: str, limit: int) -> list[str]:
    first = sa.select(sa.func.min(R.service).label("service")).where(is_in("pending"), R.service > after)
    each = first.cte("each", recursive=True)
    following = sa.select(sa.func.min(R.service)).where(is_in("pending"), R.service > each.c.service).scalar_subquery()
    each = each.union_all(sa.select(following).where(each.c.service.is_not(None)))
    return list(connection.scalars(sa.select(each.c.service).where(each.c.service.is_not(None)).limit(limit)))


def count_waiting(connection: Connection, maximum: int) -> int:
    """Count the requests that have not ended, up to `maximum`."""
    counted = 0
    for state in ("pending", "delayed", "running"):
        rows = sa.select(sa.literal_column("1")).where(is_in(state)).limit(maximum - counted).subquery()
        counted += connection.scalar(sa.select(sa.func.count()).select_from(rows)) or 0
    return counted

"""Periodic maintenance: due requests, expired leases, results and keys, and information for the dispatcher."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .claims import Clock, Lease, is_invalid, renew
from .counts import count_waiting, fold
from .models import HOLDERS, KEYS, REQUESTS, K, R, W, is_in

SWEEP_ROWS: Final = 200
"""How many rows of a kind are changed or deleted at a time."""
SWEEP_SECONDS: Final = 0.01
"""How long one call goes on doing that.  Requests that are to be stored wait for it, so it is the next call that
continues."""
MAX_BACKOFF_SECONDS: Final = 3600.0
"""The longest pause before another attempt, without its jitter."""


@dataclass(frozen=True, slots=True)
class MaintenanceRound:
    """The dispatcher's input for one round of maintenance."""

    lease: Lease
    """The dispatcher's lease from now on."""
    clock: Clock
    """On PostgreSQL, it is set by the server's clock first."""
    renew_at: float
    """When to renew the lease, on the monotonic clock; the transaction may begin much later than it was asked for."""
    count: bool
    """Whether to count the requests of each service that have not ended."""
    offered: tuple[str, ...] = ()
    """Services that have workers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Information for the dispatcher."""

    held: dict[int, int]
    """The requests that this Titanic is running, and the numbers of their attempts."""
    services: dict[str, bool]
    """The offered services that have pending requests, and whether some of these have a group."""
    next_due: float | None
    """When the next delayed request is due."""
    waiting: dict[str, int] | None
    """How many requests of each service have not ended."""
    more: bool = False
    """Whether there was more to do than one call does."""


def maintain(connection: Connection, batch: Sequence[MaintenanceRound]) -> list[Findings]:
    """Make requests pending that are due or whose lease has expired; delete expired results and keys."""
    return [_maintain(connection, each) for each in batch]


def _maintain(connection: Connection, asked: MaintenanceRound) -> Findings:
    set_clock(connection, asked.clock)
    now = asked.clock.now()
    if time.monotonic() >= asked.renew_at:
        renew(connection, asked.lease, now)
    _shorten_leases(connection, now)
    living = sa.select(W.holder).where(W.lease > now)
    # The Titanic that asks is alive, even if the clock was set ahead beyond the end of its lease.
    orphaned = sa.and_(is_in("running"), R.holder != asked.lease.holder, R.holder.not_in(living))
    # A request may be delayed for years, but not a retry: its time comes from a clock that was ahead.
    far = sa.and_(is_in("delayed"), R.attempts > sa.literal_column("0"), R.due > now + 2 * MAX_BACKOFF_SECONDS)
    steps = [
        partial(_put_back, connection, sa.and_(is_in("delayed"), R.due <= now), R.due),
        partial(_put_back, connection, far, R.due),
        partial(_put_back, connection, orphaned, R.holder),
        partial(_delete, connection, REQUESTS, [R.id], R.expires, now),
        partial(_delete, connection, KEYS, [K.service, K.key, K.owner], K.expires, now),
        partial(_delete, connection, HOLDERS, [W.holder], W.lease, now),
    ]
    more = _sweep(steps, time.monotonic() + SWEEP_SECONDS)
    more |= fold(connection)
    held = connection.execute(sa.select(R.id, R.attempts).where(is_in("running"), R.holder == asked.lease.holder))
    return Findings(
        held={each.id: each.attempts for each in held},
        services=pending_services(connection, asked.offered),
        next_due=connection.scalar(sa.select(sa.func.min(R.due)).where(is_in("delayed"))),
        waiting=count_waiting(connection) if asked.count else None,
        more=more,
    )


def _sweep(steps: Sequence[Callable[[], int]], until: float) -> bool:
    """Repeat steps, each of which returns how many rows it has handled.  Return whether some rows are left."""
    while steps := [step for step in steps if step() == SWEEP_ROWS]:
        if time.monotonic() >= until:
            return True
    return False


def _put_back(connection: Connection, where: Any, order: Any) -> int:
    """Make some of these requests pending, and return how many."""
    some = [row.id for row in _unlocked(connection, [R.id], where, order)]
    if some:
        connection.execute(sa.update(REQUESTS).where(R.id.in_(some)).values(state="pending", holder=None))
    return len(some)


def _delete(connection: Connection, table: sa.Table, key: Sequence[Any], end: Any, now: float) -> int:
    """Delete some of the rows whose `end` has come, and return how many."""
    some = [tuple(row) for row in _unlocked(connection, key, end <= now, end)]
    if some:
        connection.execute(sa.delete(table).where(end <= now, sa.tuple_(*key).in_(some)))
    return len(some)


def _shorten_leases(connection: Connection, now: float) -> None:
    """Shorten leases that end too late.  If its Titanic is alive, it renews the lease before it ends."""
    invalid = _unlocked(connection, [W.holder], is_invalid(now), W.lease)
    if invalid:
        holders = [row.holder for row in invalid]
        connection.execute(sa.update(HOLDERS).where(W.holder.in_(holders)).values(lease=W.seconds + now))


def _unlocked(connection: Connection, columns: Sequence[Any], where: Any, order: Any) -> Sequence[sa.Row[Any]]:
    """Return the first of the rows, without those that another program has locked: it may be frozen.

    Without an order that an index has, PostgreSQL would read the whole table if it was not analyzed yet: it then
    expects to find some rows soon.
    """
    found = sa.select(*columns).where(where).order_by(order).limit(SWEEP_ROWS).with_for_update(skip_locked=True)
    return connection.execute(found).all()


def set_clock(connection: Connection, clock: Clock) -> None:
    """Set the clock by that of the database's host.  A SQLite file is on this host."""
    if connection.dialect.name != "sqlite":
        clock.set(float(connection.scalar(_DATABASE_TIME) or 0))


_DATABASE_TIME: Final = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))


_OFFERED: Final = sa.func.json_each(sa.bindparam("offered", type_=sa.JSON)).table_valued("key", name="offered")
"""The keys of an object: SQLAlchemy would compile a VALUES anew each time, which leaves a lot of garbage."""
# Not max(), for which PostgreSQL may read all pending requests if it expects few.
_LAST_GROUP: Final = (
    sa.select(R.group_name)
    .where(is_in("pending"), R.service == _OFFERED.c.key)
    .order_by(R.group_name.desc())
    .limit(sa.literal_column("1"))
)
_PENDING: Final = sa.select(_OFFERED.c.key, _LAST_GROUP.correlate(_OFFERED).scalar_subquery())


def pending_services(connection: Connection, offered: Sequence[str]) -> dict[str, bool]:
    """Return the services that have pending requests, and whether some of these have a group.

    It is one index lookup per service, however many requests there are.
    """
    found = connection.execute(_PENDING, {"offered": dict.fromkeys(offered, 0)})
    return {service: group != "" for service, group in found if group is not None}


def pending_after(connection: Connection, batch: Sequence[tuple[str, int]]) -> list[list[str]]:
    """For each name and limit, return that many services with pending requests whose names come after it, in order."""
    return [_pending_after(connection, *each) for each in batch]


def _pending_after(connection: Connection, after: str, limit: int) -> list[str]:
    return list(connection.scalars(_PENDING_AFTER, {"after": after, "limit": limit}))


def _each_pending() -> sa.Select[Any]:
    """Select the first services with pending requests whose names come after `after`, in order."""
    after, limit = sa.bindparam("after", type_=sa.Text), sa.bindparam("limit", type_=sa.Integer)
    first = sa.select(sa.func.min(R.service).label("service")).where(is_in("pending"), R.service > after)
    each = first.cte("each", recursive=True)
    following = sa.select(sa.func.min(R.service)).where(is_in("pending"), R.service > each.c.service).scalar_subquery()
    each = each.union_all(sa.select(following).where(each.c.service.is_not(None)))  # NULL at the end
    return sa.select(each.c.service).where(each.c.service.is_not(None)).limit(limit)


_PENDING_AFTER: Final = _each_pending()

"""Requests that many processes write in one operation: each stages its own, and all are accepted together, exactly
once.

Each attempt of a task begins a staging and adds rows to it.  The driver of the write commits the successful stagings in
one transaction; the others are deleted later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ....mdp.errors import TitanicError
from .models import KEYS, REQUESTS, K, Staged, Staging, Written

STAGING: Final = cast(sa.Table, Staging.__table__)
STAGED: Final = cast(sa.Table, Staged.__table__)
WRITTEN: Final = cast(sa.Table, Written.__table__)
G, S, T = STAGING.c, STAGED.c, WRITTEN.c
MAX_IDLE_SECONDS: Final = 86400.0
"""Age from which an unchanged staging is considered abandoned, because its driver died."""
WRITTEN_SECONDS: Final = 366 * 86400.0
"""How long a committed write is remembered."""
CHUNK: Final = 20_000
"""Number of staged rows to delete in one transaction."""
OF_OTHERS: Final = 100_000
"""Maximum number of abandoned rows that one sweep deletes."""
SORT_MEMORY: Final = "128MB"
"""Memory in which PostgreSQL sorts the keys of a write.  The default of 4 MB would double the time."""


class StagingLost(TitanicError):
    """Staged rows are missing.  Nothing was written."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code=500)


class OtherQuery(TitanicError):
    """Another stream has written to the sink.  Nothing was written."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code=500)


@dataclass(frozen=True, slots=True)
class Write:
    """A write that happens once: a job's, or a stream's micro-batch."""

    kind: str
    """`job` or `sink`."""
    name: str
    batch: int = 0
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A successful attempt."""

    staging: int
    rows: int


# ── staging ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin(connection: Connection, write: str, now: float) -> int:
    """Begin a staging for an attempt to write part of `write`, and return its id."""
    return int(connection.execute(sa.insert(STAGING).values(write=write, touched=now).returning(G.id)).scalar_one())


def touch(staging: int, now: float) -> str:
    """Return the statement to execute in each transaction that stages rows.  It returns no row if the write has ended
    without this attempt, whose rows are then not wanted."""
    return f"UPDATE titanic_staging SET touched = {now!r} WHERE id = {staging:d} AND touched > 0 RETURNING id"  # noqa: S608


def discard(connection: Connection, stagings: Sequence[int]) -> None:
    """Abandon stagings: the next sweep deletes them."""
    connection.execute(sa.update(STAGING).where(_among(G.id, stagings)).values(touched=0.0))


def discard_write(connection: Connection, write: str) -> None:
    """Abandon all stagings of `write`."""
    connection.execute(sa.update(STAGING).where(G.write == write).values(touched=0.0))


def _among(column: Any, numbers: Sequence[int]) -> sa.ColumnElement[bool]:
    """Return an IN condition without parameters: a write may have more tasks than a statement may have parameters."""
    found: sa.ColumnElement[bool] = column.in_(sa.bindparam(None, list(numbers), expanding=True, literal_execute=True))
    return found


# ── accepting ────────────────────────────────────────────────────────────────────────────────────────────────────────

_NOW: Final = sa.bindparam("now", type_=sa.Double)
_DUE: Final = sa.func.coalesce(S.due, _NOW + sa.func.coalesce(S.delay, 0.0))
_REQUEST: Final = {
    "uuid": S.uuid,
    "service": S.service,
    "state": sa.case((_DUE > _NOW, "delayed"), else_="pending"),
    "priority": S.priority,
    "created": _NOW,
    "due": sa.case((_DUE > _NOW, _DUE), else_=_NOW),
    "attempts": sa.literal_column("0"),
    "failures": sa.literal_column("0"),
    "deaths": sa.literal_column("0"),
    "retries": S.retries,
    "backoff": S.backoff,
    "result_ttl": S.result_ttl,
    "key": S.key,
    "headers": S.headers,
    "body": S.body,
    "group_name": sa.func.coalesce(S.group_name, sa.literal_column("''")),
}


def was_committed(connection: Connection, write: Write) -> bool:
    """Return whether `write`, or a later batch of its sink, was already committed."""
    later = sa.select(T.name).where(T.kind == write.kind, T.name == write.name, T.batch >= write.batch)
    return connection.scalar(later.where(T.query.is_not_distinct_from(write.query))) is not None


def count_by_service(connection: Connection, accepted: Sequence[Accepted]) -> dict[str, int]:
    """Return how many rows these attempts have staged for each service."""
    stagings = [each.staging for each in accepted]
    rows = sa.select(S.service, sa.func.count()).where(_among(S.staging, stagings)).group_by(S.service)
    return {service: count for service, count in connection.execute(rows)}  # noqa: C416 - rows


def commit(connection: Connection, write: Write | None, accepted: Sequence[Accepted], now: float) -> bool:
    """Accept the requests that these attempts have staged, as `store.accept` would.

    Returns False if `write` was already committed.

    Raises:
        StagingLost: Staged rows are missing.
        OtherQuery: Another stream has written to the sink.
    """
    rows = sum(each.rows for each in accepted)
    if write is not None and not _enter(connection, write, rows, now):
        return False
    stagings = [each.staging for each in accepted]
    if not stagings:
        return True
    taken = connection.execute(
        sa.update(STAGING).where(_among(G.id, stagings), G.touched > 0).values(touched=0.0)
    ).rowcount
    if taken != len(stagings):
        raise _lost(taken, len(stagings), "stagings")
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL work_mem = '{SORT_MEMORY}'")
    wanted: list[sa.ColumnElement[bool]] = []
    distinct = _enter_new_keys(connection, stagings, now)
    if not distinct:
        _enter_keys(connection, stagings, now)
        first = sa.exists().where(K.service == S.service, K.key == S.key, K.owner == "", K.uuid == S.uuid)
        wanted = [sa.or_(S.key.is_(None), first)]
    if connection.dialect.name == "postgresql":  # follow the primary key: sorting whole rows takes half as long again
        connection.exec_driver_sql("SET LOCAL enable_sort = off")
    there = 0
    for staging in stagings:
        chosen = sa.select(*_REQUEST.values()).where(S.staging == staging, *wanted).order_by(S.number)
        insert = sa.insert(REQUESTS).from_select(list(_REQUEST), chosen).execution_options(preserve_rowcount=True)
        there += connection.execute(insert, {"now": now}).rowcount
    if not distinct:
        there = connection.execute(sa.select(sa.func.count()).where(_among(S.staging, stagings))).scalar_one()
    if there != rows:
        raise _lost(there, rows, "staged rows")
    return True


def _lost(there: int, wanted: int, what: str) -> StagingLost:
    return StagingLost(
        f"only {there} of {wanted} {what} are left: they were older than {MAX_IDLE_SECONDS / 3600:.0f} h, "
        "or the database server has crashed; nothing was written, so write them again"
    )


def _enter_new_keys(connection: Connection, stagings: Sequence[int], now: float) -> bool:
    """Insert the keys of these stagings, and return whether they are all new and distinct; otherwise insert none."""
    found = sa.select(S.service, S.key, S.uuid, _NOW + S.key_ttl).where(_among(S.staging, stagings), S.key.is_not(None))
    try:
        with connection.begin_nested():
            connection.execute(_keys_from(connection, found, S.service, S.key), {"now": now})
    except sa.exc.IntegrityError:
        return False
    return True


def _enter_keys(connection: Connection, stagings: Sequence[int], now: float) -> None:
    """Insert the keys of these stagings that are new or have expired, each with its first request."""
    numbered = sa.func.row_number().over(partition_by=[S.service, S.key], order_by=[S.staging, S.number])
    keyed = sa.select(S.service, S.key, S.uuid, (_NOW + S.key_ttl).label("expires"), numbered.label("nth"))
    each = keyed.where(_among(S.staging, stagings), S.key.is_not(None)).subquery()
    first = sa.select(each.c.service, each.c.key, each.c.uuid, each.c.expires).where(each.c.nth == 1)
    entered = _keys_from(connection, first, each.c.service, each.c.key)
    replacing = entered.on_conflict_do_update(
        index_elements=[K.service, K.key, K.owner],
        set_={"uuid": entered.excluded.uuid, "expires": entered.excluded.expires},
        where=K.expires <= _NOW,
    )
    connection.execute(replacing, {"now": now})


def _keys_from(connection: Connection, keys: sa.Select[Any], *names: sa.ColumnElement[Any]) -> Any:
    """Return the statement that inserts `keys`, sorted by `names`, so that two writes with the same keys cannot
    deadlock; by bytes, because comparing text by the rules of a language takes several times as long."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(KEYS).from_select(["service", "key", "uuid", "expires"], keys.order_by(*names))
    ordered = keys.order_by(*(sa.collate(name, "C") for name in names))
    return postgresql.insert(KEYS).from_select(["service", "key", "uuid", "expires"], ordered)


def _enter(connection: Connection, write: Write, rows: int, now: float) -> bool:
    """Record `write` as committed, and return whether it is new."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    entered = insert(WRITTEN).values(
        kind=write.kind, name=write.name, batch=write.batch, query=write.query, requests=rows, committed=now
    )
    changed = {name: entered.excluded[name] for name in ("batch", "requests", "committed")}
    new = entered.on_conflict_do_update(
        index_elements=[T.kind, T.name],
        set_=changed,
        where=sa.and_(T.batch < entered.excluded.batch, T.query.is_not_distinct_from(entered.excluded.query)),
    ).returning(T.name)
    if connection.scalar(new) is not None:
        return True
    if was_committed(connection, write):
        return False
    raise OtherQuery(
        f"another stream has written to the sink {write.name!r}, or this one did with a checkpoint that was deleted: "
        f"it is unknown whether batch {write.batch} was written; give this stream a `sink` of its own"
    )


# ── sweeping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def clear(connection: Connection) -> bool:
    """Empty the table of staged rows if no write uses it, and return whether that was possible.

    This takes no longer for many rows than for few, and leaves no dead rows behind.  PostgreSQL only.
    """
    # Without waiting: others would queue up behind this lock.  Its holder sees every staging that has rows.
    connection.exec_driver_sql("LOCK TABLE titanic_staged IN ACCESS EXCLUSIVE MODE NOWAIT")
    if connection.scalar(sa.select(G.id).where(G.touched > 0).limit(1)) is not None:
        return False
    connection.exec_driver_sql("TRUNCATE titanic_staged")
    connection.execute(sa.delete(STAGING).where(G.touched == 0))
    return True


def sweep(connection: Connection, now: float) -> int | None:
    """Delete some abandoned rows and return how many, or None if nothing is left to do."""
    old = (
        sa.select(G.id).where(G.touched < now - MAX_IDLE_SECONDS).order_by(G.touched, G.id).limit(1)
        .with_for_update(skip_locked=True)
    )  # fmt: skip
    staging = connection.scalar(old)
    if staging is None:
        connection.execute(sa.delete(WRITTEN).where(T.committed < now - WRITTEN_SECONDS))
        return None
    first = connection.scalar(sa.select(sa.func.min(S.number)).where(S.staging == staging))
    if first is None:
        connection.execute(sa.delete(STAGING).where(G.id == staging))
        return 0
    return connection.execute(sa.delete(STAGED).where(S.staging == staging, S.number < first + CHUNK)).rowcount

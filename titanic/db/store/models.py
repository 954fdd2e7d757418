"""The tables: requests, PARTIALs of their replies, callers' keys, schedules, leases of Titanics, and what Spark writes.

Times are seconds since 1970 (UTC), with which both databases can calculate.  Bodies are packed frames
(`titanic/api/submission.py`).  All names begin with `titanic_`, because a program may have its own in the database.

A request goes through these states:

    delayed ──▶ pending ──▶ running ──▶ done
       ▲                       │  └───▶ failed
       └───────────────────────┘  (retried later)
"""

from collections.abc import Callable
from typing import Any, Final, cast
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Sequence,
    SmallInteger,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NOT_ENDED: Final = ("delayed", "pending", "running")
ENDED: Final = ("done", "failed")
"""The states in which a request stays."""
STATES: Final = (*NOT_ENDED, *ENDED)
KEYS_STATE: Final = "key"
PARTIALS_STATE: Final = "partial"
"""Under these, keys and PARTIALs are counted."""
VERSION_TABLE: Final = "titanic_version"
"""Alembic's version table.  Its default, `alembic_version`, may belong to a program that shares the database."""

_Id = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base of all tables."""


def _partial(name: str, where: str, *columns: object) -> Index:
    """Return a partial index, which stays small however many requests have ended."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))  # type: ignore[arg-type]


class StoredRequest(Base):
    """A request, from when it is accepted until it is closed."""

    __tablename__ = "titanic_requests"
    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    """Increases with each request; defines the order among equal priorities."""
    uuid: Mapped[UUID] = mapped_column(Uuid, unique=True)
    service: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger)
    """0 to 9; 9 runs first."""
    created: Mapped[float] = mapped_column(Double)
    due: Mapped[float] = mapped_column(Double)
    """The earliest time at which it may run."""
    started: Mapped[float | None] = mapped_column(Double)
    """When the latest attempt began."""
    finished: Mapped[float | None] = mapped_column(Double)
    expires: Mapped[float | None] = mapped_column(Double)
    """When the request is deleted; NULL for never."""
    holder: Mapped[str | None] = mapped_column(Text)
    """The Titanic that is running it, as in `Holder`."""
    attempts: Mapped[int] = mapped_column(Integer)
    """How often it was claimed.  With `holder`, it identifies an attempt, so that late outcomes are ignored."""
    failures: Mapped[int] = mapped_column(Integer)
    """How often the service's handler has failed."""
    retries: Mapped[int] = mapped_column(Integer)
    """How many failures of the handler are retried."""
    backoff: Mapped[float | None] = mapped_column(Double)
    """Seconds before the first retry; each further pause is twice as long.  NULL for the default."""
    result_ttl: Mapped[float | None] = mapped_column(Double)
    """Seconds to keep the result; NULL until it is closed."""
    key: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[str | None] = mapped_column(Text)
    """JSON."""
    code: Mapped[int | None] = mapped_column(SmallInteger)
    """The code of a failed request."""
    error: Mapped[str | None] = mapped_column(Text)
    """Why the request failed, or why its latest attempt did."""
    body: Mapped[bytes] = mapped_column(LargeBinary)
    reply: Mapped[bytes | None] = mapped_column(LargeBinary)
    """The body of the FINAL; for a failed request its detail, if the service gave one."""
    ended: Mapped[int | None] = mapped_column(BigInteger)
    """Increases with each request that ends, and is never reused; readers of a stream continue from it.  On PostgreSQL
    the commits may be in another order; on SQLite they are in this order."""
    deaths: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    """How many workers were lost while they handled it."""
    owner: Mapped[str] = mapped_column(Text, server_default=text("''"))
    """The role that submitted it, and on whose behalf it is executed; empty if the broker had no access control, or if
    a program wrote it into the database and named none."""
    group_name: Mapped[str] = mapped_column(Text, server_default=text("''"))
    """Whose turns and limits apply to it, here and at the broker; empty for none."""

    __table_args__ = (
        CheckConstraint("state IN ('delayed', 'pending', 'running', 'done', 'failed')", name="titanic_requests_state"),
        _partial("titanic_requests_ready", "state = 'pending'", "service", "group_name", priority.desc(), "id"),
        _partial("titanic_requests_due", "state = 'delayed'", "due"),
        _partial("titanic_requests_retry", "state = 'delayed' AND attempts > 0", "due"),
        _partial("titanic_requests_holder", "state = 'running'", "holder"),
        _partial("titanic_requests_failed", "state = 'failed'", "id"),
        _partial("titanic_requests_expires", "expires IS NOT NULL", "expires"),
        _partial("titanic_requests_owner", "owner <> ''", "owner", "id"),
        _partial("titanic_requests_ended", "ended IS NOT NULL", "ended"),
        _partial("titanic_requests_oldest_pending", "state = 'pending'", "service", "due"),
        _partial("titanic_requests_oldest", "ended IS NULL", "service", "created"),
        # The id of a closed request must not be reused: a late outcome would change another request.
        {"sqlite_autoincrement": True},
    )


class Count(Base):
    """How many requests of a service are in a state.  Triggers keep it."""

    __tablename__ = "titanic_counts"
    __table_args__ = (_partial("titanic_counts_zero", "requests = 0", "service"),)

    service: Mapped[str] = mapped_column(Text, primary_key=True)
    state: Mapped[str] = mapped_column(Text, primary_key=True)
    """The state of requests; `key` for keys, and `partial`, without a service, for PARTIALs."""
    requests: Mapped[int] = mapped_column(BigInteger)
    attempts: Mapped[int] = mapped_column(BigInteger)
    """The sum of the requests' attempts."""
    deaths: Mapped[int] = mapped_column(BigInteger)
    """The sum of the workers that were lost."""


class CountChange(Base):
    """A change to a count that was not added to it yet; on PostgreSQL only."""

    __tablename__ = "titanic_count_changes"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    service: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    requests: Mapped[int] = mapped_column(BigInteger)
    attempts: Mapped[int] = mapped_column(BigInteger)
    deaths: Mapped[int] = mapped_column(BigInteger)


class Identity(Base):
    """The database's identity, in a single row.  Titanics at one broker compare it: they must share a database."""

    __tablename__ = "titanic_identity"

    id: Mapped[str] = mapped_column(Text, primary_key=True)


class Holder(Base):
    """A Titanic that is running requests."""

    __tablename__ = "titanic_holders"

    holder: Mapped[str] = mapped_column(Text, primary_key=True)
    lease: Mapped[float] = mapped_column(Double)
    """When its lease on its requests ends.  If it does not renew the lease in time, it is considered dead."""
    seconds: Mapped[float] = mapped_column(Double)
    """The length of the lease.  A lease that ends much later than this from now was taken by a clock that was ahead."""


class StoredPartial(Base):
    """A PARTIAL of an attempt.  When another attempt begins, those of the earlier ones are deleted."""

    __tablename__ = "titanic_parts"

    request: Mapped[int] = mapped_column(_Id, ForeignKey(StoredRequest.id, ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Counted from 0."""
    body: Mapped[bytes] = mapped_column(LargeBinary)


class Key(Base):
    """The request that a key of an owner refers to.  The key outlives the request, so that the request is not executed
    again once closed."""

    __tablename__ = "titanic_keys"
    __table_args__ = (_partial("titanic_keys_expires", "expires IS NOT NULL", "expires"),)

    service: Mapped[str] = mapped_column(Text, primary_key=True)
    key: Mapped[str] = mapped_column(Text, primary_key=True)
    uuid: Mapped[UUID] = mapped_column(Uuid)
    expires: Mapped[float | None] = mapped_column(Double)
    """NULL for never."""
    owner: Mapped[str] = mapped_column(Text, primary_key=True, server_default=text("''"))
    """The role that submitted the key, or empty: owners do not share keys."""


class StoredSchedule(Base):
    """What is submitted again and again (`titanic/api/schedules.py`)."""

    __tablename__ = "titanic_schedules"
    __table_args__ = (_partial("titanic_schedules_next", "next IS NOT NULL", "next"),)

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    owner: Mapped[str] = mapped_column(Text, primary_key=True)
    """The role that added it, which the requests then belong to; owners do not share names."""
    service: Mapped[str] = mapped_column(Text)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    headers: Mapped[str | None] = mapped_column(Text)
    """JSON."""
    priority: Mapped[int] = mapped_column(SmallInteger)
    retries: Mapped[int] = mapped_column(Integer)
    backoff: Mapped[float | None] = mapped_column(Double)
    result_ttl: Mapped[float | None] = mapped_column(Double)
    cron: Mapped[str | None] = mapped_column(Text)
    """The cron expression; NULL if it has an interval."""
    every: Mapped[float | None] = mapped_column(Double)
    """The interval in seconds."""
    timezone: Mapped[str] = mapped_column(Text)
    missed: Mapped[str] = mapped_column(Text)
    """`skip`, `once` or `all`."""
    created: Mapped[float] = mapped_column(Double)
    """When it was added, where its interval begins."""
    next: Mapped[float | None] = mapped_column(Double)
    """The first occurrence that was not submitted yet; NULL while it is paused."""
    last: Mapped[float | None] = mapped_column(Double)
    """The latest occurrence, or when it was last run by hand."""
    last_uuid: Mapped[UUID | None] = mapped_column(Uuid)
    """The request that was then submitted."""
    seen: Mapped[float | None] = mapped_column(Double)
    """When workers of its service last declared it; NULL if they did not."""
    group_name: Mapped[str] = mapped_column(Text, server_default=text("''"))


ENDED_SEQUENCE: Final = Sequence("titanic_ended", metadata=Base.metadata)
"""The source of `StoredRequest.ended` on PostgreSQL."""


class Counter(Base):
    """A substitute for sequences, used on SQLite only."""

    __tablename__ = "titanic_counters"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)
    """The latest number that was used."""


# ── what Spark writes ────────────────────────────────────────────────────────────────────────────────────────────────


class Staging(Base):
    """A Spark task's attempt to write requests, until the write is committed or abandoned."""

    __tablename__ = "titanic_staging"
    __table_args__ = ({"sqlite_autoincrement": True},)  # an attempt's number must not be reused

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    write: Mapped[str] = mapped_column(Text)
    """The write that it is part of."""
    touched: Mapped[float] = mapped_column(Double)
    """When it last staged rows; 0 once they may be deleted."""


class Staged(Base):
    """A request that is accepted if its write is committed.

    The table is UNLOGGED on PostgreSQL: the commit counts the rows, and so detects those that a crash has lost.
    Durations are relative to the commit.
    """

    __tablename__ = "titanic_staged"

    staging: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Counted from 0, without gaps."""
    uuid: Mapped[UUID] = mapped_column(Uuid)
    service: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger)
    due: Mapped[float | None] = mapped_column(Double)
    delay: Mapped[float | None] = mapped_column(Double)
    retries: Mapped[int] = mapped_column(Integer)
    backoff: Mapped[float | None] = mapped_column(Double)
    result_ttl: Mapped[float | None] = mapped_column(Double)
    key: Mapped[str | None] = mapped_column(Text)
    key_ttl: Mapped[float | None] = mapped_column(Double)
    headers: Mapped[str | None] = mapped_column(Text)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    group_name: Mapped[str | None] = mapped_column(Text)


class Written(Base):
    """A write that was committed: a job's, or the latest of a stream.  If it is repeated, it is skipped."""

    __tablename__ = "titanic_written"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    """`job` or `sink`."""
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    batch: Mapped[int] = mapped_column(BigInteger)
    """The number of a stream's micro-batch; 0 for a job."""
    query: Mapped[str | None] = mapped_column(Text)
    """Spark's id of a stream's query, which lives as long as its checkpoint."""
    requests: Mapped[int] = mapped_column(BigInteger)
    """How many requests it wrote."""
    committed: Mapped[float] = mapped_column(Double)


# ── for statements ───────────────────────────────────────────────────────────────────────────────────────────────────

REQUESTS: Final = cast(sa.Table, StoredRequest.__table__)
PARTS: Final = cast(sa.Table, StoredPartial.__table__)
KEYS: Final = cast(sa.Table, Key.__table__)
HOLDERS: Final = cast(sa.Table, Holder.__table__)
COUNTERS: Final = cast(sa.Table, Counter.__table__)
COUNTS: Final = cast(sa.Table, Count.__table__)
COUNT_CHANGES: Final = cast(sa.Table, CountChange.__table__)
SCHEDULES: Final = cast(sa.Table, StoredSchedule.__table__)
R, P, K, W, S = REQUESTS.c, PARTS.c, KEYS.c, HOLDERS.c, SCHEDULES.c


def is_in(state: str) -> sa.ColumnElement[bool]:
    """Return the condition that a request is in `state`.

    The state is part of the SQL, not a parameter: otherwise the databases would not use the partial indexes.
    """
    return R.state == sa.literal_column(f"'{state}'")


def for_both_dialects(build: Callable[[Any], sa.Executable]) -> dict[str, sa.Executable]:
    """Return a statement with ON CONFLICT for each dialect, whose INSERT functions differ."""
    return {"sqlite": build(sqlite.insert), "postgresql": build(postgresql.insert)}

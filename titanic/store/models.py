"""The tables: what was accepted, the PARTIALs of its replies, callers' keys, the Titanics at work, and Spark's writes.

Times are seconds since 1970 (UTC), so that one arithmetic serves both databases.  Bodies are packed frames
(`titanic/frames.py`).  All names begin with `titanic_`: the tables may live beside those of the caller's own.

A request goes through these states:

    delayed ──▶ pending ──▶ running ──▶ done
       ▲                       │  └───▶ failed
       └───────────────────────┘  (tried again later)
"""

from typing import Final
from uuid import UUID

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
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

STATES: Final = ("delayed", "pending", "running", "done", "failed")
VERSION_TABLE: Final = "titanic_version"
"""Where Alembic keeps the version: not in `alembic_version`, which may be the caller's own."""

_Id = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """All tables of Titanic."""


def _partial(name: str, where: str, *columns: object) -> Index:
    """An index of only those rows that it is for: it stays small however many requests are done."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))  # type: ignore[arg-type]


class Request(Base):
    """One request, from when it is accepted until it is closed."""

    __tablename__ = "titanic_requests"
    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    """Grows with each request: what FIFO goes by."""
    uuid: Mapped[UUID] = mapped_column(Uuid, unique=True)
    service: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger)
    """0 to 9; 9 goes first."""
    created: Mapped[float] = mapped_column(Double)
    due: Mapped[float] = mapped_column(Double)
    """Not before this."""
    started: Mapped[float | None] = mapped_column(Double)
    """When the latest attempt began."""
    finished: Mapped[float | None] = mapped_column(Double)
    expires: Mapped[float | None] = mapped_column(Double)
    """When the reply is thrown away by itself; NULL for never."""
    owner: Mapped[str | None] = mapped_column(Text)
    """The Titanic that has it, while it is running."""
    attempts: Mapped[int] = mapped_column(Integer)
    """How often it was given to a service; with `owner`, what makes a late outcome known as such."""
    failures: Mapped[int] = mapped_column(Integer)
    """How often the service's handler failed."""
    retries: Mapped[int] = mapped_column(Integer)
    """How many failures are tried again."""
    backoff: Mapped[float | None] = mapped_column(Double)
    """Seconds before the first of these; each further pause is twice as long.  NULL for the default."""
    result_ttl: Mapped[float | None] = mapped_column(Double)
    """Seconds that the reply is kept; NULL for until it is closed."""
    key: Mapped[str | None] = mapped_column(Text)
    headers: Mapped[str | None] = mapped_column(Text)
    """JSON."""
    code: Mapped[int | None] = mapped_column(SmallInteger)
    """Of a failed request."""
    error: Mapped[str | None] = mapped_column(Text)
    """Of a failed request, or why the latest attempt did not do."""
    body: Mapped[bytes] = mapped_column(LargeBinary)
    reply: Mapped[bytes | None] = mapped_column(LargeBinary)
    """The body of the FINAL; of a failed request the detail, if the service gave one."""
    ended: Mapped[int | None] = mapped_column(BigInteger)
    """Grows with each request that is done or has failed, and does not come again: what those go by who read on from
    where they were.  PostgreSQL gives it while the table is locked as any UPDATE locks it, but commits are out of
    order; SQLite's are in order."""

    __table_args__ = (
        CheckConstraint("state IN ('delayed', 'pending', 'running', 'done', 'failed')", name="titanic_requests_state"),
        _partial("titanic_requests_ready", "state = 'pending'", "service", priority.desc(), "id"),
        _partial("titanic_requests_due", "state = 'delayed'", "due"),
        _partial("titanic_requests_owner", "state = 'running'", "owner"),
        _partial("titanic_requests_failed", "state = 'failed'", "id"),
        _partial("titanic_requests_expires", "expires IS NOT NULL", "expires"),
        _partial("titanic_requests_ended", "ended IS NOT NULL", "ended"),
        # An id must not come again once its request is closed: a late outcome would find another request.
        {"sqlite_autoincrement": True},
    )


class Owner(Base):
    """A Titanic that runs requests."""

    __tablename__ = "titanic_owners"

    owner: Mapped[str] = mapped_column(Text, primary_key=True)
    lease: Mapped[float] = mapped_column(Double)
    """Until when its requests are its own; it renews that in time, or is taken for dead."""


class Part(Base):
    """A PARTIAL of an attempt.  Those of an attempt that broke off are not looked at again."""

    __tablename__ = "titanic_parts"

    request: Mapped[int] = mapped_column(_Id, ForeignKey(Request.id, ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    """From 0."""
    body: Mapped[bytes] = mapped_column(LargeBinary)


class Key(Base):
    """The request that a service's key stands for.  It outlives the request, so that none is done again once closed."""

    __tablename__ = "titanic_keys"
    __table_args__ = (_partial("titanic_keys_expires", "expires IS NOT NULL", "expires"),)

    service: Mapped[str] = mapped_column(Text, primary_key=True)
    key: Mapped[str] = mapped_column(Text, primary_key=True)
    uuid: Mapped[UUID] = mapped_column(Uuid)
    expires: Mapped[float | None] = mapped_column(Double)
    """NULL for never."""


ENDED: Final = Sequence("titanic_ended", metadata=Base.metadata)
"""Where `Request.ended` comes from on PostgreSQL."""


class Counter(Base):
    """What PostgreSQL has sequences for; used on SQLite only, where there is one writer at a time anyhow."""

    __tablename__ = "titanic_counters"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)
    """The latest number given."""


# ── what Spark writes ────────────────────────────────────────────────────────────────────────────────────────────────


class Staging(Base):
    """An attempt of one of Spark's tasks to write requests, until its write is committed or given up."""

    __tablename__ = "titanic_staging"
    __table_args__ = ({"sqlite_autoincrement": True},)  # an attempt's number must not come again

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    write: Mapped[str] = mapped_column(Text)
    """Which write it is part of."""
    touched: Mapped[float] = mapped_column(Double)
    """When it staged something; 0 when that is not wanted any more."""


class Staged(Base):
    """A request that is accepted if its write is committed.  Not logged by PostgreSQL: who commits counts the rows.

    Times are seconds from then on, but `due`, which is since 1970.
    """

    __tablename__ = "titanic_staged"

    staging: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    """From 0, without gaps."""
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


class Written(Base):
    """A write that was committed: a job's, or the latest one of a stream's.  The same one again is skipped."""

    __tablename__ = "titanic_written"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    """`job` or `sink`."""
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    batch: Mapped[int] = mapped_column(BigInteger)
    """Of a stream, the number of the micro-batch; of a job 0."""
    query: Mapped[str | None] = mapped_column(Text)
    """Of a stream, what Spark calls its query: that stays as long as its checkpoint."""
    requests: Mapped[int] = mapped_column(BigInteger)
    """How many rows it had."""
    committed: Mapped[float] = mapped_column(Double)

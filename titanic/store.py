"""What Titanic does to its tables: functions of a connection and a batch, inside a transaction of the caller's.

No clock but to compare it with the database's: times are given.  No function commits.  An outcome counts only for the
attempt that it is of, which `id`, `owner` and `attempt` name together: a Titanic that was taken for dead changes
nothing any more.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from .models import ENDED as ENDED_SEQUENCE
from .models import Counter, Key, Owner, Part, Request
from .options import Submission

REQUESTS: Final = cast(sa.Table, Request.__table__)
PARTS: Final = cast(sa.Table, Part.__table__)
KEYS: Final = cast(sa.Table, Key.__table__)
OWNERS: Final = cast(sa.Table, Owner.__table__)
COUNTERS: Final = cast(sa.Table, Counter.__table__)
R, P, K, W = REQUESTS.c, PARTS.c, KEYS.c, OWNERS.c
ENDED: Final = frozenset({"done", "failed"})
SWEEP: Final = 5000
"""Rows changed or thrown away at a time."""
LARGE: Final = 1 << 20
"""Bytes from which a reply is fetched by itself."""
PARTS_BYTES: Final = 4 << 20
"""Bytes of PARTIALs fetched at a time."""


def is_in(state: str) -> sa.ColumnElement[bool]:
    """Whether a request is in this state, written out: were it bound, no partial index would be used."""
    return R.state == sa.literal_column(f"'{state}'")


# ── accepting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_both(build: Callable[[Any], sa.Executable]) -> dict[str, sa.Executable]:
    """A statement with ON CONFLICT, which each dialect's INSERT has for itself, by the dialect's name."""
    return {"sqlite": build(sqlite.insert), "postgresql": build(postgresql.insert)}


def _enter_key(insert: Any) -> sa.Executable:
    entered = insert(KEYS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[K.service, K.key],
        set_={"uuid": entered.excluded.uuid, "expires": entered.excluded.expires},
        where=K.expires <= sa.bindparam("now", type_=sa.Double),
    )
    return found


def _renewal(insert: Any) -> sa.Executable:
    entered = insert(OWNERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[W.owner], set_={"lease": entered.excluded.lease}, where=W.lease < entered.excluded.lease
    )
    return found


_RENEW: Final = _in_both(_renewal)
_ACCEPT: Final = _in_both(lambda insert: insert(REQUESTS).on_conflict_do_nothing())
_ENTER_KEY: Final = _in_both(_enter_key)


def accept(connection: Connection, batch: Sequence[Submission]) -> list[UUID]:
    """Store requests; for each the uuid by which it is known: with a key, that of the first one.

    Harmless when repeated with the same submissions.
    """
    known = _enter_keys(connection, [each for each in batch if each.key is not None])
    uuids = [each.uuid if each.key is None else known[each.service, each.key] for each in batch]
    rows = [_row(each) for each, uuid in zip(batch, uuids, strict=True) if uuid == each.uuid]
    if rows:
        connection.execute(_ACCEPT[connection.dialect.name], rows)
    return uuids


def _row(each: Submission) -> dict[str, Any]:
    return {
        "uuid": each.uuid,
        "service": each.service,
        "state": "delayed" if each.due > each.created else "pending",
        "priority": each.priority,
        "created": each.created,
        "due": each.due,
        "attempts": 0,
        "failures": 0,
        "retries": each.retries,
        "backoff": each.backoff,
        "result_ttl": each.result_ttl,
        "key": each.key,
        "headers": each.headers,
        "body": each.body,
    }


def _enter_keys(connection: Connection, keyed: Sequence[Submission]) -> dict[tuple[str, str], UUID]:
    """The uuid that each key stands for, having entered those that are new or have expired."""
    first = {(each.service, str(each.key)): each for each in reversed(keyed)}
    if not first:
        return {}
    connection.execute(
        _ENTER_KEY[connection.dialect.name],
        # In one order, so that two Titanics with the same keys wait for each other and not both.
        [
            {"service": service, "key": key, "uuid": each.uuid, "expires": each.key_expires, "now": each.created}
            for (service, key), each in sorted(first.items())
        ],
    )
    found = connection.execute(sa.select(K.service, K.key, K.uuid).where(sa.tuple_(K.service, K.key).in_(list(first))))
    return {(service, key): uuid for service, key, uuid in found}


# ── dispatching ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Lease:
    """Whose an attempt is, and until when."""

    owner: str
    until: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Up to `limit` requests for `service` are wanted."""

    service: str
    limit: int
    lease: Lease
    now: float
    most_bytes: int = 1 << 28
    """Of all bodies together; but one request, however large."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that is now running, in its `attempt`th attempt."""

    id: int
    uuid: UUID
    service: str
    owner: str
    attempt: int
    failures: int
    retries: int
    backoff: float | None
    headers: str | None
    body: bytes


_CLAIMED: Final = (
    R.id, R.uuid, R.service, R.owner, R.attempts, R.failures, R.retries, R.backoff, R.headers, R.body, R.priority,
)  # fmt: skip
_READY: Final = (
    sa.select(R.id, sa.func.length(R.body).label("size"))
    .where(is_in("pending"), R.service == sa.bindparam("b_service"))
    .order_by(R.priority.desc(), R.id)
    .limit(sa.bindparam("b_limit", type_=sa.Integer))
    .with_for_update(skip_locked=True)
)
_CLAIM: Final = (
    sa.update(REQUESTS)
    .where(R.id.in_(sa.bindparam("b_ids", expanding=True)))
    .values(
        state="running", owner=sa.bindparam("b_owner"), attempts=R.attempts + 1, started=sa.bindparam("b_now"),
    )
    .returning(*_CLAIMED)
)  # fmt: skip
_FORGET_PARTS: Final = sa.delete(PARTS).where(
    P.request.in_(sa.bindparam("b_ids", expanding=True)),
    P.attempt < sa.select(R.attempts).where(R.id == P.request).scalar_subquery(),
)


def claim(connection: Connection, batch: Sequence[Claim]) -> list[list[Claimed]]:
    """Take requests for services, the most urgent and the oldest first."""
    return [_claim(connection, each) for each in batch]


def _claim(connection: Connection, wanted: Claim) -> list[Claimed]:
    ids: list[int] = []
    left = wanted.most_bytes
    for row in connection.execute(_READY, {"b_service": wanted.service, "b_limit": wanted.limit}).all():
        left -= row.size
        if ids and left < 0:
            break
        ids.append(row.id)
    if not ids:
        return []
    _renew(connection, wanted.lease)
    rows = connection.execute(_CLAIM, {"b_ids": ids, "b_owner": wanted.lease.owner, "b_now": wanted.now}).all()
    again = [row.id for row in rows if row.attempts > 1]
    if again:  # what an attempt that broke off had streamed
        connection.execute(_FORGET_PARTS, {"b_ids": again})
    return [Claimed(*row[:-1]) for row in sorted(rows, key=lambda row: (-row.priority, row.id))]


def _renew(connection: Connection, lease: Lease) -> None:
    connection.execute(_RENEW[connection.dialect.name], {"owner": lease.owner, "lease": lease.until})


@dataclass(frozen=True, slots=True)
class Partial:
    """A PARTIAL of an attempt."""

    id: int
    attempt: int
    number: int
    body: bytes


_PART: Final = (
    sa.select(
        R.id,
        sa.bindparam("attempt", type_=sa.Integer),
        sa.bindparam("number", type_=sa.Integer),
        sa.bindparam("body", type_=sa.LargeBinary),
    )
    .where(R.id == sa.bindparam("id"), R.attempts == sa.bindparam("attempt"))
    .with_for_update(read=True, key_share=True)  # nobody closes it meanwhile
)
_ADD_PART: Final = _in_both(lambda insert: insert(PARTS).from_select([*P.keys()], _PART).on_conflict_do_nothing())


def add_parts(connection: Connection, batch: Sequence[Partial]) -> list[None]:
    """Store PARTIALs of requests that are still there."""
    connection.execute(
        _ADD_PART[connection.dialect.name],
        [{"id": each.id, "attempt": each.attempt, "number": each.number, "body": each.body} for each in batch],
    )
    return [None] * len(batch)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: with a reply; or, with a code, for good and badly."""

    id: int
    owner: str
    attempt: int
    now: float
    reply: bytes | None
    code: int | None = None
    error: str | None = None
    ttl: float | None = None
    """Seconds that the reply is kept if the request does not say; None for until it is closed."""


def _attempt() -> sa.ColumnElement[bool]:
    return sa.and_(
        R.id == sa.bindparam("b_id"), R.owner == sa.bindparam("b_owner"), R.attempts == sa.bindparam("b_attempt"),
        is_in("running"),
    )  # fmt: skip


def _finish(ended: Any) -> sa.Update:
    return (
        sa.update(REQUESTS)
        .where(_attempt())
        .values(
            state=sa.bindparam("b_state"),
            finished=sa.bindparam("b_now", type_=sa.Double),
            expires=sa.func.coalesce(R.result_ttl, sa.bindparam("b_ttl", type_=sa.Double))
            + sa.bindparam("b_now", type_=sa.Double),
            owner=None,
            reply=sa.bindparam("b_reply"),
            code=sa.bindparam("b_code"),
            error=sa.bindparam("b_error"),
            ended=ended,
        )
    )


def _count(insert: Any) -> sa.Executable:
    entered = insert(COUNTERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[COUNTERS.c.name], set_={"value": COUNTERS.c.value + entered.excluded.value}
    ).returning(COUNTERS.c.value)
    return found


NEXT_ENDED: Final = ENDED_SEQUENCE.next_value()
"""PostgreSQL's next number of an end.  Only within an UPDATE of the requests, which locks them first: by those locks a
reader of the numbers (`spark/frontier.py`) knows which of them may still come."""
_FINISH: Final = {"sqlite": _finish(sa.bindparam("b_ended")), "postgresql": _finish(NEXT_ENDED)}
_COUNT: Final = _count(sqlite.insert)


def count_ended(connection: Connection, ends: int) -> int:
    """On SQLite: the number before those of the next `ends` ends, which are then taken."""
    return int(connection.scalar(_COUNT, {"name": "ended", "value": ends}) or 0) - ends


def finish(connection: Connection, batch: Sequence[Outcome]) -> list[None]:
    """Store outcomes."""
    on_sqlite = connection.dialect.name == "sqlite"
    before = count_ended(connection, len(batch)) if on_sqlite else 0
    connection.execute(
        _FINISH[connection.dialect.name],
        [
            {
                **({"b_ended": before + at} if on_sqlite else {}),
                "b_id": each.id,
                "b_owner": each.owner,
                "b_attempt": each.attempt,
                "b_now": each.now,
                "b_state": "done" if each.code is None else "failed",
                "b_reply": each.reply,
                "b_code": each.code,
                "b_error": each.error,
                "b_ttl": each.ttl,
            }
            for at, each in enumerate(batch, 1)
        ],
    )
    return [None] * len(batch)


@dataclass(frozen=True, slots=True)
class Again:
    """An attempt did not do; the next is `due` then."""

    id: int
    owner: str
    attempt: int
    due: float
    failures: int | None = None
    """Its handler's, those of this attempt included; None if there are no more than before."""
    error: str | None = None


_PUT_BACK: Final = (
    sa.update(REQUESTS)
    .where(_attempt())
    .values(
        state="delayed",
        due=sa.bindparam("b_due"),
        owner=None,
        failures=sa.func.coalesce(sa.bindparam("b_failures", type_=sa.Integer), R.failures),
        error=sa.bindparam("b_error"),
    )
)


def put_back(connection: Connection, batch: Sequence[Again]) -> list[None]:
    """Have requests tried again."""
    connection.execute(
        _PUT_BACK,
        [
            {
                "b_id": each.id,
                "b_owner": each.owner,
                "b_attempt": each.attempt,
                "b_due": each.due,
                "b_failures": each.failures,
                "b_error": each.error,
            }
            for each in batch
        ],
    )  # fmt: skip
    return [None] * len(batch)


def release(connection: Connection, batch: Sequence[str]) -> list[None]:
    """Give everything back that these owners run."""
    connection.execute(
        sa.update(REQUESTS).where(is_in("running"), R.owner.in_(batch)).values(state="pending", owner=None)
    )
    return [None] * len(batch)


@dataclass(frozen=True, slots=True)
class Round:
    """The dispatcher looks at the tables: `lease` is what it holds its requests by from now on."""

    lease: Lease
    now: float
    renew: bool
    count_up_to: int | None
    """Count what waits, but no further than this; None: do not count."""
    offered: tuple[str, ...] = ()
    """Services for which it would have requests done."""


@dataclass(frozen=True, slots=True)
class Found:
    """What it finds there."""

    owned: dict[int, int]
    """The requests that this Titanic runs, with their attempts."""
    services: list[str]
    """Those of the offered ones for which requests are pending."""
    next_due: float | None
    """When the next of the delayed ones is due."""
    waiting: int | None
    """How many are neither done nor failed."""
    ahead: float
    """Seconds by which the database's clock is ahead of this host's."""
    more: bool = False
    """There was more to do than is done at a time."""


def look(connection: Connection, batch: Sequence[Round]) -> list[Found]:
    """Do what is due: delayed requests, leases that have run out, replies and keys that have expired."""
    return [_look(connection, each) for each in batch]


def _look(connection: Connection, now: Round) -> Found:
    if now.renew:
        _renew(connection, now.lease)
    living = sa.select(W.owner).where(W.lease > now.now)
    due = _free(connection, [R.id], sa.and_(is_in("delayed"), R.due <= now.now))
    lapsed = _free(connection, [R.id], sa.and_(is_in("running"), R.owner.not_in(living)))
    if due or lapsed:
        back = [row.id for row in (*due, *lapsed)]
        connection.execute(sa.update(REQUESTS).where(R.id.in_(back)).values(state="pending", owner=None))
    for table, key, over in (
        (REQUESTS, [R.id], R.expires <= now.now),
        (KEYS, [K.service, K.key], K.expires <= now.now),
        (OWNERS, [W.owner], W.lease <= now.now),
    ):
        old = _free(connection, key, over)
        if old:
            connection.execute(sa.delete(table).where(over, sa.tuple_(*key).in_([tuple(row) for row in old])))
    owned = connection.execute(sa.select(R.id, R.attempts).where(is_in("running"), R.owner == now.lease.owner))
    return Found(
        owned={each.id: each.attempts for each in owned},
        services=pending_services(connection, now.offered),
        next_due=connection.scalar(sa.select(sa.func.min(R.due)).where(is_in("delayed"))),
        waiting=None if now.count_up_to is None else count_waiting(connection, now.count_up_to),
        ahead=_ahead(connection),
        more=max(len(due), len(lapsed)) == SWEEP,
    )


def _free(connection: Connection, columns: Sequence[Any], where: Any) -> Sequence[sa.Row[Any]]:
    """Rows that nobody else is at, who may be frozen in the middle of it; not too many at a time."""
    found = sa.select(*columns).where(where).limit(SWEEP).with_for_update(skip_locked=True)
    return connection.execute(found).all()


def _ahead(connection: Connection) -> float:
    if connection.dialect.name == "sqlite":
        return 0.0  # a file of this host's
    return float(connection.scalar(_DATABASE_TIME) or 0) - time.time()


_DATABASE_TIME: Final = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))


def pending_services(connection: Connection, offered: Sequence[str]) -> list[str]:
    """Those of the services for which requests are pending: a step in the index for each, however many there are."""
    if not offered:
        return []
    names = sa.values(sa.column("service", sa.Text), name="offered").data([(name,) for name in offered]).cte("offered")
    some = sa.exists().where(is_in("pending"), R.service == names.c.service)
    return list(connection.scalars(sa.select(names.c.service).where(some)))


def pending_after(connection: Connection, batch: Sequence[tuple[str, int]]) -> list[list[str]]:
    """For each name and limit the services with pending requests whose names come after it, in order."""
    return [_pending_after(connection, *each) for each in batch]


def _pending_after(connection: Connection, after: str, limit: int) -> list[str]:
    first = sa.select(sa.func.min(R.service).label("service")).where(is_in("pending"), R.service > after)
    each = first.cte("each", recursive=True)
    following = sa.select(sa.func.min(R.service)).where(is_in("pending"), R.service > each.c.service).scalar_subquery()
    each = each.union_all(sa.select(following).where(each.c.service.is_not(None)))
    return list(connection.scalars(sa.select(each.c.service).where(each.c.service.is_not(None)).limit(limit)))


def count_waiting(connection: Connection, most: int) -> int:
    """How many requests are neither done nor failed, counted up to `most`."""
    counted = 0
    for state in ("pending", "delayed", "running"):
        rows = sa.select(sa.literal_column("1")).where(is_in(state)).limit(most - counted).subquery()
        counted += connection.scalar(sa.select(sa.func.count()).select_from(rows)) or 0
    return counted


# ── fetching and closing ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Fetched:
    """A request as `titanic.reply` sees it."""

    id: int
    state: str
    attempt: int
    code: int | None
    error: str | None
    size: int | None
    reply: bytes | None
    """None also if its `size` is `LARGE` or more: then `fetch_reply` gets it."""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ENDED


_SIZE: Final = sa.func.length(R.reply)
_FETCH: Final = sa.select(
    R.uuid, R.id, R.state, R.attempts, R.code, R.error, _SIZE, sa.case((_SIZE < LARGE, R.reply), else_=None)
).where(R.uuid.in_(sa.bindparam("b_uuids", expanding=True)))


def fetch(connection: Connection, batch: Sequence[UUID]) -> list[Fetched | None]:
    """What is there of requests; None for those that nobody knows."""
    rows = connection.execute(_FETCH, {"b_uuids": list(set(batch))})
    found = {row.uuid: Fetched(*row[1:]) for row in rows}
    return [found.get(uuid) for uuid in batch]


def fetch_reply(connection: Connection, batch: Sequence[int]) -> list[bytes | None]:
    """Large replies, by the ids of their requests; None for those that are gone."""
    return [connection.scalar(sa.select(R.reply).where(R.id == each)) for each in batch]


class Seen(NamedTuple):
    """By what one sees that something has happened to a request."""

    state: str
    attempt: int
    last_part: int | None

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ENDED


_LAST_PART: Final = sa.select(sa.func.max(P.number)).where(P.request == R.id, P.attempt == R.attempts).scalar_subquery()
_STATES: Final = sa.select(R.uuid, R.state, R.attempts, _LAST_PART).where(
    R.uuid.in_(sa.bindparam("b_uuids", expanding=True))
)


def states(connection: Connection, batch: Sequence[frozenset[UUID]]) -> list[dict[UUID, Seen]]:
    """How far many requests have come; those that nobody knows are left out."""
    return [
        {row.uuid: Seen(*row[1:]) for row in connection.execute(_STATES, {"b_uuids": list(each)})} for each in batch
    ]


@dataclass(frozen=True, slots=True)
class Parts:
    """The PARTIALs of a request's attempt that are wanted: some of those from `start` on."""

    id: int
    attempt: int
    start: int


PARTS_AT_ONCE: Final = 64


def fetch_parts(connection: Connection, batch: Sequence[Parts]) -> list[list[bytes]]:
    """PARTIALs in order, as far as they are there without a gap; at most `PARTS_AT_ONCE`, and some `PARTS_BYTES`."""
    return [_fetch_parts(connection, each) for each in batch]


_FETCH_PARTS: Final = (
    sa.select(P.number, P.body, sa.func.sum(sa.func.length(P.body)).over(order_by=P.number).label("total"))
    .where(
        P.request == sa.bindparam("b_id"),
        P.attempt == sa.bindparam("b_attempt"),
        P.number >= sa.bindparam("b_start"),
        P.number < sa.bindparam("b_start") + PARTS_AT_ONCE,
    )
    .subquery()
)
_SOME_PARTS: Final = (
    sa.select(_FETCH_PARTS.c.number, _FETCH_PARTS.c.body)
    .where(sa.or_(_FETCH_PARTS.c.total <= PARTS_BYTES, _FETCH_PARTS.c.number == sa.bindparam("b_start")))
    .order_by(_FETCH_PARTS.c.number)
)


def _fetch_parts(connection: Connection, wanted: Parts) -> list[bytes]:
    given = {"b_id": wanted.id, "b_attempt": wanted.attempt, "b_start": wanted.start}
    rows = connection.execute(_SOME_PARTS, given)
    return [row.body for at, row in enumerate(rows) if row.number == wanted.start + at]


_CLOSE: Final = sa.delete(REQUESTS).where(R.uuid.in_(sa.bindparam("b_uuids", expanding=True))).returning(R.uuid, R.id)


def close(connection: Connection, batch: Sequence[UUID]) -> list[int | None]:
    """Forget requests and their replies; for each its id if there was one.  Their keys stay."""
    rows = connection.execute(_CLOSE, {"b_uuids": list(set(batch))})
    ids = {row.uuid: row.id for row in rows}
    return [ids.get(uuid) for uuid in batch]

"""What Titanic does to its tables: functions of a connection and a batch, inside a transaction of the caller's.

No clock but to compare it with the database's: times are given.  No function commits.  An outcome counts only for the
attempt that it is of, which `id`, `owner` and `attempt` name together: a Titanic that was taken for dead changes
nothing any more.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, cast
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from ..submission import Submission
from .bulk import Bulk, Row
from .models import ENDED as ENDED_SEQUENCE
from .models import Counter, Key, Owner, Part, Request

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
_ENTER_KEY: Final = _in_both(_enter_key)
_ACCEPT: Final = Bulk(
    """
    INSERT INTO titanic_requests (
        uuid, service, state, priority, created, due, attempts, failures, retries, backoff, result_ttl, key, headers,
        body
    )
    WITH given
    SELECT
        uuid, service, CASE WHEN due > created THEN 'delayed' ELSE 'pending' END, priority, created, due, 0, 0, retries,
        backoff, result_ttl, key, headers, body
    FROM given WHERE uuid IS NOT NULL
    ON CONFLICT DO NOTHING
    """,
    uuid="uuid",
    service="text",
    priority="int",
    created="double precision",
    due="double precision",
    retries="int",
    backoff="double precision",
    result_ttl="double precision",
    key="text",
    headers="text",
    body="bytea",
)


def accept(connection: Connection, batch: Sequence[Submission]) -> list[UUID]:
    """Store requests; for each the uuid by which it is known: with a key, that of the first one.

    Harmless when repeated with the same submissions.
    """
    keyed = [each for each in batch if each.key is not None]
    if not keyed:
        _ACCEPT(connection, [_row(each) for each in batch])
        return [each.uuid for each in batch]
    known = _enter_keys(connection, keyed)
    uuids = [each.uuid if each.key is None else known[each.service, each.key] for each in batch]
    _ACCEPT(connection, [_row(each) for each, uuid in zip(batch, uuids, strict=True) if uuid == each.uuid])
    return uuids


def _row(each: Submission) -> Row:
    return (
        each.uuid.hex, each.service, each.priority, each.created, each.due, each.retries, each.backoff,
        each.result_ttl, each.key, each.headers, each.body,
    )  # fmt: skip


def _enter_keys(connection: Connection, keyed: Sequence[Submission]) -> dict[tuple[str, str], UUID]:
    """The uuid that each key stands for, having entered those that are new or have expired."""
    first = {(each.service, str(each.key)): each for each in reversed(keyed)}
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


class Lease(NamedTuple):
    """Whose an attempt is, and until when."""

    owner: str
    until: float


class Claim(NamedTuple):
    """Up to `limit` requests for `service` are wanted."""

    service: str
    limit: int
    lease: Lease
    now: float
    most_bytes: int = 1 << 28
    """Of all bodies together; but one request, however large."""


class Claimed(NamedTuple):
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


_READY: Final = """
    SELECT id, length(body) FROM titanic_requests WHERE state = 'pending' AND service = {0}
    ORDER BY priority DESC, id LIMIT {0}
"""
_READIES: Final = {"sqlite": _READY.format("?"), "postgresql": _READY.format("%s") + "FOR UPDATE SKIP LOCKED"}
_CLAIM: Final = Bulk(
    # RETURNING takes unqualified names only on SQLite.
    """
    WITH given
    UPDATE titanic_requests SET state = 'running', owner = by_owner, attempts = attempts + 1, started = at_time
    FROM given WHERE id = request
    RETURNING id, uuid, service, owner, attempts, failures, retries, backoff, headers, body, priority
    """,
    request="bigint",
    by_owner="text",
    at_time="double precision",
)
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
    ready = connection.exec_driver_sql(_READIES[connection.dialect.name], (wanted.service, wanted.limit))
    for id_, size in ready.all():
        left -= size
        if ids and left < 0:
            break
        ids.append(id_)
    if not ids:
        return []
    _renew(connection, wanted.lease)
    rows = _CLAIM(connection, [(id_, wanted.lease.owner, wanted.now) for id_ in ids])
    claimed = [
        Claimed(id_, _uuid(uuid), *fields)
        for id_, uuid, *fields, _ in sorted(rows, key=lambda row: (-row.priority, row.id))
    ]
    again = [each.id for each in claimed if each.attempt > 1]
    if again:  # what an attempt that broke off had streamed
        connection.execute(_FORGET_PARTS, {"b_ids": again})
    return claimed


def _uuid(found: str | UUID) -> UUID:
    """Convert what the driver returns: SQLite's returns text."""
    return UUID(found) if isinstance(found, str) else found


def _renew(connection: Connection, lease: Lease) -> None:
    connection.execute(_RENEW[connection.dialect.name], {"owner": lease.owner, "lease": lease.until})


class Partial(NamedTuple):
    """A PARTIAL of an attempt."""

    id: int
    attempt: int
    number: int
    body: bytes


def _adding(lock: str) -> Bulk:
    return Bulk(
        f"""
        INSERT INTO titanic_parts (request, attempt, number, body)
        WITH given
        SELECT given.id, given.attempt, given.number, given.body
        FROM given JOIN titanic_requests AS r ON r.id = given.id AND r.attempts = given.attempt
        WHERE given.id IS NOT NULL {lock} ON CONFLICT DO NOTHING
        """,  # noqa: S608 - our own
        id="bigint",
        attempt="int",
        number="int",
        body="bytea",
    )


_ADD_PARTS: Final = {"sqlite": _adding(""), "postgresql": _adding("FOR KEY SHARE OF r")}
"""PostgreSQL locks the request, so that nobody closes it meanwhile."""


def add_parts(connection: Connection, batch: Sequence[Partial]) -> list[None]:
    """Store PARTIALs of requests that are still there."""
    _ADD_PARTS[connection.dialect.name](connection, batch)
    return [None] * len(batch)


class Outcome(NamedTuple):
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


_OF_ATTEMPT: Final = """
    r.id = given.id AND r.owner = given.owner AND r.attempts = given.attempt AND r.state = 'running'
"""
_ATTEMPT: Final = {"id": "bigint", "owner": "text", "attempt": "int"}


def _finishing(ended: str) -> Bulk:
    return Bulk(
        f"""
        WITH given
        UPDATE titanic_requests AS r SET
            state = CASE WHEN given.code IS NULL THEN 'done' ELSE 'failed' END,
            finished = given.now, expires = coalesce(r.result_ttl, given.ttl) + given.now, owner = NULL,
            reply = given.reply, code = given.code, error = given.error, ended = {ended}
        FROM given WHERE {_OF_ATTEMPT}
        """,  # noqa: S608 - our own
        **_ATTEMPT,
        now="double precision",
        reply="bytea",
        code="int",
        error="text",
        ttl="double precision",
        ended="bigint",
    )


def _count(insert: Any) -> sa.Executable:
    entered = insert(COUNTERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[COUNTERS.c.name], set_={"value": COUNTERS.c.value + entered.excluded.value}
    ).returning(COUNTERS.c.value)
    return found


_Ended = TypeVar("_Ended", bound="Outcome | Again")


def _firsts(batch: Sequence[_Ended]) -> list[_Ended]:
    """Keep the first outcome of each attempt: an UPDATE picks any of several."""
    return list({each[:3]: each for each in reversed(batch)}.values())[::-1]


NEXT_ENDED: Final = ENDED_SEQUENCE.next_value()
"""PostgreSQL's next number of an end.  Only within an UPDATE of the requests, which locks them first: by those locks a
reader of the numbers (`spark/datasource/frontier.py`) knows which of them may still come."""
_FINISH: Final = {"sqlite": _finishing("given.ended"), "postgresql": _finishing("nextval('titanic_ended')")}
_COUNT: Final = _count(sqlite.insert)


def count_ended(connection: Connection, ends: int) -> int:
    """On SQLite: the number before those of the next `ends` ends, which are then taken."""
    return int(connection.scalar(_COUNT, {"name": "ended", "value": ends}) or 0) - ends


def finish(connection: Connection, batch: Sequence[Outcome]) -> list[None]:
    """Store outcomes."""
    name = connection.dialect.name
    before = count_ended(connection, len(batch)) if name == "sqlite" else 0
    _FINISH[name](connection, [(*each, before + at) for at, each in enumerate(_firsts(batch), 1)])
    return [None] * len(batch)


class Again(NamedTuple):
    """An attempt did not do; the next is `due` then."""

    id: int
    owner: str
    attempt: int
    due: float
    failures: int | None = None
    """Its handler's, those of this attempt included; None if there are no more than before."""
    error: str | None = None


_PUT_BACK: Final = Bulk(
    f"""
    WITH given
    UPDATE titanic_requests AS r SET
        state = 'delayed', due = given.due, owner = NULL, failures = coalesce(given.failures, r.failures),
        error = given.error
    FROM given WHERE {_OF_ATTEMPT}
    """,  # noqa: S608 - our own
    **_ATTEMPT,
    due="double precision",
    failures="int",
    error="text",
)


def put_back(connection: Connection, batch: Sequence[Again]) -> list[None]:
    """Have requests tried again."""
    _PUT_BACK(connection, _firsts(batch))
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


class Fetched(NamedTuple):
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


_FETCH: Final = Bulk(
    f"""
    WITH given
    SELECT given.number, r.id, r.state, r.attempts, r.code, r.error, length(r.reply),
        CASE WHEN length(r.reply) < {LARGE} THEN r.reply END
    FROM given JOIN titanic_requests AS r ON r.uuid = given.uuid
    """,  # noqa: S608 - our own
    number="int",
    uuid="uuid",
)


def fetch(connection: Connection, batch: Sequence[UUID]) -> list[Fetched | None]:
    """What is there of requests; None for those that nobody knows."""
    found: list[Fetched | None] = [None] * len(batch)
    for number, *fields in _FETCH(connection, [(at, uuid.hex) for at, uuid in enumerate(batch)]):
        found[number] = Fetched(*fields)
    return found


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


class Parts(NamedTuple):
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


_CLOSE: Final = Bulk(
    "WITH given DELETE FROM titanic_requests WHERE uuid IN (SELECT uuid FROM given) RETURNING uuid, id", uuid="uuid"
)


def close(connection: Connection, batch: Sequence[UUID]) -> list[int | None]:
    """Forget requests and their replies; for each its id if there was one.  Their keys stay."""
    ids = {_uuid(uuid): id_ for uuid, id_ in _CLOSE(connection, [(uuid.hex,) for uuid in batch])}
    return [ids.get(uuid) for uuid in batch]

"""Fetch replies and their PARTIALs, check the progress of requests, and close requests."""

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .bulk import Bulk, as_uuid
from .models import ENDED, P, R

LARGE_REPLY_BYTES: Final = 1 << 20
"""Size from which a reply is fetched by a statement of its own."""
MAX_PARTIALS: Final = 64
"""Maximum number of PARTIALs that are fetched at a time."""
MAX_PARTIALS_BYTES: Final = 4 << 20
"""Maximum size of PARTIALs that are fetched at a time; but at least one is."""


class Lookup(NamedTuple):
    """A request to look up by its UUID, provided that it belongs to `owner`."""

    uuid: UUID
    owner: str | None = ""
    """None: whoever it belongs to."""


_VISIBLE: Final = "r.uuid = given.uuid AND (given.owner IS NULL OR r.owner = given.owner)"


class Fetched(NamedTuple):
    """A request as `titanic.reply` sees it."""

    id: int
    service: str
    state: str
    attempt: int
    code: int | None
    error: str | None
    size: int | None
    reply: bytes | None
    """None also if its size is `LARGE_REPLY_BYTES` or more; then `fetch_reply` returns it."""

    @property
    def ended(self) -> bool:
        """Whether the request has ended."""
        return self.state in ENDED


_FETCH: Final = Bulk(
    f"""
    WITH given
    SELECT given.number, r.id, r.service, r.state, r.attempts, r.code, r.error, length(r.reply),
        CASE WHEN length(r.reply) < {LARGE_REPLY_BYTES} THEN r.reply END
    FROM given JOIN titanic_requests AS r ON {_VISIBLE}
    """,  # noqa: S608 - our own
    number="int",
    uuid="uuid",
    owner="text",
)


def fetch(connection: Connection, batch: Sequence[Lookup]) -> list[Fetched | None]:
    """Return requests as they are now; None for each that is unknown or belongs to another owner."""
    found: list[Fetched | None] = [None] * len(batch)
    for number, *fields in _FETCH(connection, [(at, each.uuid.hex, each.owner) for at, each in enumerate(batch)]):
        found[number] = Fetched(*fields)
    return found


def fetch_reply(connection: Connection, batch: Sequence[int]) -> list[bytes | None]:
    """Return large replies by the ids of their requests; None for each that is gone."""
    return [connection.scalar(sa.select(R.reply).where(R.id == each)) for each in batch]


def fetch_request(connection: Connection, batch: Sequence[Lookup]) -> list[bytes | None]:
    """Return the bodies of requests; None for each that is unknown or belongs to another owner."""
    visible = ([R.uuid == uuid, *([] if owner is None else [R.owner == owner])] for uuid, owner in batch)
    return [connection.scalar(sa.select(R.body).where(*each)) for each in visible]


class Progress(NamedTuple):
    """The progress of a request; it differs whenever the request has changed."""

    state: str
    attempt: int
    last_partial: int | None

    @property
    def ended(self) -> bool:
        """Whether the request has ended."""
        return self.state in ENDED


_LAST_PARTIAL: Final = (
    sa.select(sa.func.max(P.number)).where(P.request == R.id, P.attempt == R.attempts).scalar_subquery()
)
_PROGRESS: Final = sa.select(R.uuid, R.state, R.attempts, _LAST_PARTIAL).where(
    R.uuid.in_(sa.bindparam("b_uuids", expanding=True))
)


def progress(connection: Connection, batch: Sequence[frozenset[UUID]]) -> list[dict[UUID, Progress]]:
    """Return the progress of requests; unknown ones are left out."""
    return [
        {row.uuid: Progress(*row[1:]) for row in connection.execute(_PROGRESS, {"b_uuids": list(each)})}
        for each in batch
    ]


class PartialsQuery(NamedTuple):
    """A query for PARTIALs of an attempt, from number `start` on."""

    id: int
    attempt: int
    start: int


def fetch_partials(connection: Connection, batch: Sequence[PartialsQuery]) -> list[list[bytes]]:
    """Return PARTIALs in order up to the first gap, at most `MAX_PARTIALS` and about `MAX_PARTIALS_BYTES`."""
    return [_fetch_partials(connection, each) for each in batch]


_PARTIALS: Final = (
    sa.select(P.number, P.body, sa.func.sum(sa.func.length(P.body)).over(order_by=P.number).label("total"))
    .where(
        P.request == sa.bindparam("b_id"),
        P.attempt == sa.bindparam("b_attempt"),
        P.number >= sa.bindparam("b_start"),
        P.number < sa.bindparam("b_start") + MAX_PARTIALS,
    )
    .subquery()
)
_SOME_PARTIALS: Final = (
    sa.select(_PARTIALS.c.number, _PARTIALS.c.body)
    .where(sa.or_(_PARTIALS.c.total <= MAX_PARTIALS_BYTES, _PARTIALS.c.number == sa.bindparam("b_start")))
    .order_by(_PARTIALS.c.number)
)


def _fetch_partials(connection: Connection, wanted: PartialsQuery) -> list[bytes]:
    given = {"b_id": wanted.id, "b_attempt": wanted.attempt, "b_start": wanted.start}
    rows = connection.execute(_SOME_PARTIALS, given)
    return [row.body for at, row in enumerate(rows) if row.number == wanted.start + at]


_CLOSE: Final = Bulk(
    f"""
    WITH given
    DELETE FROM titanic_requests WHERE id IN (SELECT r.id FROM given JOIN titanic_requests AS r ON {_VISIBLE})
    RETURNING uuid, id
    """,  # noqa: S608 - our own
    uuid="uuid",
    owner="text",
)


def close(connection: Connection, batch: Sequence[Lookup]) -> list[int | None]:
    """Delete requests and their replies, but not their keys; return the id of each that was deleted."""
    ids = {as_uuid(uuid): id_ for uuid, id_ in _CLOSE(connection, [(each.uuid.hex, each.owner) for each in batch])}
    return [ids.get(each.uuid) for each in batch]

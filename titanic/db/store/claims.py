"""Claim requests that are ready to run, for a Titanic's lease."""

import time
from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .bulk import Bulk, as_uuid
from .models import HOLDERS, PARTS, P, R, W, for_both_dialects

MAX_GROUPS: Final = 100
"""Maximum number of groups from which one claim takes requests."""


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """The clock of the database's host, on which all its Titanics agree."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        """How many seconds the database's clock is ahead of this host's monotonic clock."""

    def now(self) -> float:
        """Return seconds since 1970: by this host's clock until `set` is called."""
        # This host's clock may be stepped; until it is compared again, keys would seem to have expired.
        return time.time() if self._ahead is None else time.monotonic() + self._ahead

    def set(self, now: float) -> None:
        """Set it to the time of the database's clock."""
        self._ahead = now - time.monotonic()


class Lease(NamedTuple):
    """A Titanic's lease on the requests that it has claimed, and its length in seconds."""

    holder: str
    seconds: float


def _renewal(insert: Any) -> sa.Executable:
    entered = insert(HOLDERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[W.holder],
        set_={"lease": entered.excluded.lease, "seconds": entered.excluded.seconds},
        where=W.lease < entered.excluded.lease,
    )
    return found


_RENEW: Final = for_both_dialects(_renewal)


def renew(connection: Connection, lease: Lease, now: float) -> None:
    """Extend the lease, or begin it."""
    given = {"holder": lease.holder, "lease": now + lease.seconds, "seconds": lease.seconds}
    connection.execute(_RENEW[connection.dialect.name], given)


_LATEST: Final = W.lease - W.seconds * sa.literal_column("2")


def is_invalid(now: float) -> sa.ColumnElement[bool]:
    """Return the condition that a lease ends too late: it was taken by a clock that was ahead.

    A Titanic's clock may be ahead of another's by as much as the lease is long.
    """
    return now < _LATEST


# ── claims ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Turns(NamedTuple):
    """The groups of a service, which take turns, as one Titanic has claimed from them."""

    last: str
    """The group that had the last turn."""
    held: Mapping[str, int]
    """How many requests of each group it has claimed already."""
    room: int | None
    """How many it may have of each; None for any number."""


class Claim(NamedTuple):
    """A claim of up to `limit` requests for `service`: of those that have a group only if there are `turns`."""

    service: str
    limit: int
    lease: Lease
    now: float
    max_bytes: int = 1 << 28
    """Maximum size of all bodies together; but at least one request is claimed."""
    turns: Turns | None = None


class Claimed(NamedTuple):
    """A request that was claimed and is now running, for the `attempt`th time."""

    id: int
    uuid: UUID
    service: str
    holder: str
    attempt: int
    failures: int
    deaths: int
    retries: int
    backoff: float | None
    headers: str | None
    body: bytes
    owner: str
    group_name: str = ""


_READY: Final = """
    SELECT id, length(body) AS size FROM titanic_requests WHERE state = 'pending' AND service = {0} AND group_name = {0}
    ORDER BY priority DESC, id LIMIT {0}
"""
_READIES: Final = {"sqlite": _READY.format("?"), "postgresql": _READY.format("%s") + "FOR UPDATE SKIP LOCKED"}


def _groups_in_turn(service: str, last: str, most: str) -> str:
    """Return the statement that selects groups with pending requests: first those after `last`, then the others.

    It reads one entry of an index for each group, and at most twice `most`.
    """

    def first(after: str) -> str:  # not min(), for which PostgreSQL may read all requests if it expects few
        pending = f"FROM titanic_requests WHERE state = 'pending' AND service = {service} {after}"
        return f"(SELECT group_name {pending} ORDER BY group_name LIMIT 1)"

    following = f"{first('AND group_name > name')}, number + 1"
    return f"""
        WITH RECURSIVE later(name, number) AS (
            SELECT {first(f"AND group_name > {last}")}, 1
            UNION ALL SELECT {following} FROM later WHERE name IS NOT NULL AND number < {most}
        ), earlier(name, number) AS (
            SELECT {first("")}, 1
            UNION ALL SELECT {following} FROM earlier WHERE name < {last} AND number < {most}
        )
        SELECT name, 0 AS part, number FROM later WHERE name IS NOT NULL
        UNION ALL SELECT name, 1, number FROM earlier WHERE name <= {last}
        ORDER BY part, number
    """  # noqa: S608 - our own


_GROUPS: Final = {
    "sqlite": _groups_in_turn(":service", ":last", ":most"),
    "postgresql": _groups_in_turn("%(service)s", "%(last)s", "%(most)s"),
}
_CLAIM: Final = Bulk(
    # On SQLite, RETURNING accepts unqualified names only.
    f"""
    WITH given
    UPDATE titanic_requests SET state = 'running', holder = by_holder, attempts = attempts + 1, started = at_time
    FROM given WHERE id = request
    RETURNING {", ".join(Claimed._fields).replace("attempt,", "attempts,")}
    """,  # noqa: S608 - our own
    request="bigint",
    by_holder="text",
    at_time="double precision",
)
_DELETE_OLD_PARTIALS: Final = sa.delete(PARTS).where(
    P.request.in_(sa.bindparam("b_ids", expanding=True)),
    P.attempt < sa.select(R.attempts).where(R.id == P.request).scalar_subquery(),
)


def claim(connection: Connection, batch: Sequence[Claim]) -> list[list[Claimed]]:
    """Claim requests: in turn from each group, and of a group by priority, then by age."""
    return [_claim(connection, each) for each in batch]


def _claim(connection: Connection, wanted: Claim) -> list[Claimed]:
    ids: list[int] = []
    left = wanted.max_bytes
    for id_, size in _ready(connection, wanted):
        left -= size
        if ids and left < 0:
            break
        ids.append(id_)
    if not ids:
        return []
    renew(connection, wanted.lease, wanted.now)
    rows = _CLAIM(connection, [(id_, wanted.lease.holder, wanted.now) for id_ in ids])
    found = {id_: Claimed(id_, as_uuid(uuid), *fields) for id_, uuid, *fields in rows}
    claimed = [found[id_] for id_ in ids if id_ in found]
    again = [each.id for each in claimed if each.attempt > 1]
    if again:  # delete the PARTIALs of the attempts that were interrupted
        connection.execute(_DELETE_OLD_PARTIALS, {"b_ids": again})
    return claimed


def _ready(connection: Connection, wanted: Claim) -> list[tuple[int, int]]:
    """Return the ids of requests that can be claimed, and the sizes of their bodies: in turn from each group."""
    rooms = {"": wanted.limit} if wanted.turns is None else _rooms(connection, wanted, wanted.turns)
    # If there may be other groups, each has one turn, so that the claim ends with the last turn.
    share = -(-wanted.limit // max(len(rooms), 1)) if len(rooms) < MAX_GROUPS else 1
    ready = _READIES[connection.dialect.name]
    found = [
        connection.exec_driver_sql(ready, (wanted.service, name, min(share, room))).all()
        for name, room in rooms.items()
    ]
    return [(row.id, row.size) for each in zip_longest(*found) for row in each if row is not None][: wanted.limit]


def _rooms(connection: Connection, wanted: Claim, turns: Turns) -> dict[str, int]:
    """Return how many requests may be claimed of each group with pending requests, in the order of their turns."""
    room = wanted.limit if turns.room is None else turns.room
    held = {} if turns.room is None else turns.held
    full = sum(count >= room for count in held.values())
    most = min(wanted.limit, MAX_GROUPS)
    asked = {"service": wanted.service, "last": turns.last, "most": most + full}
    names = connection.exec_driver_sql(_GROUPS[connection.dialect.name], asked)
    rooms = ((row.name, room - held.get(row.name, 0)) for row in names)
    return dict(islice(((name, left) for name, left in rooms if left > 0), most))

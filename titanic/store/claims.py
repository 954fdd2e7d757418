"""Claim requests that are ready to run."""

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .bulk import Bulk, as_uuid
from .leases import Lease, renew
from .tables import PARTS, P, R


class Claim(NamedTuple):
    """A claim of up to `limit` requests for `service`."""

    service: str
    limit: int
    lease: Lease
    now: float
    max_bytes: int = 1 << 28
    """Maximum size of all bodies together; but at least one request is claimed."""


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
    group_name: str | None = None


_READY: Final = """
    SELECT id, length(body) FROM titanic_requests WHERE state = 'pending' AND service = {0}
    ORDER BY priority DESC, id LIMIT {0}
"""
_READIES: Final = {"sqlite": _READY.format("?"), "postgresql": _READY.format("%s") + "FOR UPDATE SKIP LOCKED"}
_CLAIM: Final = Bulk(
    # On SQLite, RETURNING accepts unqualified names only.
    f"""
    WITH given
    UPDATE titanic_requests SET state = 'running', holder = by_holder, attempts = attempts + 1, started = at_time
    FROM given WHERE id = request
    RETURNING {", ".join(Claimed._fields).replace("attempt,", "attempts,")}, priority
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
    """Claim requests by priority, then by age."""
    return [_claim(connection, each) for each in batch]


def _claim(connection: Connection, wanted: Claim) -> list[Claimed]:
    ids: list[int] = []
    left = wanted.max_bytes
    ready = connection.exec_driver_sql(_READIES[connection.dialect.name], (wanted.service, wanted.limit))
    for id_, size in ready.all():
        left -= size
        if ids and left < 0:
            break
        ids.append(id_)
    if not ids:
        return []
    renew(connection, wanted.lease, wanted.now)
    rows = _CLAIM(connection, [(id_, wanted.lease.holder, wanted.now) for id_ in ids])
    claimed = [
        Claimed(id_, as_uuid(uuid), *fields)
        for id_, uuid, *fields, _ in sorted(rows, key=lambda row: (-row.priority, row.id))
    ]
    again = [each.id for each in claimed if each.attempt > 1]
    if again:  # delete the PARTIALs of the attempts that were interrupted
        connection.execute(_DELETE_OLD_PARTIALS, {"b_ids": again})
    return claimed

"""Store requests that were submitted."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from ..submission import Submission
from .bulk import Bulk, Row
from .tables import KEYS, REQUESTS, K, R, for_both_dialects


def _enter_key(insert: Any) -> sa.Executable:
    entered = insert(KEYS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[K.service, K.key, K.owner],
        set_={"uuid": entered.excluded.uuid, "expires": entered.excluded.expires},
        where=K.expires <= sa.bindparam("now", type_=sa.Double),
    )
    return found


_ENTER_KEY: Final = for_both_dialects(_enter_key)
_COLUMNS: Final = tuple(name for name in Submission._fields if name != "key_expires")
"""The columns of `titanic_requests` that a submission sets."""
_POSTGRESQL: Final = postgresql.dialect()  # type: ignore[no-untyped-call]
_VALUES: Final = attrgetter(*_COLUMNS[1:])
_ACCEPT: Final = Bulk(
    f"""
    INSERT INTO titanic_requests ({", ".join(_COLUMNS)}, state, attempts, failures, deaths)
    WITH given
    SELECT {", ".join(_COLUMNS)}, CASE WHEN due > created THEN 'delayed' ELSE 'pending' END, 0, 0, 0
    FROM given WHERE uuid IS NOT NULL
    ON CONFLICT DO NOTHING
    """,  # noqa: S608 - our own
    **{name: REQUESTS.c[name].type.compile(_POSTGRESQL).lower() for name in _COLUMNS},
)


def accept(connection: Connection, batch: Sequence[Submission]) -> list[UUID | None]:
    """Store requests and return the UUID of each: for a known key, that of the owner's first request with the key.

    Returns None for a request that was not stored because another owner's request has its UUID.

    Idempotent: the same submissions can be stored again.
    """
    keyed = [each for each in batch if each.key is not None]
    known = _enter_keys(connection, keyed) if keyed else {}
    uuids = [each.uuid if each.key is None else known[_key_of(each)] for each in batch]
    rows = [_row(each) for each, uuid in zip(batch, uuids, strict=True) if uuid == each.uuid]
    if _ACCEPT.count(connection, rows) == len(rows):
        return list(uuids)
    # Some UUIDs were there already: of requests that are submitted again, or of other owners' requests.
    found = connection.execute(sa.select(R.uuid, R.owner).where(R.uuid.in_([each.uuid for each in batch])))
    owners = {row.uuid: row.owner for row in found}
    return [
        None if uuid == each.uuid and owners.get(uuid) != each.owner else uuid
        for each, uuid in zip(batch, uuids, strict=True)
    ]


def _row(submission: Submission) -> Row:
    return (submission.uuid.hex, *_VALUES(submission))


def _key_of(submission: Submission) -> tuple[str, str, str]:
    """Return the primary key of the submission's key."""
    return submission.service, str(submission.key), submission.owner


def _enter_keys(connection: Connection, keyed: Sequence[Submission]) -> dict[tuple[str, str, str], UUID]:
    """Insert keys that are new or have expired, and return the UUID that each key stands for."""
    first = {_key_of(each): each for each in reversed(keyed)}
    connection.execute(
        _ENTER_KEY[connection.dialect.name],
        # Sorted, so that two Titanics with the same keys cannot deadlock.
        [
            {
                "service": service, "key": key, "owner": owner, "uuid": each.uuid, "expires": each.key_expires,
                "now": each.created,
            }
            for (service, key, owner), each in sorted(first.items())
        ],
    )  # fmt: skip
    columns = (K.service, K.key, K.owner)
    found = connection.execute(sa.select(*columns, K.uuid).where(sa.tuple_(*columns).in_(list(first))))
    return {(service, key, owner): uuid for service, key, owner, uuid in found}

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
from .tables import KEYS, REQUESTS, K, for_both_dialects


def _enter_key(insert: Any) -> sa.Executable:
    entered = insert(KEYS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[K.service, K.key],
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


def accept(connection: Connection, batch: Sequence[Submission]) -> list[UUID]:
    """Store requests and return the UUID of each: for a known key, that of the first request with the key.

    Idempotent: the same submissions can be stored again.
    """
    keyed = [each for each in batch if each.key is not None]
    if not keyed:
        _ACCEPT(connection, [_row(each) for each in batch])
        return [each.uuid for each in batch]
    known = _enter_keys(connection, keyed)
    uuids = [each.uuid if each.key is None else known[each.service, each.key] for each in batch]
    _ACCEPT(connection, [_row(each) for each, uuid in zip(batch, uuids, strict=True) if uuid == each.uuid])
    return uuids


def _row(submission: Submission) -> Row:
    return (submission.uuid.hex, *_VALUES(submission))


def _enter_keys(connection: Connection, keyed: Sequence[Submission]) -> dict[tuple[str, str], UUID]:
    """Insert keys that are new or have expired, and return the UUID that each key stands for."""
    first = {(each.service, str(each.key)): each for each in reversed(keyed)}
    connection.execute(
        _ENTER_KEY[connection.dialect.name],
        # Sorted, so that two Titanics with the same keys cannot deadlock.
        [
            {"service": service, "key": key, "uuid": each.uuid, "expires": each.key_expires, "now": each.created}
            for (service, key), each in sorted(first.items())
        ],
    )
    found = connection.execute(sa.select(K.service, K.key, K.uuid).where(sa.tuple_(K.service, K.key).in_(list(first))))
    return {(service, key): uuid for service, key, uuid in found}

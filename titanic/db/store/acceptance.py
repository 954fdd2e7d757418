"""Store requests that were submitted."""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from ...api.submission import Submission
from .bulk import Bulk, as_uuid
from .models import KEYS, REQUESTS, K, R, for_both_dialects, is_in


def _enter_key(insert: Any) -> sa.Executable:
    entered = insert(KEYS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[K.service, K.key, K.owner],
        set_={"uuid": entered.excluded.uuid, "expires": entered.excluded.expires},
        where=K.expires <= sa.bindparam("now", type_=sa.Double),
    )
    return found


_RENEW_KEYS: Final = for_both_dialects(_enter_key)
_ENTER_KEYS: Final = Bulk(
    """
    INSERT INTO titanic_keys (service, key, owner, uuid, expires)
    WITH given
    SELECT service, key, owner, uuid, expires FROM given WHERE service IS NOT NULL
    ON CONFLICT DO NOTHING
    RETURNING uuid
    """,
    service="text",
    key="text",
    owner="text",
    uuid="uuid",
    expires="double precision",
)


def _finding(lock: str) -> Bulk:
    return Bulk(
        f"""
        WITH given
        SELECT k.service, k.key, k.owner, k.uuid, k.expires FROM given JOIN titanic_keys AS k
        ON k.service = given.service AND k.key = given.key AND k.owner = given.owner {lock}
        """,  # noqa: S608 - our own
        service="text",
        key="text",
        owner="text",
    )


_FIND_KEYS: Final = {"sqlite": _finding(""), "postgresql": _finding("FOR KEY SHARE OF k")}
"""PostgreSQL locks the keys, so that maintenance does not delete them at the same time."""
_Key: TypeAlias = tuple[str, str, str]
"""The primary key of a submission's key: service, key and owner."""
_COLUMNS: Final = tuple(name for name in Submission._fields if name not in {"key_expires", "replaces"})
"""The columns of `titanic_requests` that a submission sets."""
_POSTGRESQL: Final = postgresql.dialect()  # type: ignore[no-untyped-call]
_VALUES: Final = attrgetter(*_COLUMNS[1:])
_TYPES: Final = {name: REQUESTS.c[name].type.compile(_POSTGRESQL).lower() for name in _COLUMNS}
_ACCEPT: Final = Bulk(
    f"""
    INSERT INTO titanic_requests ({", ".join(_COLUMNS)}, state, attempts, failures, deaths)
    WITH given
    SELECT {", ".join(_COLUMNS)}, CASE WHEN due > created THEN 'delayed' ELSE 'pending' END, 0, 0, 0
    FROM given WHERE uuid IS NOT NULL
    ON CONFLICT DO NOTHING
    """,  # noqa: S608 - our own
    **_TYPES,
)


_REPLACED: Final = ("body", "due", "priority", "retries", "backoff", "result_ttl", "headers", "group_name")
_REPLACE: Final = sa.update(REQUESTS).where(
    R.uuid == sa.bindparam("of_uuid"),
    sa.or_(is_in("delayed"), is_in("pending")),
    R.attempts == sa.literal_column("0"),
)
_POINT_KEY: Final = sa.update(KEYS).where(
    K.service == sa.bindparam("of_service"), K.key == sa.bindparam("of_key"), K.owner == sa.bindparam("of_owner"),
    K.uuid == sa.bindparam("of_uuid"),
).values(uuid=sa.bindparam("to_uuid"), expires=sa.bindparam("to_expires"))  # fmt: skip


def accept(connection: Connection, batch: Sequence[Submission]) -> list[UUID | None]:
    """Store requests and return the UUID of each: for a known key, that of the owner's first request with the key.

    If a submission `replaces`, it takes the place of that request if nobody has claimed it yet; otherwise it is stored,
    and the key stands for it from now on.  Of several in the batch, the last counts.

    Returns None for a request that was not stored because another owner's request has its UUID.

    Idempotent: the same submissions can be stored again.
    """
    newest = {_key_of(each): each for each in batch if each.replaces}
    if not newest:
        return _accept(connection, batch)
    others = iter(_accept(connection, [each for each in batch if not each.replaces]))
    # Sorted, so that two Titanics with the same keys cannot deadlock.
    uuids = {key: _keep_newest(connection, each) for key, each in sorted(newest.items())}
    return [uuids[_key_of(each)] if each.replaces else next(others) for each in batch]


def _keep_newest(connection: Connection, wanted: Submission) -> UUID:
    """Store a request in place of the one that its key stands for, and return the UUID."""
    row = {name: getattr(wanted, name) for name in _REPLACED}
    key = {"of_service": wanted.service, "of_key": wanted.key, "of_owner": wanted.owner}
    while True:
        (uuid,) = _accept(connection, [wanted])
        assert uuid is not None  # noqa: S101 - a submission with a key has a UUID of its own
        if uuid == wanted.uuid:
            return uuid
        state = "delayed" if wanted.due > wanted.created else "pending"
        waits = connection.execute(_REPLACE, {**row, "of_uuid": uuid, "state": state}).rowcount
        kept = uuid if waits else wanted.uuid
        moved = {**key, "of_uuid": uuid, "to_uuid": kept, "to_expires": wanted.key_expires}
        if connection.execute(_POINT_KEY, moved).rowcount or waits:
            if not waits:
                _ACCEPT(connection, [(wanted.uuid.hex, *_VALUES(wanted))])
            return kept
        # Another Titanic has moved the key meanwhile.


def _accept(connection: Connection, batch: Sequence[Submission]) -> list[UUID | None]:
    keyed = [each for each in batch if each.key is not None]
    known, new = _enter_keys(connection, keyed) if keyed else ({}, set())
    uuids = [each.uuid if each.key is None else known[_key_of(each)] for each in batch]
    rows = [(each.uuid.hex, *_VALUES(each)) for each in batch if each.key is None or each.uuid.hex in new]
    if _ACCEPT.count(connection, rows) == len(rows):
        return list(uuids)
    # Some UUIDs were there already: of requests that are submitted again, or of other owners' requests.
    found = connection.execute(sa.select(R.uuid, R.owner).where(R.uuid.in_([each.uuid for each in batch])))
    owners = {row.uuid: row.owner for row in found}
    return [
        None if uuid == each.uuid and owners.get(uuid) != each.owner else uuid
        for each, uuid in zip(batch, uuids, strict=True)
    ]


def _key_of(submission: Submission) -> _Key:
    """Return the primary key of the submission's key."""
    return submission.service, str(submission.key), submission.owner


def _enter_keys(connection: Connection, keyed: Sequence[Submission]) -> tuple[dict[_Key, UUID], set[str]]:
    """Insert keys that are new or have expired.

    Returns the UUID that each key stands for, and the UUIDs, in hex, of the submissions whose keys were entered.  Only
    these may be stored: if the transaction is repeated, because its answer was lost, their requests may have been
    closed meanwhile.
    """
    # Sorted, so that two Titanics with the same keys cannot deadlock.
    first = dict(sorted({_key_of(each): each for each in reversed(keyed)}.items()))
    given = [(*key, each.uuid.hex, each.key_expires) for key, each in first.items()]
    new = {_as_hex(uuid) for (uuid,) in _ENTER_KEYS(connection, given)}
    if len(new) == len(first):
        return {key: each.uuid for key, each in first.items()}, new
    known = _find_keys(connection, first)
    old = [each for key, each in first.items() if key not in known or known[key][1] <= each.created]
    if old:  # expired, and perhaps deleted a moment ago
        connection.execute(
            _RENEW_KEYS[connection.dialect.name],
            [
                {
                    "service": each.service, "key": each.key, "owner": each.owner, "uuid": each.uuid,
                    "expires": each.key_expires, "now": each.created,
                }
                for each in old
            ],
        )  # fmt: skip
        renewed = _find_keys(connection, [_key_of(each) for each in old])
        new |= {each.uuid.hex for each in old if renewed[_key_of(each)][0] == each.uuid}
        known |= renewed
    return {key: uuid for key, (uuid, _) in known.items()}, new


def _as_hex(uuid: str | UUID) -> str:
    """Return the digits of a UUID that a driver has returned."""
    return uuid if isinstance(uuid, str) else uuid.hex


def _find_keys(connection: Connection, keys: Iterable[_Key]) -> dict[_Key, tuple[UUID, float]]:
    """Return the UUID that each key stands for, and when the key expires."""
    return {
        (service, key, owner): (as_uuid(uuid), math.inf if expires is None else expires)
        for service, key, owner, uuid, expires in _FIND_KEYS[connection.dialect.name](connection, list(keys))
    }

"""The operator's SQL: functions of a connection, in the caller's transaction.

Times are arguments, in seconds since 1970.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...mdp.codes import Code
from ..db.store.counts import counted, totals
from ..db.store.models import HOLDERS, KEYS_STATE, NOT_ENDED, PARTIALS_STATE, PARTS, REQUESTS, STATES, P, R, W, is_in
from ..db.store.outcomes import NEXT_ENDED, reserve_ended

MAX_SEARCHED: Final = 100_000
"""Requests in which a text is searched for."""
MAX_EXPORTED_BYTES: Final = 16 << 20
"""Size of bodies and replies from which no more are read at a time."""
_LISTED: Final = (
    R.uuid, R.service, R.owner, R.state, R.priority, R.created, R.due, R.started, R.finished, R.attempts, R.failures,
    R.deaths, R.code, R.error, R.key, R.group_name,
)  # fmt: skip
_NO_REQUESTS: Final[dict[str, Any]] = {
    **dict.fromkeys(STATES, 0), "attempts": 0, "deaths": 0, "oldest_pending_seconds": None,
}  # fmt: skip
_LARGE: Final = (R.body, R.reply)
_SHOWN: Final = (*_LISTED, *(column for column in R if column not in {*_LISTED, *_LARGE, R.ended}), *_LARGE)


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter for requests; None selects all."""

    states: tuple[str, ...] = STATES
    service: str | None = None
    created_before: float | None = None
    finished_before: float | None = None
    owner: str | None = None
    code: int | None = None
    error: str | None = None
    """A text in the error, in upper or lower case."""

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return the filter as SQL."""
        found = [sa.or_(*(is_in(state) for state in self.states))]
        if self.service is not None:
            found.append(R.service == self.service)
        if self.created_before is not None:
            found.append(R.created < self.created_before)
        if self.finished_before is not None:
            found.append(R.finished < self.finished_before)
        if self.owner is not None:
            found.append(R.owner == self.owner)
        if self.owner:
            found.append(R.owner != sa.literal_column("''"))  # only so do the databases use the partial index
        if self.code is not None:
            found.append(R.code == self.code)
        if self.error is not None:
            found.append(R.error.icontains(self.error, autoescape=True))
        return found


def ls(connection: Connection, which: Filter, limit: int) -> list[dict[str, Any]]:
    """Return the oldest requests that match the filter, without their bodies."""
    rows = connection.execute(sa.select(*_LISTED).where(*which.conditions()).order_by(R.id).limit(limit))
    return [_row(row) for row in rows.mappings()]


def search(connection: Connection, which: Filter, text: str, uuid: UUID | None, limit: int) -> list[dict[str, Any]]:
    """Return the newest requests that match the filter, without their bodies.

    With `uuid`, only that one; otherwise those with `text` in the name of the service, the key, the owner or the error.
    Only the newest `MAX_SEARCHED` requests are looked at.
    """
    conditions = which.conditions()
    if uuid is not None:
        conditions.append(R.uuid == uuid)
    else:
        newest = sa.select(sa.func.max(R.id)).scalar_subquery()
        conditions.append(R.id > newest - MAX_SEARCHED)
        if text:
            columns = (R.service, R.key, R.owner, R.error)
            conditions.append(sa.or_(*(column.icontains(text, autoescape=True) for column in columns)))
    rows = connection.execute(sa.select(*_LISTED).where(*conditions).order_by(R.id.desc()).limit(limit))
    return [_row(row) for row in rows.mappings()]


def show(connection: Connection, uuid: UUID, most: int | None = None) -> dict[str, Any] | None:
    """Return everything about a request; `body`, `reply` and the latest attempt's `partials` are packed frames.

    Of the PARTIALs, these are the first `most`, or all.
    """
    row = connection.execute(sa.select(*_SHOWN).where(R.uuid == uuid)).mappings().one_or_none()
    if row is None:
        return None
    parts = connection.scalars(
        sa.select(P.body).where(P.request == row["id"], P.attempt == row["attempts"]).order_by(P.number).limit(most)
    )
    return {**_row(row), "partials": list(parts)}


def count_partials(connection: Connection, uuid: UUID) -> int:
    """Return how many PARTIALs the latest attempt of a request has."""
    latest = REQUESTS.join(PARTS, sa.and_(P.request == R.id, P.attempt == R.attempts))
    return connection.scalar(sa.select(sa.func.count()).select_from(latest).where(R.uuid == uuid)) or 0


def _row(row: Mapping[Any, Any]) -> dict[str, Any]:
    found = dict(row)
    found["uuid"] = found["uuid"].hex
    found.pop("id", None)
    return found


def note(row: Mapping[str, Any], now: float, span: Callable[[float], str]) -> str:
    """Return the most important detail of a request; `span` shows a duration."""
    if row["state"] == "failed":
        return f"{row['code']}: {row['error']}"
    if row["state"] == "delayed":
        why = f" after: {row['error']}" if row["error"] else ""
        return f"due in {span(max(row['due'] - now, 0.0))}{why}"
    if row["state"] == "done":
        return f"took {span(row['finished'] - row['created'])}"
    return ""


def failures(connection: Connection, which: Filter, limit: int) -> list[dict[str, Any]]:
    """Return how often requests that match the filter have failed, by service, code and error, the most first."""
    count = sa.func.count().label("count")
    last = sa.func.max(R.finished).label("last")
    reasons = sa.select(R.service, R.code, R.error, count, sa.func.min(R.finished).label("first"), last)
    found = reasons.where(*replace(which, states=("failed",)).conditions()).group_by(R.service, R.code, R.error)
    return [dict(row) for row in connection.execute(found.order_by(count.desc(), last.desc()).limit(limit)).mappings()]


def export(connection: Connection, which: Filter, after: int, limit: int) -> list[dict[str, Any]]:
    """Return everything but the PARTIALs of the next matching requests whose `id` is above `after`.

    There are at most `limit`, and about `MAX_EXPORTED_BYTES`.  `body` and `reply` are packed frames.
    """
    size = sa.func.length(R.body) + sa.func.coalesce(sa.func.length(R.reply), 0)
    some = sa.select(R.id, size.label("size")).where(*which.conditions(), R.id > after).order_by(R.id).limit(limit)
    each = some.subquery()
    sizes = sa.select(each.c.id, (sa.func.sum(each.c.size).over(order_by=each.c.id) - each.c.size).label("before"))
    first = sizes.subquery()
    found = sa.select(*_SHOWN).join(first, R.id == first.c.id).where(first.c.before < MAX_EXPORTED_BYTES)
    return [{**row, "uuid": row["uuid"].hex} for row in connection.execute(found.order_by(R.id)).mappings()]


def retry(connection: Connection, uuids: Sequence[UUID], now: float) -> list[UUID]:
    """Retry failed requests as if they were new, and return their UUIDs."""
    return _change(
        connection, uuids, ("failed",), state="pending", due=now, failures=0, deaths=0, finished=None, expires=None,
        code=None, error=None, reply=None, ended=None,
    )  # fmt: skip


def cancel(connection: Connection, uuids: Sequence[UUID], now: float) -> list[UUID]:
    """Make requests that have not ended fail with 499, and return their UUIDs.

    A Titanic that is running one of them cancels it at its next maintenance.
    """
    # On SQLite, requests that end in one transaction may share a number.
    ended = reserve_ended(connection, 1) + 1 if connection.dialect.name == "sqlite" else NEXT_ENDED
    return _change(
        connection, uuids, NOT_ENDED, state="failed", finished=now, expires=R.result_ttl + now,
        holder=None, code=int(Code.CANCELLED), error="cancelled by an operator", ended=ended,
    )  # fmt: skip


def _change(connection: Connection, uuids: Sequence[UUID], states: Sequence[str], **values: Any) -> list[UUID]:
    changed = sa.update(REQUESTS).where(R.uuid.in_(uuids), R.state.in_(states)).values(**values).returning(R.uuid)
    return list(connection.scalars(changed))


def matching(connection: Connection, which: Filter, after: int, limit: int) -> list[tuple[int, UUID]]:
    """Return the ids and UUIDs of the next `limit` requests whose id is above `after`."""
    some = sa.select(R.id, R.uuid).where(*which.conditions(), R.id > after).order_by(R.id).limit(limit)
    return [(row.id, row.uuid) for row in connection.execute(some)]


def count(connection: Connection, which: Filter) -> int:
    """Count the requests that match the filter."""
    return connection.scalar(sa.select(sa.func.count()).select_from(REQUESTS).where(*which.conditions())) or 0


def purge(connection: Connection, which: Filter, ids: Sequence[int]) -> int:
    """Delete the requests with these ids that still match the filter, and return how many."""
    return connection.execute(sa.delete(REQUESTS).where(R.id.in_(ids), *which.conditions())).rowcount


def stats(connection: Connection, now: float) -> dict[str, Any]:
    """Return counts by service and state, attempts, lost workers, and how long requests have waited.

    `oldest_waiting_seconds` is the age of the oldest request that has not ended; `oldest_pending_seconds` is for how
    long a pending request could have run already.  `titanics` is the number of Titanics whose lease has not expired:
    those that run requests, or did so lately.
    """
    rows = counted(connection)
    services: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.state not in STATES:
            continue
        found = services.setdefault(row.service, _NO_REQUESTS | {"oldest_waiting_seconds": None})
        found[row.state] = row.requests
        found["attempts"] += row.attempts
        found["deaths"] += row.deaths
        if row.due is not None:
            found["oldest_pending_seconds"] = max(0.0, round(now - row.due, 3))
        if row.oldest is not None:
            found["oldest_waiting_seconds"] = max(0.0, round(now - row.oldest, 3))
    total: dict[str, Any] = {
        name: sum(each[name] for each in services.values()) for name in (*STATES, "attempts", "deaths")
    }
    pending = [each["oldest_pending_seconds"] for each in services.values() if each["pending"]]
    total["oldest_pending_seconds"] = max(pending, default=None)
    sums = totals(rows)
    return {
        "total": total, "services": services, "keys": sums[KEYS_STATE], "partials": sums[PARTIALS_STATE],
        "titanics": connection.scalar(sa.select(sa.func.count()).select_from(HOLDERS).where(W.lease > now)) or 0,
    }  # fmt: skip

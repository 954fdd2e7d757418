"""What an operator asks of the tables: functions of a connection, inside a transaction of the caller's.

No clock: times are given, in seconds since 1970.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..mdp.codes import Code
from .store.models import STATES
from .store.store import KEYS, NEXT_ENDED, PARTS, REQUESTS, P, R, count_ended, is_in

_LISTED: Final = (
    R.uuid, R.service, R.state, R.priority, R.created, R.due, R.started, R.finished, R.attempts, R.failures, R.code,
    R.error, R.key,
)  # fmt: skip
_SHOWN: Final = (*_LISTED, R.id, R.retries, R.backoff, R.result_ttl, R.expires, R.owner, R.headers)


@dataclass(frozen=True, slots=True)
class Which:
    """Requests to look for; what is None does not matter."""

    states: tuple[str, ...] = STATES
    service: str | None = None
    created_before: float | None = None
    finished_before: float | None = None

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """As SQL."""
        found = [sa.or_(*(is_in(state) for state in self.states))]
        if self.service is not None:
            found.append(R.service == self.service)
        if self.created_before is not None:
            found.append(R.created < self.created_before)
        if self.finished_before is not None:
            found.append(R.finished < self.finished_before)
        return found


def ls(connection: Connection, which: Which, limit: int) -> list[dict[str, Any]]:
    """The oldest of these requests, without their bodies."""
    rows = connection.execute(sa.select(*_LISTED).where(*which.conditions()).order_by(R.id).limit(limit))
    return [_row(row) for row in rows.mappings()]


def show(connection: Connection, uuid: UUID) -> dict[str, Any] | None:
    """All there is to know of a request; `body`, `reply` and the latest attempt's `partials` are packed frames."""
    row = connection.execute(sa.select(*_SHOWN, R.body, R.reply).where(R.uuid == uuid)).mappings().one_or_none()
    if row is None:
        return None
    parts = connection.scalars(
        sa.select(P.body).where(P.request == row["id"], P.attempt == row["attempts"]).order_by(P.number)
    )
    return {**_row(row), "partials": list(parts)}


def _row(row: Mapping[Any, Any]) -> dict[str, Any]:
    found = dict(row)
    found["uuid"] = found["uuid"].hex
    found.pop("id", None)
    return found


def retry(connection: Connection, uuids: Sequence[UUID], now: float) -> list[UUID]:
    """Have failed requests done again, from their first try; returns those that were."""
    return _change(
        connection, uuids, ("failed",), state="pending", due=now, failures=0, finished=None, expires=None, code=None,
        error=None, reply=None, ended=None,
    )  # fmt: skip


def cancel(connection: Connection, uuids: Sequence[UUID], now: float) -> list[UUID]:
    """Have requests that are not done fail with 499; returns those that were changed.

    A Titanic at which one is running cancels it when it looks next.
    """
    # On SQLite one number for all: they end in one transaction.
    ended = count_ended(connection, 1) + 1 if connection.dialect.name == "sqlite" else NEXT_ENDED
    return _change(
        connection, uuids, ("delayed", "pending", "running"), state="failed", finished=now, expires=R.result_ttl + now,
        owner=None, code=int(Code.CANCELLED), error="cancelled by an operator", ended=ended,
    )  # fmt: skip


def _change(connection: Connection, uuids: Sequence[UUID], states: Sequence[str], **values: Any) -> list[UUID]:
    changed = sa.update(REQUESTS).where(R.uuid.in_(uuids), R.state.in_(states)).values(**values).returning(R.uuid)
    return list(connection.scalars(changed))


def matching(connection: Connection, which: Which, after: int, limit: int) -> list[tuple[int, UUID]]:
    """The next `limit` of these requests whose id is above `after`: their ids and uuids."""
    some = sa.select(R.id, R.uuid).where(*which.conditions(), R.id > after).order_by(R.id).limit(limit)
    return [(row.id, row.uuid) for row in connection.execute(some)]


def count(connection: Connection, which: Which) -> int:
    """How many there are of these requests."""
    return connection.scalar(sa.select(sa.func.count()).select_from(REQUESTS).where(*which.conditions())) or 0


def purge(connection: Connection, which: Which, ids: Sequence[int]) -> int:
    """Throw away those of these requests that have these ids; returns how many."""
    return connection.execute(sa.delete(REQUESTS).where(R.id.in_(ids), *which.conditions())).rowcount


def stats(connection: Connection, now: float) -> dict[str, Any]:
    """Counts by service and state, and how long the oldest of those that wait has waited."""
    rows = connection.execute(
        sa.select(R.service, R.state, sa.func.count().label("count"), sa.func.min(R.created).label("oldest"))
        .group_by(R.service, R.state)
        .order_by(R.service)
    )
    services: dict[str, dict[str, Any]] = {}
    for row in rows:
        found = services.setdefault(row.service, dict.fromkeys(STATES, 0) | {"oldest_waiting_seconds": None})
        found[row.state] = row.count
        if row.state in {"delayed", "pending", "running"}:
            waited = max(0.0, round(now - row.oldest, 3))
            found["oldest_waiting_seconds"] = max(found["oldest_waiting_seconds"] or 0.0, waited)
    totals = {state: sum(each[state] for each in services.values()) for state in STATES}
    keys, parts = (connection.scalar(sa.select(sa.func.count()).select_from(each)) for each in (KEYS, PARTS))
    return {"total": totals, "services": services, "keys": keys, "partials": parts}

"""Store the results of attempts: PARTIALs, outcomes, and requests to retry.

A statement changes a request only if `id`, `holder` and `attempt` still match: a Titanic whose lease has expired can no
longer change it.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection

from .bulk import Bulk
from .models import COUNTERS, ENDED_SEQUENCE, REQUESTS, R, is_in


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


_ADD_PARTIALS: Final = {"sqlite": _adding(""), "postgresql": _adding("FOR KEY SHARE OF r")}
"""PostgreSQL locks the request, so that it cannot be closed at the same time."""


def add_partials(connection: Connection, batch: Sequence[Partial]) -> list[None]:
    """Store PARTIALs, unless their request was closed or a later attempt has begun."""
    _ADD_PARTIALS[connection.dialect.name](connection, batch)
    return [None] * len(batch)


class Outcome(NamedTuple):
    """How a request ended: with a reply or, if there is a code, with a failure that is not retried."""

    id: int
    holder: str
    attempt: int
    now: float
    reply: bytes | None
    code: int | None = None
    error: str | None = None
    ttl: float | None = None
    """Seconds to keep the result if the request has no ttl of its own; None keeps it until it is closed."""
    deaths: int | None = None
    """How many workers were lost while they handled it, in all attempts; None if no more than before."""


_OF_ATTEMPT: Final = """
    r.id = request AND r.holder = by_holder AND r.attempts = attempt AND r.state = 'running'
"""
"""Without the name of the table `given`, whose columns have names of their own: `RETURNING id` is then unambiguous."""
_ATTEMPT: Final = {"request": "bigint", "by_holder": "text", "attempt": "int"}


def _finishing(ended: str) -> Bulk:
    return Bulk(
        f"""
        WITH given
        UPDATE titanic_requests AS r SET
            state = CASE WHEN given.code IS NULL THEN 'done' ELSE 'failed' END,
            finished = given.now, expires = coalesce(r.result_ttl, given.ttl) + given.now, holder = NULL,
            reply = given.reply, code = given.code, error = given.error, ended = {ended},
            deaths = coalesce(given.deaths, r.deaths)
        FROM given WHERE {_OF_ATTEMPT}
        RETURNING id, attempts
        """,  # noqa: S608 - our own
        **_ATTEMPT,
        now="double precision",
        reply="bytea",
        code="int",
        error="text",
        ttl="double precision",
        deaths="int",
        ended="bigint",
    )


def _advance_counter(insert: Any) -> sa.Executable:
    entered = insert(COUNTERS)
    found: sa.Executable = entered.on_conflict_do_update(
        index_elements=[COUNTERS.c.name], set_={"value": COUNTERS.c.value + entered.excluded.value}
    ).returning(COUNTERS.c.value)
    return found


_Ended = TypeVar("_Ended", bound="Outcome | Reschedule")


def _firsts(batch: Sequence[_Ended]) -> list[_Ended]:
    """Keep the first outcome of each attempt: of several, UPDATE would pick an arbitrary one."""
    return list({each[:3]: each for each in reversed(batch)}.values())[::-1]


NEXT_ENDED: Final = ENDED_SEQUENCE.next_value()
"""PostgreSQL's next value of `ended`.  Use it only in an UPDATE of the requests, which locks them first: a reader
(`titanic/db/offsets.py`) concludes from those locks which lower values may still be committed."""
_FINISH: Final = {"sqlite": _finishing("given.ended"), "postgresql": _finishing("nextval('titanic_ended')")}
_ADVANCE_COUNTER: Final = _advance_counter(sqlite.insert)


def reserve_ended(connection: Connection, count: int) -> int:
    """Reserve the next `count` values of `ended` on SQLite, and return the one before them."""
    return int(connection.scalar(_ADVANCE_COUNTER, {"name": "ended", "value": count}) or 0) - count


def finish(connection: Connection, batch: Sequence[Outcome]) -> list[bool]:
    """Store outcomes of attempts.  Return for each whether it was stored: it is not if another attempt has begun."""
    name = connection.dialect.name
    before = reserve_ended(connection, len(batch)) if name == "sqlite" else 0
    firsts = _firsts(batch)
    rows = [(*each, before + at) for at, each in enumerate(firsts, 1)]
    stored = {(id_, attempt) for id_, attempt in _FINISH[name](connection, rows)}
    return [(each.id, each.attempt) in stored for each in batch]


class Reschedule(NamedTuple):
    """An attempt that failed; the next one is due at `due`."""

    id: int
    holder: str
    attempt: int
    due: float
    failures: int | None = None
    """How often the handler has failed, including this attempt; None if it is not to blame."""
    error: str | None = None
    deaths: int | None = None
    """How many workers were lost while they handled it, in all attempts; None if no more than before."""


_RESCHEDULE: Final = Bulk(
    f"""
    WITH given
    UPDATE titanic_requests AS r SET
        state = 'delayed', due = given.due, holder = NULL, failures = coalesce(given.failures, r.failures),
        deaths = coalesce(given.deaths, r.deaths), error = given.error
    FROM given WHERE {_OF_ATTEMPT}
    """,  # noqa: S608 - our own
    **_ATTEMPT,
    due="double precision",
    failures="int",
    error="text",
    deaths="int",
)


def reschedule(connection: Connection, batch: Sequence[Reschedule]) -> list[None]:
    """Delay requests until their next attempt."""
    _RESCHEDULE(connection, _firsts(batch))
    return [None] * len(batch)


def release(connection: Connection, batch: Sequence[str]) -> list[None]:
    """Make all requests pending again that these holders are running."""
    connection.execute(
        sa.update(REQUESTS).where(is_in("running"), R.holder.in_(batch)).values(state="pending", holder=None)
    )
    return [None] * len(batch)

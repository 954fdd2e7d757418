"""Submit occurrences, and add, change and list schedules (`titanic/api/schedules.py` decides which are due)."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ....mdp.services.recurrence import RecurrenceError
from ...api.schedules import MAX_OCCURRENCES, Due, Schedule, due
from ...api.submission import Submission, new_uuid
from .acceptance import accept
from .claims import Clock
from .models import REQUESTS, SCHEDULES, R, S, for_both_dialects

MAX_FIRED: Final = 500
"""Maximum number of schedules, and of requests, in one transaction: missed occurrences must not hold up others."""
MAX_SCHEDULES: Final = 10_000
"""Maximum number of schedules in the database."""
_FIELDS: Final = tuple(S[name] for name in Schedule._fields)
_SCHEDULE: Final = sa.select(*_FIELDS)
_ADVANCE: Final = (
    sa.update(SCHEDULES)
    .where(S.name == sa.bindparam("of_name"), S.owner == sa.bindparam("of_owner"))
    .values(
        next=sa.bindparam("next"),
        last=sa.func.coalesce(sa.bindparam("last", type_=sa.Double), S.last),
        last_uuid=sa.func.coalesce(sa.bindparam("last_uuid", type_=sa.Uuid), S.last_uuid),
    )
)
_INSERT: Final = for_both_dialects(lambda insert: insert(SCHEDULES).on_conflict_do_nothing())

log = logging.getLogger("zmdp.titanic")


# ── occurrences ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Fired(NamedTuple):
    """The requests that were submitted, and the UUID of each, as `accept` returns it."""

    submissions: list[Submission]
    uuids: list[UUID | None]


def next_occurrence(connection: Connection, batch: Sequence[frozenset[str]]) -> list[float | None]:
    """Return when the next occurrence is due, of schedules of other services than these."""
    return [
        connection.scalar(sa.select(sa.func.min(S.next)).where(S.next.is_not(None), *_not_of(full))) for full in batch
    ]


def _not_of(services: frozenset[str]) -> list[sa.ColumnElement[bool]]:
    return [S.service.not_in(sorted(services))] if services else []


@dataclass(frozen=True, slots=True)
class Firing:
    """By which clock occurrences are due, and for which services there is no room."""

    clock: Clock
    full: frozenset[str] = frozenset()


def fire(connection: Connection, batch: Sequence[Firing]) -> list[Fired]:
    """Submit the occurrences that are due, and advance their schedules in the same transaction.

    Other Titanics do the same.  Each takes schedules that no other has locked, so every occurrence is submitted by one
    of them; the key of its request is a second guard.  Repeating the transaction submits what is still due.
    """
    return [_fire(connection, each.clock.now(), each.full) for each in batch]


def _fire(connection: Connection, now: float, full: frozenset[str]) -> Fired:
    some = (
        _SCHEDULE.where(S.next <= now, *_not_of(full))
        .order_by(S.next)
        .limit(MAX_FIRED)
        .with_for_update(skip_locked=True)
    )
    submissions: list[Submission] = []
    advanced: list[tuple[Schedule, Due]] = []
    rows = connection.execute(some).all()
    for row in rows:
        schedule = Schedule(*row)
        found = _due(schedule, now, min(MAX_OCCURRENCES, MAX_FIRED // len(rows)))
        advanced.append((schedule, found))
        submissions += [schedule.submission(occurrence, now) for occurrence in found.occurrences]
    uuids = accept(connection, submissions) if submissions else []
    stored = iter(uuids)
    advances = []
    for schedule, found in advanced:
        last: tuple[float | None, UUID | None] = (None, None)
        for occurrence in found.occurrences:
            last = (occurrence, next(stored))
        advances.append(_advance(schedule, found.next, *last))
    if advances:
        connection.execute(_ADVANCE, advances)
    return Fired(submissions, uuids)


def _due(schedule: Schedule, now: float, limit: int) -> Due:
    """Return the occurrences that are due.  A schedule that cannot be read is paused, so that the others go on."""
    try:
        return due(schedule, now, limit)
    except RecurrenceError as error:
        log.error("paused the schedule %s: %s", schedule.name, error)
        return Due([], None)


def _advance(schedule: Schedule, following: float | None, last: float | None, uuid: UUID | None) -> dict[str, Any]:
    """Return the parameters of `_ADVANCE`; `last` and `uuid` may be None to keep those of the row."""
    return {
        "of_name": schedule.name, "of_owner": schedule.owner, "next": following, "last": last, "last_uuid": uuid,
    }  # fmt: skip


def catch_up(connection: Connection, batch: Sequence[Clock]) -> list[int]:
    """Bring back schedules whose next occurrence lies too far ahead, because the clock was ahead and has been set back.

    Requests that were submitted when the clock was ahead are not submitted again: their keys are remembered.  Returns
    the number of schedules.
    """
    return [_catch_up(connection, clock.now()) for clock in batch]


def _catch_up(connection: Connection, now: float) -> int:
    advances = []
    for row in connection.execute(_SCHEDULE.where(S.next > now).with_for_update()):
        schedule = Schedule(*row)
        with suppress(RecurrenceError):
            following = schedule.recurrence.after(now)
            if following is not None and schedule.next is not None and following < schedule.next:
                advances.append(_advance(schedule, following, None, None))
    if advances:
        connection.execute(_ADVANCE, advances)
    return len(advances)


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Edit:
    """A change to one schedule."""

    action: str
    """`add`, `pause`, `resume`, `rm` or `run`."""
    name: str
    owner: str | None
    """The schedule's owner; None for an admin, who may change schedules of others."""
    now: float
    schedule: Schedule | None = None
    """The schedule to add."""
    uuid: UUID = field(default_factory=new_uuid)
    """The UUID of the request, for `run`: the same if it is repeated."""
    full: frozenset[str] = frozenset()
    """The services for which `run` finds no room."""


class Edited(NamedTuple):
    """The result of a change: a problem, or for `run` the request that was submitted."""

    problem: str = ""
    submission: Submission | None = None
    full_service: str = ""
    """The service for which there is no room."""


def edit_schedules(connection: Connection, batch: Sequence[Edit]) -> list[Edited]:
    """Change schedules.  Idempotent: the same changes can be made again."""
    return [_add(connection, each.schedule) if each.schedule else _change(connection, each) for each in batch]


def _add(connection: Connection, schedule: Schedule, *, seen: float | None = None) -> Edited:
    """Add a schedule; if it is declared by workers, which were `seen` at some moment, change the one that they had."""
    (known,) = connection.execute(sa.select(sa.func.count()).select_from(SCHEDULES)).one()
    if known < MAX_SCHEDULES and _insert(connection, schedule, seen):
        return Edited()
    found = connection.execute(
        sa.select(S.seen, *_FIELDS).where(S.name == schedule.name, S.owner == schedule.owner).with_for_update()
    ).one_or_none()
    if found is None:
        return Edited(f"there are {MAX_SCHEDULES} schedules already: remove some first")
    before, *fields = found
    if seen is not None and before is not None:
        _replace(connection, Schedule(*fields), schedule, seen)
    elif not Schedule(*fields).same_as(schedule):
        return Edited(f"there is another schedule {schedule.name} already: remove it first")
    return Edited()


def _replace(connection: Connection, before: Schedule, schedule: Schedule, seen: float) -> None:
    """Change a schedule.  It stays paused if it was, and its next occurrence is the same if its times are."""
    values: dict[str, Any] = {"seen": seen}
    if not before.same_as(schedule):
        values |= schedule._asdict()
        if schedule.recurs_as(before):
            values |= {"created": before.created, "next": before.next}
        elif before.next is None:
            values["next"] = None
    this = (S.name == schedule.name) & (S.owner == schedule.owner)
    connection.execute(sa.update(SCHEDULES).where(this).values(**values))


def _insert(connection: Connection, schedule: Schedule, seen: float | None) -> bool:
    values = {**schedule._asdict(), "seen": seen}
    return connection.execute(_INSERT[connection.dialect.name], values).rowcount == 1


def _change(connection: Connection, edit: Edit) -> Edited:
    found = _find(connection, edit.name, edit.owner)
    if len(found) != 1:
        several = f"several roles have a schedule {edit.name}: set owner"
        return Edited(several if found else f"there is no schedule {edit.name}")
    (schedule,) = found
    this = (S.name == schedule.name) & (S.owner == schedule.owner)
    if edit.action == "rm":
        connection.execute(sa.delete(SCHEDULES).where(this))
    elif edit.action == "pause":
        connection.execute(sa.update(SCHEDULES).where(this).values(next=None))
    elif edit.action == "resume" and schedule.next is None:
        try:
            following = schedule.recurrence.after(edit.now)
        except RecurrenceError as error:
            return Edited(str(error))
        connection.execute(sa.update(SCHEDULES).where(this).values(next=following))
    elif edit.action == "run" and schedule.service in edit.full:
        return Edited(full_service=schedule.service)
    elif edit.action == "run":
        occurrence = schedule.submission(edit.now, edit.now)
        submission = occurrence._replace(uuid=edit.uuid, key=None, key_expires=None)
        (uuid,) = accept(connection, [submission])
        if uuid is None:
            return Edited("uuid cannot be used: choose another")
        connection.execute(_ADVANCE, _advance(schedule, schedule.next, edit.now, uuid))
        return Edited(submission=submission)
    return Edited()


def _find(connection: Connection, name: str, owner: str | None) -> list[Schedule]:
    """Return the schedules of this name, at most one if `owner` is given, and lock them."""
    where = [S.name == name, *([] if owner is None else [S.owner == owner])]
    return [Schedule(*row) for row in connection.execute(_SCHEDULE.where(*where).limit(2).with_for_update())]


@dataclass(frozen=True, slots=True)
class Declared:
    """The schedules that workers of some services declare."""

    schedules: Mapping[str, Schedule | None]
    """By service; None if they declare none."""
    now: float
    forget: float | None
    """Remove schedules that no worker has declared since."""


def declare_service_schedules(connection: Connection, batch: Sequence[Declared]) -> list[list[str]]:
    """Add, change and remove schedules that services declare; return the problems."""
    return [_declare_service_schedules(connection, each) for each in batch]


def _declare_service_schedules(connection: Connection, declared: Declared) -> list[str]:
    problems = []
    for service, schedule in sorted(declared.schedules.items()):
        if schedule is None:
            connection.execute(sa.delete(SCHEDULES).where(S.service == service, S.seen.is_not(None)))
            continue
        if problem := _add(connection, schedule, seen=declared.now).problem:
            problems.append(f"the schedule of service {service} is ignored: {problem}")
    if declared.forget is not None:
        connection.execute(sa.delete(SCHEDULES).where(S.seen <= declared.forget))
    return problems


# ── listing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Listing(NamedTuple):
    """Which schedules to list: those of an owner, or all if that is None."""

    owner: str | None


def list_schedules(connection: Connection, batch: Sequence[Listing]) -> list[list[dict[str, Any]]]:
    """Return schedules by name, with the state, code and error of the latest request of each if that still exists."""
    return [_list(connection, each.owner) for each in batch]


def _list(connection: Connection, owner: str | None) -> list[dict[str, Any]]:
    columns = [column for column in S if column is not S.body]
    found = sa.select(*columns, R.state, R.code, R.error).select_from(
        SCHEDULES.outerjoin(REQUESTS, R.uuid == S.last_uuid)
    )
    if owner is not None:
        found = found.where(S.owner == owner)
    return [dict(row) for row in connection.execute(found.order_by(S.name, S.owner)).mappings()]

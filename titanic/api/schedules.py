"""Schedules: requests that are submitted again and again, and the occurrences that are due.

Pure: times are arguments, in seconds since 1970.  `titanic/server/cron.py` submits them,
`titanic/db/store/schedules.py` has the SQL.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final, NamedTuple, TypedDict, get_type_hints

from ...mdp.services import recurrence
from ...mdp.services.recurrence import Recurrence, RecurrenceError
from .submission import (
    OPTIONS,
    ChoiceOption,
    DurationOption,
    MalformedRequest,
    Option,
    Submission,
    TextOption,
    check_names,
    new_uuid,
    parse_submission,
)

POLICIES: Final = ("skip", "once", "all")
MISSED_SECONDS: Final = 60.0
"""An occurrence that Titanic finds so late counts as missed."""
MAX_OCCURRENCES: Final = 100
"""Maximum number of a schedule's occurrences that are submitted in one transaction."""
KEY_SECONDS: Final = 7 * 86400.0
"""How long the key of an occurrence is remembered."""
DEFAULT_RESULT_TTL: Final = 7 * 86400.0
"""How long results are kept by default: nobody knows the UUIDs of these requests, so nobody closes them."""
SCHEDULE_HEADER: Final = "schedule"
"""The header that tells a handler for which occurrence it is called: NAME@TIME."""
_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{1,100}")


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule, as Python programs pass them.  None stands for the default."""

    cron: Annotated[
        str | None,
        TextOption(
            max_bytes=255,
            help="When to submit a request, as in a crontab: minute, hour, day of the month, month, day of the week; "
            "e.g. '30 2 * * MON-FRI', or @hourly, @daily, @weekly, @monthly, @yearly. With six fields, the first has "
            "the seconds.",
        ),
    ]
    every: Annotated[
        float | None,
        DurationOption(help="Interval at which to submit a request, instead of --cron: e.g. 90s, 5m; 1s or more."),
    ]
    timezone: Annotated[
        str | None, TextOption(max_bytes=100, help="Time zone of --cron, e.g. Europe/Berlin.", default=recurrence.UTC)
    ]
    missed: Annotated[
        str | None,
        ChoiceOption(
            choices=POLICIES,
            help="What to do about occurrences that are over a minute late, because no Titanic was running: skip them, "
            "submit one request for them, or submit them all.",
            default="once",
        ),
    ]
    priority: Annotated[int | None, OPTIONS["priority"]]
    group: Annotated[str | None, OPTIONS["group"]]
    retries: Annotated[int | None, OPTIONS["retries"]]
    backoff: Annotated[float | None, OPTIONS["backoff"]]
    ttl: Annotated[float | None, replace(OPTIONS["ttl"], default="7d")]


SCHEDULE_OPTIONS: Final[Mapping[str, Option]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(ScheduleOptions, include_extras=True).items()
}
"""The options of a schedule by their Python names."""
_OWN_NAMES: Final = ("cron", "every", "timezone", "missed")
"""Options that concern the schedule, not the requests that it submits."""
_WIRE_NAMES: Final = tuple(option.wire_name or name for name, option in SCHEDULE_OPTIONS.items())


class Schedule(NamedTuple):
    """A request that is submitted at certain times.  The fields are columns of `titanic_schedules`."""

    name: str
    owner: str
    service: str
    body: bytes
    headers: str | None
    priority: int
    retries: int
    backoff: float | None
    result_ttl: float | None
    cron: str | None
    every: float | None
    timezone: str
    missed: str
    created: float
    next: float | None
    """The first occurrence that was not handled yet; None while the schedule is paused."""
    group_name: str = ""

    @property
    def recurrence(self) -> Recurrence:
        """When it recurs.  Raises `RecurrenceError`: this machine may not know the time zone."""
        if self.every is not None:
            return recurrence.every(self.every, self.created)
        return recurrence.cron(self.cron or "", self.timezone)

    def same_as(self, other: "Schedule") -> bool:
        """Return whether both submit the same at the same times, apart from when an interval began."""
        return self._replace(created=0.0, next=None) == other._replace(created=0.0, next=None)

    def recurs_as(self, other: "Schedule") -> bool:
        """Return whether both submit at the same times, apart from when an interval began."""
        return (self.cron, self.every, self.timezone) == (other.cron, other.every, other.timezone)

    def submission(self, occurrence: float, now: float) -> Submission:
        """Return the request for an occurrence, whose key makes sure that it is stored once."""
        key = occurrence_key(self.name, occurrence)
        return Submission(
            uuid=new_uuid(), service=self.service, body=self.body, created=now, due=now, key=key,
            key_expires=now + KEY_SECONDS, priority=self.priority, retries=self.retries, backoff=self.backoff,
            result_ttl=self.result_ttl, headers=_with_header(self.headers, key), owner=self.owner,
            group_name=self.group_name,
        )  # fmt: skip


class Due(NamedTuple):
    """The occurrences of a schedule that are due at some moment, and the next one."""

    occurrences: list[float]
    """The occurrences to submit now, in order."""
    next: float | None
    """The first that was not handled; if it is not later than now, there is more to submit."""


def due(schedule: Schedule, now: float, limit: int = MAX_OCCURRENCES) -> Due:
    """Return which occurrences of a schedule to submit now, at most `limit`.

    Those of the last minute are submitted in any case.  Earlier ones were missed, and `schedule.missed` decides:
    `skip` drops them, `once` submits the first of them, and `all` submits them all.

    Raises:
        RecurrenceError: The schedule cannot be read on this machine.
    """
    rule, following = schedule.recurrence, schedule.next
    occurrences: list[float] = []
    if following is not None and following <= now - MISSED_SECONDS and schedule.missed != "all":
        if schedule.missed == "once":
            occurrences.append(following)
        following = rule.after(max(following, now - MISSED_SECONDS))
    while following is not None and following <= now and len(occurrences) < limit:
        occurrences.append(following)
        following = rule.after(following)
    return Due(occurrences, following)


def occurrence_key(name: str, occurrence: float) -> str:
    """Return the idempotency key of an occurrence."""
    return f"{name}@{datetime.fromtimestamp(occurrence, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _with_header(headers: str | None, key: str) -> str:
    return json.dumps({**json.loads(headers or "{}"), SCHEDULE_HEADER: key})


# ── how a schedule is given ──────────────────────────────────────────────────────────────────────────────────────────


def parse_name(frame: bytes) -> str:
    """Return the name of a schedule.  Raises `MalformedRequest`."""
    name = frame.decode(errors="replace")
    if not _NAME.fullmatch(name):
        raise MalformedRequest("the schedule's name must be 1 to 100 letters, digits or . _ : / -, all ASCII")
    return name


def parse_schedule(frames: Sequence[bytes], options: Mapping[str, Any], now: float, owner: str = "") -> Schedule:
    """Check a new schedule, whose frames are `name service body+`, and whose options are as on the wire.

    Raises:
        MalformedRequest: It breaks a rule.
    """
    if len(frames) < 3:
        raise MalformedRequest("a schedule needs a name, the name of a service, and a body of at least one frame")
    check_names("schedule", options, _WIRE_NAMES)
    name = parse_name(frames[0])
    own: dict[str, Any] = {
        each: None if options.get(each) is None else SCHEDULE_OPTIONS[each].from_wire(each, options[each])
        for each in _OWN_NAMES
    }
    submitted = parse_submission(
        frames[1:], {each: value for each, value in options.items() if each not in own}, now, owner
    )
    if (own["cron"] is None) == (own["every"] is None):
        raise MalformedRequest("a schedule needs either cron or every")
    if own["every"] is not None and own["timezone"] is not None:
        raise MalformedRequest("timezone needs cron")
    found = Schedule(
        name, owner, submitted.service, submitted.body, submitted.headers, submitted.priority, submitted.retries,
        submitted.backoff, DEFAULT_RESULT_TTL if submitted.result_ttl is None else submitted.result_ttl,
        own["cron"], own["every"], own["timezone"] or recurrence.UTC, own["missed"] or "once",
        created=now, next=None, group_name=submitted.group_name,
    )  # fmt: skip
    try:
        first = found.recurrence.after(now)
    except RecurrenceError as error:
        raise MalformedRequest(str(error)) from None
    if first is None:
        raise MalformedRequest(f"cron is {found.cron!r}: that never occurs")
    return found._replace(next=first)

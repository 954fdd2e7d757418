"""When something recurs: a cron expression in a time zone, or a fixed interval.  Pure: times are arguments, in seconds
since 1970, and occurrences fall on whole seconds.

`cronsim` reads cron expressions as Debian's cron does, also when clocks change.  A job that names its minutes and hours
runs once for each time on the clock: if that time is skipped, when the clock has jumped; if it comes twice, the first
time.  A job with `*` for its minutes or hours runs by the time that passes: never in the hour that is skipped, and
twice in the one that is repeated.
"""

import math
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

UTC: Final = "UTC"


class RecurrenceError(ValueError):
    """An expression, a time zone or an interval is invalid.  The message explains the problem."""


class Recurrence(Protocol):
    """A series of moments."""

    def after(self, moment: float) -> float | None:
        """Return the first occurrence after `moment`, or None if there is none."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Every so many seconds from `start` on; before it too, if that lies in the future because a clock was ahead."""

    seconds: int
    start: int

    def after(self, moment: float) -> float:
        """Return the first occurrence after `moment`."""
        return float(self.start + self.seconds * (math.floor((moment - self.start) / self.seconds) + 1))


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields, or of six that begin with the seconds."""

    expression: str
    zone: tzinfo

    def after(self, moment: float) -> float | None:
        """Return the first occurrence after `moment`, or None if there is none in fifty years."""
        # When clocks change, the series repeats moments and begins before `moment`.
        for occurrence in CronSim(self.expression, datetime.fromtimestamp(moment, self.zone)):
            if (found := occurrence.timestamp()) > moment:
                return found
        return None


def every(seconds: float, start: float) -> Interval:
    """Return the interval of so many seconds.  Raises `RecurrenceError`."""
    if seconds < 1 or seconds != int(seconds):
        raise RecurrenceError("every must be a whole number of seconds, 1 or more")
    return Interval(int(seconds), math.floor(start))


def cron(expression: str, zone: str = UTC) -> Cron:
    """Return the recurrence of a cron expression.  Raises `RecurrenceError`."""
    try:
        found = Cron(expression, ZoneInfo(zone))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise RecurrenceError(
            f"timezone is {zone!r:.100}: it must be a name such as Europe/Berlin (if all are unknown, this machine "
            "lacks the database of time zones: install tzdata)"
        ) from None
    try:
        CronSim(expression, datetime(2000, 1, 1))
    except CronSimError as error:
        raise RecurrenceError(f"cron is {expression!r:.100}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    return found

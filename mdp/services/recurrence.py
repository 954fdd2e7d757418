"""When something recurs: a cron expression in a time zone, or a fixed interval.  Pure: times are arguments, in seconds
since 1970, and occurrences fall on whole seconds.

When clocks change, cron expressions are read as Debian's cron reads them.  A job that names its minutes and hours runs
once for each time on the clock: if that time is skipped, when the clock has jumped; if it comes twice, the first time.
A job with `*` for its minutes or hours runs by the time that passes: never in the hour that is skipped, and twice in
the one that is repeated.  `cronsim` reads the expressions, but it is only asked about clocks that do not change: it
loses occurrences where clocks change at midnight or by half an hour, and runs jobs with a field for seconds twice.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from .submission import MAX_SECONDS

UTC: Final = "UTC"
_DAY_SECONDS: Final = 86400
_NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
"""What cron calls some expressions."""


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
        minutes, hours = self.expression.split()[-5:-3]
        if minutes.startswith("*") or hours.startswith("*"):
            return self._by_time_that_passes(math.floor(moment))
        return self._by_clock(moment)

    def _by_clock(self, moment: float) -> float | None:
        for shown in CronSim(self.expression, self._shown(moment)):
            time = shown.replace(tzinfo=self.zone)
            found = time.timestamp()
            if self._shown(found) != shown:  # it is skipped
                found = self._change(int(time.replace(fold=1).timestamp()), int(found)) or found
            if found > moment:
                return found
        return None

    def _by_time_that_passes(self, moment: int) -> float | None:
        """As if clocks would not change; if they do before it occurs, again from then on."""
        shown = self._shown(moment)
        while (following := next(CronSim(self.expression, shown), None)) is not None:
            found = following.replace(tzinfo=timezone(self._offset(moment))).timestamp()
            change = self._change(moment, int(found))
            if change is None:
                return found
            moment, shown = change, self._shown(change) - timedelta(seconds=1)
        return None

    def _shown(self, moment: float) -> datetime:
        """Return what the clock shows."""
        return datetime.fromtimestamp(moment, self.zone).replace(tzinfo=None, fold=0)

    def _offset(self, moment: float) -> timedelta:
        return datetime.fromtimestamp(moment, self.zone).utcoffset() or timedelta()

    def _change(self, after: int, until: int) -> int | None:
        """Return when the clock first changes after a moment, but not after another one; None if it does not."""
        before = self._offset(after)
        for start in range(after, until, _DAY_SECONDS):
            end = min(start + _DAY_SECONDS, until)
            if self._offset(end) != before:
                return start + bisect_left(range(start, end), True, key=lambda each: self._offset(each) != before)
        return None


def every(seconds: float, start: float) -> Interval:
    """Return the interval of so many seconds.  Raises `RecurrenceError`."""
    if not 1 <= seconds <= MAX_SECONDS or seconds != int(seconds):
        raise RecurrenceError("every must be a whole number of seconds, 1 or more, at most a hundred years")
    return Interval(int(seconds), math.floor(start))


def cron(expression: str, zone: str = UTC) -> Cron:
    """Return the recurrence of a cron expression, or of a nickname such as `@daily`.  Raises `RecurrenceError`."""
    if expression.startswith("@") and expression not in _NICKNAMES:
        raise RecurrenceError(
            f"cron is {expression!r:.100}: of the names, there are {', '.join(_NICKNAMES)}; otherwise it has five "
            "fields, or six that begin with the seconds"
        )
    fields = _NICKNAMES.get(expression, expression)
    try:
        found = Cron(fields, ZoneInfo(zone))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise RecurrenceError(
            f"timezone is {zone!r:.100}: it must be a name such as Europe/Berlin (if all are unknown, this machine "
            "lacks the database of time zones: install tzdata)"
        ) from None
    try:
        CronSim(fields, datetime(2000, 1, 1))
    except CronSimError as error:
        raise RecurrenceError(f"cron is {expression!r:.100}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    return found

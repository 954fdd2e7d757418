"""A service's own schedule: when Titanic submits requests to it."""

import re
from collections.abc import Mapping
from typing import Any, Final

from ..errors import SettingError
from .recurrence import RecurrenceError, cron, every

UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


def checked_schedule(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given of `every`, `cron` and `timezone`, `every` in seconds.  Raises `SettingError`."""
    found = {name: given[name] for name in ("every", "cron", "timezone") if given.get(name) is not None}
    if not found:
        return {}
    if ("every" in found) == ("cron" in found):
        raise SettingError("a schedule needs either every or cron")
    for name in ("cron", "timezone"):
        if not isinstance(found.get(name, ""), str):
            raise SettingError(f"{name} is {found[name]!r}: it must be text")
    try:
        if "every" in found:
            if "timezone" in found:
                raise SettingError("timezone needs cron")
            found["every"] = _seconds(found["every"])
            every(found["every"], 0.0)
        else:
            cron(found["cron"], found.get("timezone", "UTC"))
    except RecurrenceError as error:
        raise SettingError(str(error)) from None
    return found


def shown(schedule: Mapping[str, Any]) -> str:
    """Return when a schedule recurs, as in "every 300 s"."""
    if "every" in schedule:
        return f"every {schedule['every']:g} s"
    return f"by cron {schedule['cron']!r} in {schedule.get('timezone', 'UTC')}"


def _seconds(value: Any) -> float:
    """Return the seconds that a number or a text such as `5m` says."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    matched = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if matched is None:
        raise SettingError(f"every is {value!r}: it must be a number of seconds, or a text such as 30s, 5m, 12h or 7d")
    return float(matched[1]) * UNITS[matched[2]]

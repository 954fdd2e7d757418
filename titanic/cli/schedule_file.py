"""The file of `titanic serve --schedules`: schedules in TOML."""

from pathlib import Path
from typing import Any, Final

import click

from ...clients.arguments import checked_body
from ...mdp import toml
from ...mdp.errors import SettingError
from ...mdp.wire import service_name
from ..schedules import SCHEDULE_OPTIONS, Schedule, parse_schedule
from ..submission import OWNER_OPTION, DurationOption, MalformedRequest, encode_options
from .parameters import DURATION

_OTHER_NAMES: Final = ("service", "body", "headers", "owner")


def load(path: Path, now: float) -> list[Schedule]:
    """Return the schedules in a file.

    Raises:
        SettingError: The file cannot be read, or a schedule is invalid.
    """
    content = toml.load(path)
    tables = content.pop("schedules", {})
    if content or not isinstance(tables, dict):
        raise SettingError(f"{path}: expected tables [schedules.NAME], and nothing else")
    found = []
    for name, table in tables.items():
        try:
            found.append(_schedule(name, table, now))
        except (SettingError, MalformedRequest, click.BadParameter, TypeError) as error:
            raise SettingError(f"{path}: schedules.{name}: {error}") from None
    return found


def _schedule(name: str, table: Any, now: float) -> Schedule:
    if not isinstance(table, dict) or not isinstance(table.get("service"), str):
        raise SettingError("expected a table with a service")
    body = table.get("body", "")
    frames = body if isinstance(body, list) else [body]
    if not all(isinstance(frame, str) for frame in frames):
        raise SettingError("body must be text, or a list of texts: one for each frame")
    options = {
        each: _duration(value) if isinstance(SCHEDULE_OPTIONS.get(each), DurationOption) else value
        for each, value in table.items()
        if each not in _OTHER_NAMES
    }
    encoded = encode_options(options, SCHEDULE_OPTIONS, "a schedule")
    if "headers" in table:
        encoded["headers"] = table["headers"]
    owner = OWNER_OPTION.from_wire("owner", table["owner"]) if "owner" in table else ""
    checked = checked_body([frame.encode() for frame in frames])
    return parse_schedule([name.encode(), service_name(table["service"]), *checked], encoded, now, owner)


def _duration(value: Any) -> Any:
    """Return the seconds that a text such as 5m says."""
    return DURATION.convert(value, None, None) if isinstance(value, str) else value

"""What the options of the command `titanic` take."""

from datetime import datetime
from typing import Any, Final
from uuid import UUID

import click

from ..submission import MAX_TIME, parse_uuid


class Uuid(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """32 hex digits, perhaps with dashes."""

    name = "uuid"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> UUID:
        """The uuid."""
        if isinstance(value, UUID):
            return value
        found = parse_uuid(str(value).replace("-", "").encode(errors="replace"))
        if found is None:
            self.fail(f"{value!r} is no uuid: it takes 32 hex digits, as `titanic request` prints them", param, ctx)
        return found


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """Seconds, or a number with s, m, h or d."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    units: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """DURATION."""
        del param, ctx
        return "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of seconds."""
        text = str(value)
        number, unit = (text[:-1], self.units[text[-1]]) if text[-1:] in self.units else (text, 1.0)
        try:
            seconds = float(number) * unit
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_TIME or not (seconds or self._zero):
            least = "0 or more" if self._zero else "above 0"
            takes = f"it takes seconds, or a number with s, m, h or d (90, 15m, 7d), {least}, up to a hundred years"
            self.fail(f"{value!r}: {takes}", param, ctx)
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A time; without an offset, this machine's."""

    name = "time"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """TIME."""
        del param, ctx
        return "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The moment, with its offset."""
        try:
            return datetime.fromisoformat(str(value)).astimezone()
        except (ValueError, OverflowError):
            self.fail(f"{value!r}: it takes a time such as 2030-01-31T12:00 or 2030-01-31T12:00:00+00:00", param, ctx)


DURATION: Final = Duration()
DURATION_FROM_0: Final = Duration(zero=True)
UUID_TYPE: Final = Uuid()

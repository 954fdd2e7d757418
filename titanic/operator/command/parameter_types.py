"""Parameter types and options of the command `titanic`, of which Spark's commands use some."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, Final
from uuid import UUID

import click

from ....clients import Client
from ....clients.console import bodies
from ....clients.console.asking import BROKER
from ....mdp.cli.console import Decorator, key_options, options
from ....mdp.security.keys import ClientKeys
from ....mdp.services.submission import MAX_SECONDS
from ....mdp.transport.reach import check_listening
from ...api.submission import ChoiceOption, DurationOption, IntegerOption, Option, TimeOption, read_uuid


class Uuid(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A UUID: 32 hex digits, with or without dashes."""

    name = "uuid"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> UUID:
        """Return the UUID."""
        if isinstance(value, UUID):
            return value
        found = read_uuid(str(value))
        if found is None:
            self.fail(f"{value!r} is not a UUID: use the 32 hex digits that `titanic request` printed", param, ctx)
        return found


class Utf8(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """Text for the database.  An argument that is not UTF-8 has lone surrogates, which no database takes."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not UTF-8", param, ctx)
        return text


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A number with the unit s, m, h or d; without a unit it means seconds, unless `unit` says that it is required.

    Options that delete something require it: `--older-than 7` would delete almost everything if 7 days were meant.
    """

    name = "DURATION"
    UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

    def __init__(self, *, zero: bool = False, unit: bool = False) -> None:
        self._zero = zero
        self._needs_unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        text = str(value)
        number, unit = (text[:-1], text[-1]) if text[-1:] in self.UNITS else (text, "")
        try:
            seconds = float(number) * self.UNITS.get(unit, 1.0)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_SECONDS or not (seconds or self._zero):
            least = "0 or more" if self._zero else "above 0"
            examples = "30s, 15m, 12h or 7d" if self._needs_unit else "90 (seconds), 15m, 12h or 7d"
            self.fail(f"{value!r} is not a duration such as {examples}, {least}, at most 36600d", param, ctx)
        if self._needs_unit and not unit and seconds:
            self.fail(f"{value!r} has no unit: write {number}s, {number}m, {number}h or {number}d", param, ctx)
        return seconds


class ServiceExpiry(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A duration after which something is deleted, for all services or, as `SERVICE=DURATION`, for one."""

    name = "[SERVICE=]DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Return the service, or an empty text for all, and seconds."""
        if isinstance(value, tuple):
            return value
        service, _, duration = str(value).rpartition("=")
        return service, EXPIRY.convert(duration, param, ctx)


class Moment(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A time in ISO 8601; without an offset, in this machine's time zone."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the time with its offset."""
        try:
            return datetime.fromisoformat(str(value)).astimezone()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time such as 2030-01-31T12:00 or 2030-01-31T12:00:00+00:00", param, ctx)


DEFAULT_TIMEOUT: Final = 15.0
"""The timeout of commands that ask Titanic, in seconds."""
DURATION: Final = Duration()
DURATION_FROM_0: Final = Duration(zero=True)
AGE: Final = Duration(zero=True, unit=True)
"""Minimum age of requests to change or delete."""
EXPIRY: Final = Duration(unit=True)
"""Duration after which something is deleted."""
UUID_TYPE: Final = Uuid()
TEXT: Final = Utf8()
NEEDS_UNIT: Final = "Needs a unit: 90s, 15m, 12h, 7d."


JSON_LINES: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Callable[[Any], object]],
    *,
    as_json: bool = False,
    none: str = "",
    right: Sequence[str] = (),
) -> None:
    """Print rows as a table, whose columns say what they show of a row, or as JSON; or `none`, if there are none.

    The columns `right` are numbers.
    """
    if as_json:
        for row in rows:
            bodies.print_json(row)
    elif rows:
        table = [list(columns), *([str(show(row)) for show in columns.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        sides = [">" if heading in right else "<" for heading in columns]
        for texts in table:
            cells = zip(texts, sides, widths, strict=True)
            click.echo("  ".join(f"{text:{side}{width}}" for text, side, width in cells).rstrip())
    if not rows:
        click.echo(none, err=True)


def client_options(timeout: float) -> Decorator:
    """Return the decorator that calls a command with a `client`, made from --broker, --key and --timeout.

    `timeout` is the default in seconds.  The client does not retry.  If no broker can be reached, `BrokerUnreachable`
    is raised before the command is called.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*, broker: Sequence[str], keys: ClientKeys | None, timeout: float, **given: Any) -> Any:
            check_listening(broker, keys)
            with Client(broker, timeout=timeout, retries=0, key=keys) as client:
                return command(client=client, **given)

        wait = click.option("--timeout", type=DURATION, default=timeout, help="How long to wait for an answer.")
        return options(BROKER, key_options, wait)(run)

    return decorate


def declared_options(declared: Mapping[str, Option]) -> Decorator:
    """Return the decorator that adds a command-line option for each declared option."""
    return options(
        *(
            click.option(
                flag(name),
                name,
                type=_type(option),
                metavar="N" if isinstance(option, IntegerOption) else None,
                show_default=option.default or None,
                help=_help(option),
            )
            for name, option in declared.items()
        )
    )


def flag(name: str) -> str:
    """Return the flag of the submission option `name`.  That of `key` is not `--key`, the file of a secret key."""
    prefix = "--idempotency-" if name.startswith("key") else "--"
    return prefix + name.replace("_", "-")


def _help(option: Option) -> str:
    text = option.help
    if isinstance(option, DurationOption) and option.expiry:
        text += f" {NEEDS_UNIT}"
    if isinstance(option, TimeOption):
        text += " Without an offset, it is a local time of this machine."
    return text


def _type(option: Option) -> click.ParamType:  # type: ignore[type-arg]
    match option:
        case DurationOption(expiry=True):
            return EXPIRY
        case DurationOption(zero=True):
            return DURATION_FROM_0
        case DurationOption():
            return DURATION
        case IntegerOption():
            return click.IntRange(0, option.maximum)
        case TimeOption():
            return Moment()
        case ChoiceOption():
            return click.Choice(option.choices)
        case _:
            return click.STRING


def shown_age(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"

"""The commands `titanic schedule …`, which ask the service `titanic.schedule`."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import click

from ...clients import Client, bodies
from ...mdp.cli.console import EXIT_USAGE, Group, printable
from ...mdp.errors import SettingError
from ...mdp.services import recurrence
from ...mdp.services.recurrence import RecurrenceError
from ..schedule_client import Schedules
from ..schedules import SCHEDULE_OPTIONS
from .parameters import DEFAULT_TIMEOUT, client_options, declared_options, shown_age

_OWNER: Final = click.option(
    "--owner", metavar="ROLE", help="For admins: whose schedule, if several roles have one of that name."
)
_NAMES: Final = click.argument("names", nargs=-1, required=True, metavar="NAME…")
_HEADINGS: Final = ("NAME", "OWNER", "SERVICE", "WHEN", "NEXT", "LAST", "OUTCOME")


@click.group(cls=Group)
def schedule() -> None:
    """Submit requests again and again, by a cron expression or at an interval."""


@schedule.command(epilog=bodies.BODY_HELP)
@click.argument("name")
@click.argument("service")
@bodies.BODY
@declared_options(SCHEDULE_OPTIONS)
@bodies.HEADER
@client_options(DEFAULT_TIMEOUT)
def add(
    *, name: str, service: str, body: tuple[str, ...], headers: dict[str, str], client: Client, **options: Any
) -> None:
    """Submit a request for SERVICE again and again. It needs either --cron or --every.

    Several Titanics with the same database submit each occurrence once. When clocks change, --cron works as in
    Debian: what is skipped runs right after, and what comes twice runs once, unless its minutes or hours are *.

    A BODY is stored as it is: for a service that takes a text as JSON, write '"hello"', not hello.
    """
    if options["cron"] is None and options["every"] is None:
        raise click.UsageError(_how_to_recur((service, *body)))
    Schedules(client).add(name, service, *bodies.frames(body), headers=headers, **options)


def _how_to_recur(words: Sequence[str]) -> str:
    """Return how to say when a schedule recurs; perhaps one of the other arguments was meant to say it."""
    for word in words:
        with suppress(RecurrenceError):
            recurrence.cron(word, recurrence.UTC)
            return f"{word!r} would be sent to the service: a cron expression is an option, --cron {word!r}"
    return "say when to submit requests: --cron '30 2 * * *', or --every 5m"


@schedule.command()
@client_options(DEFAULT_TIMEOUT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def ls(*, client: Client, as_json: bool) -> None:
    """List schedules with their next and last occurrence, and the outcome of that."""
    rows = Schedules(client).ls()
    if as_json:
        for row in rows:
            bodies.print_json(row)
    elif rows:
        _print_table([_HEADINGS, *(_columns(row, time.time()) for row in rows)])
    else:
        click.echo("no schedules", err=True)


@schedule.command()
@_NAMES
@_OWNER
@client_options(DEFAULT_TIMEOUT)
def pause(*, names: Sequence[str], owner: str | None, client: Client) -> int:
    """Pause schedules: they submit nothing until they are resumed."""
    return _each(Schedules(client).pause, names, owner)


@schedule.command()
@_NAMES
@_OWNER
@client_options(DEFAULT_TIMEOUT)
def resume(*, names: Sequence[str], owner: str | None, client: Client) -> int:
    """Resume schedules, with the first occurrence from now on."""
    return _each(Schedules(client).resume, names, owner)


@schedule.command()
@_NAMES
@_OWNER
@client_options(DEFAULT_TIMEOUT)
def rm(*, names: Sequence[str], owner: str | None, client: Client) -> int:
    """Remove schedules. The requests that they have submitted stay."""
    return _each(Schedules(client).rm, names, owner)


@schedule.command()
@click.argument("name")
@_OWNER
@client_options(DEFAULT_TIMEOUT)
def run(*, name: str, owner: str | None, client: Client) -> None:
    """Submit the request of a schedule now, besides its occurrences, and print the UUID."""
    click.echo(Schedules(client).run(name, owner=owner))


def _each(change: Callable[..., None], names: Sequence[str], owner: str | None) -> int:
    """Change all schedules that can be changed, and say which cannot; return the exit code."""
    code = 0
    for name in names:
        try:
            change(name, owner=owner)
        except SettingError as error:
            click.echo(f"titanic: {error}", err=True)
            code = EXIT_USAGE
    return code


def _columns(row: dict[str, Any], now: float) -> tuple[str, ...]:
    """Return a schedule's columns."""
    zone = "" if row["timezone"] == "UTC" else f" {row['timezone']}"
    when = f"{row['cron']}{zone}" if row["cron"] else f"every {row['every']:.0f}s"
    last = f"{shown_age(now - _seconds(row['last']))} ago" if row["last"] else "-"
    outcome = row["last_outcome"] or {"state": "-", "error": None}
    shown = f"{outcome['code']}: {outcome['error']}"[:80] if outcome["state"] == "failed" else outcome["state"]
    following = "paused" if row["paused"] else f"{datetime.fromisoformat(row['next']):%Y-%m-%d %H:%M:%S}Z"
    return (row["name"], row["owner"] or "-", row["service"], when, following, last, printable(shown))


def _seconds(time_: str) -> float:
    return datetime.fromisoformat(time_).astimezone(UTC).timestamp()


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip())

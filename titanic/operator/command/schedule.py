"""The commands `titanic schedule …`, which ask the service `titanic.schedule`."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click

from ....clients import Client
from ....clients.console import bodies
from ....mdp.cli.console import EXIT_USAGE, Group, printable
from ....mdp.errors import SettingError
from ...api.schedule_client import Schedules
from ...api.schedules import SCHEDULE_OPTIONS
from .parameter_types import DEFAULT_TIMEOUT, JSON_LINES, client_options, declared_options, print_rows, shown_age

_OWNER: Final = click.option(
    "--owner", metavar="ROLE", help="For admins: whose schedule, if several roles have one of that name."
)
_NAMES: Final = click.argument("names", nargs=-1, required=True, metavar="NAME…")


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
        raise click.UsageError("say when to submit requests: --cron '30 2 * * *', or --every 5m")
    Schedules(client).add(name, service, *bodies.frames(body), headers=headers, **options)


@schedule.command()
@client_options(DEFAULT_TIMEOUT)
@JSON_LINES
def ls(*, client: Client, as_json: bool) -> None:
    """List schedules with their next and last occurrence, and the outcome of that."""
    print_rows(Schedules(client).ls(), _COLUMNS, as_json=as_json, none="no schedules")


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


def _when(row: Mapping[str, Any]) -> str:
    zone = "" if row["timezone"] == "UTC" else f" {row['timezone']}"
    return f"{row['cron']}{zone}" if row["cron"] else f"every {row['every']:.0f}s"


def _last(row: Mapping[str, Any]) -> str:
    return f"{shown_age(time.time() - datetime.fromisoformat(row['last']).timestamp())} ago" if row["last"] else "-"


def _outcome(row: Mapping[str, Any]) -> str:
    outcome = row["last_outcome"] or {"state": "-"}
    return f"{outcome['code']}: {outcome['error']}"[:80] if outcome["state"] == "failed" else outcome["state"]


_COLUMNS: Final[Mapping[str, Callable[[Any], object]]] = {
    "NAME": lambda row: row["name"],
    "OWNER": lambda row: row["owner"] or "-",
    "SERVICE": lambda row: row["service"],
    "WHEN": _when,
    "NEXT": lambda row: "paused" if row["paused"] else f"{datetime.fromisoformat(row['next']):%Y-%m-%d %H:%M:%S}Z",
    "LAST": _last,
    "OUTCOME": lambda row: printable(_outcome(row)),
}

"""The client commands `mdp-spark fetch` and `logs`, and `status --history`.

They only talk to the broker and need neither PySpark nor Java.
"""

import os
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

from ...clients import Client, ServiceNotFound
from ...clients.console import bodies
from ...mdp.codes import Code
from ...mdp.errors import SettingError
from ...titanic.operator.command.parameters import client_options
from .. import drivers
from ..client.frames import copy_rows

# ── fetch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("job")
@click.option("--output", default="-", metavar="FILE", help="File to write, or - for stdout.")
@click.option(
    "--format", "format_", type=click.Choice(["json", "csv", "arrow"]), default="json",
    help="JSON lines, CSV, or an Arrow IPC stream.",
)  # fmt: skip
@client_options(30)
def fetch(*, job: str, output: str, format_: str, client: Client) -> int:
    """Fetch the result of JOB that was too large to send, as `submit` shows.

    Only the owner of the job and admins can fetch it. FILE appears when it is complete.
    """
    driver, record = _find(client, job)
    is_value = record["format"] == "value"
    if is_value and format_ != "json":
        raise SettingError(f"job {job} returned a value: use --format json")
    with _opened(output) as file:
        rows = copy_rows(client, driver, job, format_, file)
    if output != "-":
        click.echo(f"wrote {'a value' if is_value else f'{rows} rows'} to {output}", err=True)
    return 0


def _find(client: Client, job: str) -> tuple[str, dict[str, Any]]:
    """Return a batch that knows the job, and its record."""
    for driver, answer in drivers.ask_all(client, "history", job=job):
        for row in answer["jobs"]:
            return driver, row
    raise ServiceNotFound(f"no batch at the broker knows job {job!r}", service="", code=Code.NO_WORKER)


@contextmanager
def _opened(output: str) -> Generator[IO[bytes]]:
    """Yield stdout, or a file that appears at the end of the block."""
    if output == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    unfinished = Path(f"{output}.part")
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("job")
@client_options(30)
@bodies.JSON
def logs(*, job: str, client: Client, as_json: bool) -> int:
    """Show the record of JOB: what it ran, how it ended, its error and the traceback of its Python code.

    Others than the owner of the job and admins see only who ran it and when.
    """
    _, found = _find(client, job)
    if as_json:
        bodies.print_json(found)
        return 0
    for name, value in found.items():
        if value is not None and name != "traceback":
            click.echo(f"{name + ':':<9} {_time(value) if name in {'started', 'ended'} else value}")
    if found.get("traceback"):
        click.echo(f"\n{found['traceback']}")
    return 0


def what_ran(row: Mapping[str, Any]) -> str:
    """Return the text of a job, or only its owner, for callers who may not see the text."""
    return str(row["what"] or (f"a job of {row['user']}" if row["user"] else "a job"))


def show_history(client: Client, *, as_json: bool) -> None:
    """Print the latest jobs of all batches, the newest last."""
    answers = list(drivers.ask_all(client, "history"))
    if not answers:
        click.echo("no batch at the broker", err=True)
    found = {row["job"]: row for _, answer in answers for row in answer["jobs"]}
    rows = sorted(found.values(), key=lambda row: row["started"])
    if as_json:
        bodies.print_json(rows)
        return
    for row in rows:
        seconds = "" if row["ended"] is None else f"{row['ended'] - row['started']:.1f} s"
        what = " ".join(what_ran(row).split())[:60]
        error = f"  {row['error'][:100]}" if row["error"] else ""
        click.echo(f"{row['job']}  {_time(row['started'])}  {row['state']:<9} {seconds:>9}  {what}{error}")


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

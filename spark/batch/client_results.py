"""The client commands `mdp-spark fetch` and `logs`, and `status --history`.

They only talk to the broker.  Writing Parquet needs PyArrow; nothing else does.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

import click

from ...clients import Client, ServiceNotFound, bodies
from ...mdp.cli.console import Decorator
from ...mdp.codes import Code
from ...mdp.errors import SettingError
from ...mdp.extras import install_command
from ...titanic.cli.parameters import client_options
from .. import control
from ..client.requests import copy_rows
from .history import History

FILE_FORMATS: Final = ("json", "csv", "arrow", "parquet")


# ── fetch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("job")
@click.option("--output", default="-", metavar="FILE", help="File to write, or - for stdout.")
@click.option(
    "--format", "format_", type=click.Choice(FILE_FORMATS), default="json",
    help="JSON lines, CSV, an Arrow IPC stream, or Parquet, which needs PyArrow here.",
)  # fmt: skip
@client_options(30)
def fetch(*, job: str, output: str, format_: str, client: Client) -> int:
    """Fetch the result of JOB that was too large to send, as `submit` shows.

    Only the owner of the job and admins can fetch it. FILE appears when it is complete.
    """
    if format_ == "parquet":
        if output == "-":
            raise click.UsageError("--format parquet requires --output FILE")
        try:
            import pyarrow.parquet  # noqa: F401, PLC0415 - optional dependency
        except ImportError:
            raise click.UsageError(f"--format parquet needs PyArrow: {install_command('arrow')}") from None
    driver, record = _find(client, job)
    is_value = record["format"] == "value"
    if is_value and format_ != "json":
        raise SettingError(f"job {job} returned a value: use --format json")
    with _opened(output) as file:
        if format_ == "parquet":
            with TemporaryFile() as arrow:
                rows = copy_rows(client, driver, job, "arrow", arrow)
                _convert(arrow, file)
        else:
            rows = copy_rows(client, driver, job, format_, file)
    if output != "-":
        click.echo(f"wrote {'a value' if is_value else f'{rows} rows'} to {output}", err=True)
    return 0


def _find(client: Client, job: str) -> tuple[str, dict[str, Any]]:
    """Return a batch that knows the job, and its record."""
    for driver, answer in control.ask_all(client, "history", job=job):
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


def _convert(source: IO[bytes], target: IO[bytes]) -> None:
    """Convert an Arrow IPC stream to Parquet."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    source.seek(0)
    with pa.ipc.open_stream(source) as rows, pq.ParquetWriter(target, rows.schema) as writer:
        for batch in rows:
            writer.write_batch(batch)


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def or_from_file(show: Callable[..., int]) -> Decorator:
    """Return the decorator that adds --file to a command: with it, `show` is called instead, without a broker."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*, file: Path | None, **given: Any) -> Any:
            return command(**given) if file is None else show(file, **given)

        kind = click.Path(exists=True, dir_okay=False, path_type=Path)
        return click.option("--file", type=kind, help="Read this --history file of a batch that need not run.")(run)

    return decorate


def _show_log_from_file(file: Path, *, job: str, as_json: bool, **others: Any) -> int:
    del others
    found = _recorded(file, job)
    if not found:
        raise ServiceNotFound(f"{file} has no job {job!r}", service="", code=Code.NO_WORKER)
    return _print_log(found[0], as_json=as_json)


@click.command()
@click.argument("job")
@or_from_file(_show_log_from_file)
@client_options(30)
@bodies.JSON
def logs(*, job: str, client: Client, as_json: bool) -> int:
    """Show the record of JOB: what it ran, how it ended, its error and the traceback of its Python code.

    Others than the owner of the job and admins see only who ran it and when.
    """
    return _print_log(_find(client, job)[1], as_json=as_json)


def _print_log(found: Mapping[str, Any], *, as_json: bool) -> int:
    if as_json:
        bodies.print_json(found)
        return 0
    for name, value in found.items():
        if value is not None and name != "traceback":
            click.echo(f"{name + ':':<9} {_time(value) if name in {'started', 'ended'} else value}")
    if found.get("traceback"):
        click.echo(f"\n{found['traceback']}")
    return 0


def _recorded(file: Path, job: str | None = None) -> list[dict[str, Any]]:
    """Return the latest jobs in a history file, or only `job`."""
    with closing(History(file, "")) as history:
        return history.rows(None, job)


def what_ran(row: Mapping[str, Any]) -> str:
    """Return what a job runs, or only whose it is, for those who may not see it."""
    return str(row["what"] or (f"a job of {row['user']}" if row["user"] else "a job"))


def show_history(client: Client, *, as_json: bool) -> None:
    """Print the latest jobs of all batches, the newest last."""
    answers = list(control.ask_all(client, "history"))
    if not answers:
        click.echo("no batch at the broker; --file spark-history.db reads the file of one that has ended", err=True)
    _print_history([row for _, answer in answers for row in answer["jobs"]], as_json=as_json)


def show_history_from_file(file: Path, *, history: bool, as_json: bool, **others: Any) -> int:
    """Print the latest jobs in a history file, the newest last."""
    del others
    if not history:
        raise click.UsageError("--file requires --history")
    _print_history(_recorded(file), as_json=as_json)
    return 0


def _print_history(found: Iterable[Mapping[str, Any]], *, as_json: bool) -> None:
    rows = sorted({row["job"]: row for row in found}.values(), key=lambda row: row["started"])
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

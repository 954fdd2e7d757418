"""The client commands `mdp-spark fetch` and `logs`, and `status --history`.

They only talk to the broker.  Writing Parquet needs PyArrow; nothing else does.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

import click

from ...clients import Client, ServiceNotFound, bodies
from ...mdp.cli.console import with_default
from ...mdp.codes import Code
from ...titanic.cli.parameters import client_options
from .. import control
from .jobs import FETCH_PREFIX

FILE_FORMATS: Final = ("json", "csv", "arrow", "parquet")


# ── fetch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("job")
@click.option("--output", default="-", metavar="FILE", help=with_default("File to write, or - for stdout.", "-"))
@click.option(
    "--format", "format_", type=click.Choice(FILE_FORMATS), default="json",
    help=with_default("JSON lines, CSV, an Arrow IPC stream, or Parquet, which needs PyArrow here.", "json"),
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
            raise click.UsageError("--format parquet needs PyArrow: pip install 'zmdp[arrow]'") from None
    driver, _ = _find(client, job)
    with _opened(output) as file:
        if format_ == "parquet":
            with TemporaryFile() as arrow:
                rows = _copy(client, driver, job, "arrow", arrow)
                _convert(arrow, file)
        else:
            rows = _copy(client, driver, job, format_, file)
    if output != "-":
        click.echo(f"wrote {rows} rows to {output}", err=True)
    return 0


def _find(client: Client, job: str) -> tuple[str, dict[str, Any]]:
    """Return a batch that knows the job, and its record."""
    for driver, answer in control.ask_all(client, "history", job=job):
        for row in answer["jobs"]:
            return driver, row
    raise ServiceNotFound(f"no batch at the broker knows job {job!r}", service="", code=Code.NO_WORKER)


def _copy(client: Client, driver: str, job: str, format_: str, file: IO[bytes]) -> int:
    """Fetch a result, part by part.  Return the number of rows."""
    rows: int = 0
    position: str | None = None
    while True:
        settings = json.dumps({"format": format_, "position": position}).encode()
        for part in client.stream(FETCH_PREFIX + driver, job.encode(), settings, wait=False):
            if not part.final:
                file.write(part[0])
        answer = json.loads(part[0])
        rows, position = rows + answer["rows"], answer["next"]
        if position is None:
            return rows


@contextmanager
def _opened(output: str) -> Iterator[IO[bytes]]:
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


def show_history(client: Client, *, as_json: bool) -> None:
    """Print the latest jobs of all batches, the newest last."""
    jobs = {row["job"]: row for _, answer in control.ask_all(client, "history") for row in answer["jobs"]}
    rows = sorted(jobs.values(), key=lambda row: row["started"])
    if as_json:
        bodies.print_json(rows)
        return
    for row in rows:
        seconds = "" if row["ended"] is None else f"{row['ended'] - row['started']:.1f} s"
        what = " ".join(str(row["what"] or f"a job of {row['user']}").split())[:60]
        error = f"  {row['error'][:100]}" if row["error"] else ""
        click.echo(f"{row['job']}  {_time(row['started'])}  {row['state']:<9} {seconds:>9}  {what}{error}")


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

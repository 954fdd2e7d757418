"""The client commands `mdp-spark fetch` and `logs`, and `status --history`.

They only talk to the broker.  Writing Parquet needs PyArrow; nothing else does.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import click

from ...clients import Client, RequestTimeout, ServiceNotFound, bodies
from ...mdp.cli.console import key_options, with_default
from ...mdp.codes import Code
from ...mdp.errors import ServiceError
from ...mdp.keys import ClientKeys
from ...mdp.transport.reach import check_listening
from ...titanic.cli.parameters import DURATION
from .. import control
from ..parameters import BROKER

FETCH_PREFIX: Final = "spark.fetch."
FORMATS: Final = ("json", "csv", "arrow", "parquet")
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
Write = Callable[[bytes], object]

_TIMEOUT = click.option(
    "--timeout", type=DURATION, default=30.0, help=with_default("How long to wait for an answer.", 30, "seconds")
)


# ── fetch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("job")
@click.option("--output", default="-", metavar="FILE", help=with_default("File to write, or - for stdout.", "-"))
@click.option(
    "--format", "format_", type=click.Choice(FORMATS), default="json",
    help=with_default("JSON lines, CSV, an Arrow IPC stream, or Parquet, which needs PyArrow here.", "json"),
)  # fmt: skip
@BROKER
@key_options
@_TIMEOUT
def fetch(
    *, job: str, output: str, format_: str, broker: Sequence[str], keys: ClientKeys | None, timeout: float
) -> int:
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
    check_listening(broker, keys)
    with Client(broker, timeout=timeout, retries=0, key=keys) as client:
        service = _find_service(client, job)
        with _opened(output, format_) as write:
            rows = _copy(client, service, job, "arrow" if format_ == "parquet" else format_, write)
    if output != "-":
        click.echo(f"wrote {rows} rows to {output}", err=True)
    return 0


def _find_service(client: Client, job: str) -> str:
    """Return the service of a batch that knows the job."""
    for driver in control.drivers(client):
        if _ask_history(client, driver, job=job):
            return FETCH_PREFIX + driver
    raise _unknown(job)


def _unknown(job: str) -> ServiceNotFound:
    return ServiceNotFound(f"no batch at the broker knows job {job!r}", service="", code=Code.NO_WORKER)


def _copy(client: Client, service: str, job: str, format_: str, write: Write) -> int:
    """Fetch a result, part by part.  Return the number of rows."""
    rows: int = 0
    position: str | None = None
    while True:
        settings = json.dumps({"format": format_, "position": position}).encode()
        for part in client.stream(service, job.encode(), settings, wait=False):
            if not part.final:
                write(part[0])
        answer = json.loads(part[0])
        rows, position = rows + answer["rows"], answer["next"]
        if position is None:
            return rows


@contextmanager
def _opened(output: str, format_: str) -> Iterator[Write]:
    """Yield a function that writes to stdout, or to a file that appears at the end of the block."""
    if output == "-":
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    unfinished = Path(f"{output}.part")
    try:
        if format_ == "parquet":
            with _parquet(unfinished) as write:
                yield write
        else:
            with unfinished.open("wb") as file:
                yield file.write
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    """Yield a function that takes the messages of an Arrow IPC stream and writes Parquet."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.ipc  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    writer: Any = None

    def write(message: bytes) -> None:
        nonlocal writer
        buffer = pa.py_buffer(message)
        if writer is None:
            writer = pq.ParquetWriter(path, pa.ipc.read_schema(buffer))
        elif message != END_OF_STREAM:
            writer.write_batch(pa.ipc.read_record_batch(buffer, writer.schema))

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("job")
@BROKER
@key_options
@_TIMEOUT
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def logs(*, job: str, broker: Sequence[str], keys: ClientKeys | None, timeout: float, as_json: bool) -> int:
    """Show the record of JOB: what it ran, how it ended, its error and the traceback of its Python code.

    Others than the owner of the job and admins see only who ran it and when.
    """
    check_listening(broker, keys)
    with Client(broker, timeout=timeout, retries=0, key=keys) as client:
        found = next(
            (rows[0] for each in control.drivers(client) if (rows := _ask_history(client, each, job=job))), None
        )
    if found is None:
        raise _unknown(job)
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
    jobs = {row["job"]: row for driver in control.drivers(client) for row in _ask_history(client, driver)}
    rows = sorted(jobs.values(), key=lambda row: row["started"])
    if as_json:
        bodies.print_json(rows)
        return
    for row in rows:
        seconds = "" if row["ended"] is None else f"{row['ended'] - row['started']:.1f} s"
        what = " ".join(str(row["what"] or f"a job of {row['user']}").split())[:60]
        error = f"  {row['error'][:100]}" if row["error"] else ""
        click.echo(f"{row['job']}  {_time(row['started'])}  {row['state']:<9} {seconds:>9}  {what}{error}")


def _ask_history(client: Client, driver: str, **arguments: Any) -> list[dict[str, Any]]:
    with suppress(RequestTimeout, ServiceNotFound):  # the driver is ending
        try:
            found: list[dict[str, Any]] = control.ask(client, driver, "history", **arguments)["jobs"]
        except ServiceError as error:
            if error.code != control.UNKNOWN_OPERATION:  # a fleet does not have the operation
                raise
        else:
            return found
    return []


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


COMMANDS: Final = {"fetch": fetch, "logs": logs}

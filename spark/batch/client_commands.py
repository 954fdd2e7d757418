"""The client commands `mdp-spark submit`, `status`, `cancel`, `reload` and `drain`.

They only talk to the broker and need neither PySpark nor Java.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import click
import msgspec

from ...clients import BrokerUnreachable, Client, Reply, RequestTimeout, ServiceNotFound
from ...clients.console import bodies
from ...clients.console.asking import BROKER
from ...mdp.cli.console import Group, key_options, options, printable
from ...mdp.errors import RequestError, SettingError, UnknownTicket
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.reach import check_listening
from ...titanic.api.client import Ticket, Titanic
from ...titanic.api.submission import parse_uuid
from ...titanic.operator.command.parameter_types import DURATION, UUID_TYPE, client_options
from .. import control
from ..client.events import progress_line, showing
from ..client.requests import STREAM_TIMEOUT_SECONDS, difference, job_frames, parse_result, sql_frames
from ..parameters import PREFIX
from .client_results import show_history, what_ran

DISCOVERY_TIMEOUT_SECONDS: Final = 15.0
"""How long to wait for the broker to say whether a service exists."""
WAIT_POLL_SECONDS: Final = 0.5
"""Pause between two such questions while `submit --wait` waits."""

# ── submit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


_submit_options = options(
    click.option(
        "--durable", is_flag=True,
        help="Hand the request to Titanic, which runs it even if this command ends, and keeps the reply.",
    ),
    click.option(
        "--idempotency-key", help="With --durable: submitting the same key again returns the first request."
    ),
    click.option("--detach", is_flag=True, help="With --durable: print the UUID and exit."),
    click.option("--wait", is_flag=True, help="Wait for a batch that is starting; with --durable, for Titanic."),
    click.option(
        "--format", "format_", type=click.Choice(["json", "arrow"]), default="json",
        help="Format of rows; Arrow is printed as an IPC stream.",
    ),
    click.option("--deadline", type=DURATION, help="How long the job may take before it is cancelled."),
    PREFIX,
    BROKER,
    key_options,
    bodies.JSON,
)  # fmt: skip


def _argument(text: str) -> bytes:
    """Return the JSON of an argument: what is not JSON is a string."""
    with suppress(msgspec.MsgspecError, ValueError):
        return bytes(msgspec.json.decode(text, type=msgspec.Raw))  # unlike Python's own, it refuses NaN and Infinity
    return json.dumps(text).encode()


def _sql_settings(given: Mapping[str, str]) -> dict[str, Any]:
    """Return `args` and `types` for `sql_frames`.  As in SQL, numbers without an exponent are exact."""
    args: dict[str, Any] = {}
    types: dict[str, str] = {}
    for key, text in given.items():
        name, _, kind = key.partition(":")
        value = _argument(text)
        if kind:
            types[name] = kind
        args[name] = msgspec.Raw(value) if kind else json.loads(value, parse_float=_number)
    return {"args": args, "types": types}


def _number(digits: str) -> float | Decimal:
    return float(digits) if "e" in digits.lower() else Decimal(digits)


def _job_arguments(given: Mapping[str, str]) -> dict[str, msgspec.Raw]:
    """Return arguments for `job_frames`, numbers with all their digits."""
    return {name: msgspec.Raw(_argument(text)) for name, text in given.items()}


_ARGS = click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="NAME[:TYPE]=VALUE",
    callback=lambda context, option, given: bodies.pairs(given),
    help=(
        "Argument NAME of the job, or value of :NAME in the query: JSON, otherwise a string. In queries, TYPE is one "
        "of Spark's: day:date=2026-11-21. Can be repeated."
    ),
)


@click.group(cls=Group)
def submit() -> None:
    """Run a query or a named job and print its result.

    Progress goes to stderr. Ctrl-C cancels the job; with --durable, it only stops waiting.
    """


@submit.command("sql")
@click.argument("query")
@_ARGS
@_submit_options
def submit_sql(*, query: str, args: dict[str, str], format_: str, prefix: str, **options: Any) -> int:
    """Run QUERY over the tables of a batch; @FILE reads it from a file, - from stdin."""
    (sql,) = bodies.frames([query])
    return _submit(f"{prefix}.sql", sql_frames(sql, format_=format_, **_sql_settings(args)), **options)


@submit.command("job")
@click.argument("name")
@click.argument("arguments", required=False, default="{}", metavar="[JSON]")
@_ARGS
@_submit_options
def submit_job(*, name: str, arguments: str, args: dict[str, str], format_: str, prefix: str, **options: Any) -> int:
    """Run the Python job NAME with arguments: a JSON object such as '{"path": "book.txt"}', or --arg path=book.txt."""
    (text,) = bodies.frames([arguments])
    try:
        given = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError):
        raise click.BadParameter(f"{arguments!r}: expected a JSON object; or use --arg NAME=VALUE") from None
    return _submit(f"{prefix}.job", job_frames(name, given | _job_arguments(args), format_), **options)


def _submit(
    service: str,
    frames: list[bytes],
    *,
    durable: bool,
    idempotency_key: str | None,
    detach: bool,
    wait: bool,
    deadline: float | None,
    broker: Sequence[str],
    keys: ClientKeys | None,
    as_json: bool,
) -> int:
    if (idempotency_key is not None or detach) and not durable:
        raise click.UsageError("--idempotency-key and --detach require --durable")
    if durable and deadline is not None:
        raise click.UsageError("--deadline cannot be combined with --durable: Titanic runs a request whenever it can")
    check_listening(broker, keys)
    kind, needed, program = "batch", service, "mdp-spark batch"
    if durable:
        kind, needed, program = "Titanic", "titanic.request", "titanic serve"
    with Client(broker, timeout=STREAM_TIMEOUT_SECONDS, retries=0, key=keys) as client:
        missing = f"no {kind} offers {needed!r} at {' or '.join(broker)}"
        told = False
        while not client.available(needed, timeout=DISCOVERY_TIMEOUT_SECONDS):
            if not wait:
                raise ServiceNotFound(f"{missing}; start one with `{program}`, or use --wait", service=needed)
            if not told:
                click.echo(f"{missing} yet; waiting for one", err=True)
            told = True
            time.sleep(WAIT_POLL_SECONDS)
        if not durable:
            parts = client.stream(service, *frames, wait=False, deadline=deadline)
            with _told_once(as_json, deadline):
                (reply,) = deque(showing(parts), maxlen=1)
            return _print(reply, as_json=as_json)
        ticket = Titanic(client).submit(service, *frames, key=idempotency_key)
        if idempotency_key is not None and (differs := difference(ticket, frames)):
            raise SettingError(
                f"--idempotency-key {idempotency_key}: it belongs to request {ticket.uuid}, which differs: {differs}"
            )
        if detach:
            click.echo(ticket.uuid)
            return 0
        click.echo(f"submitted as {ticket.uuid}", err=True)
        with _told_once(as_json):
            reply = _follow(ticket)
        return _print(reply, as_json=as_json)


@contextmanager
def _told_once(as_json: bool, deadline: float | None = None) -> Generator[None]:
    """Make errors of a request say what happened once: JSON that repeats the text is for `--json`."""
    try:
        yield
    except BrokerUnreachable:
        raise
    except RequestTimeout as error:
        if deadline is None:
            raise
        raise RequestTimeout(f"cancelled: --deadline {deadline:g}s passed", service=error.service) from None
    except RequestError as error:
        with suppress(ValueError, TypeError, KeyError):  # not a detail of Spark's
            if not as_json and json.loads(error.detail or b"")["message"] in str(error):
                error.detail = None
        raise


def _follow(ticket: Ticket[Reply, Reply]) -> Reply:
    try:
        deque(showing(ticket.partials()), maxlen=0)
        return ticket.result()
    except KeyboardInterrupt:
        click.echo(f"the job continues; to wait for it: mdp-spark status {ticket.uuid} --wait", err=True)
        raise


def _print(reply: Reply, *, as_json: bool) -> int:
    """Print a result: rows as JSON lines, or as a table on a terminal; a path; Arrow unchanged."""
    described, data = parse_result(reply)
    format_ = described["format"]
    path = described.get("path")
    if path is not None:
        click.echo(json.dumps(described) if as_json else path)
        if not as_json:
            what = f"{described['rows']} rows" if "rows" in described else "a value"
            click.echo(f"the result ({what}) is too large to send; it is at this path as {format_}", err=True)
            click.echo(f"to fetch it: mdp-spark fetch {described.get('job')} --output FILE", err=True)
        return 0
    if format_ == "arrow":
        bodies.write(data, newline=False)
    elif as_json:
        bodies.print_json({**described, "data": json.loads(data)})
    elif format_ == "value":
        bodies.write(data, newline=True)
    else:
        rows = json.loads(data)
        if sys.stdout.isatty():
            click.echo(table([column["name"] for column in described["columns"]], rows))
        else:
            for row in rows:
                click.echo(json.dumps(row, ensure_ascii=False))
    return 0


def table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a table."""
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(row[at]) for row in cells), 0) for at, name in enumerate(names)]
    lines = ["  ".join(name.ljust(width) for name, width in zip(names, widths, strict=True)).rstrip()]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:57] + "…"


# ── status, cancel, drain ────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("uuid", type=UUID_TYPE, required=False)
@click.option("--history", is_flag=True, help="Show the latest jobs, also those that have ended.")
@click.option("--wait", is_flag=True, help="With a UUID: wait for the result and show progress.")
@client_options(5)
@bodies.JSON
def status(*, uuid: UUID | None, history: bool, wait: bool, client: Client, as_json: bool) -> int:
    """Show the batches and fleets at the broker and what they run; with UUID, the result of a durable request.

    UUID is what `submit --durable` printed. Exit code 3: the request has no result yet.
    """
    if uuid is not None:
        ticket = Titanic(client).ticket(uuid)
        try:
            with _told_once(as_json):
                reply = _follow(ticket) if wait else ticket.result(0)
        except RequestTimeout:
            if wait:
                raise
            raise RequestTimeout(f"{uuid.hex} has no result yet; wait for it with --wait") from None
        return _print(reply, as_json=as_json)
    if wait:
        raise click.UsageError("--wait requires a UUID")
    if history:
        show_history(client, as_json=as_json)
        return 0
    found = [_status_of(client, driver) for driver in control.drivers(client)]
    if as_json:
        bodies.print_json(found)
        return 0
    if not found:
        click.echo("no batch or fleet at the broker; start one with `mdp-spark batch` or `mdp-spark fleet`", err=True)
    for driver in found:
        click.echo("\n".join(_status_lines(driver)))
    return 0


def _status_of(client: Client, driver: str) -> dict[str, Any]:
    try:
        return control.ask(client, driver, "status")
    except (RequestTimeout, ServiceNotFound) as error:  # it is ending, or hangs: still show the others
        return {"kind": "driver", "name": driver, "error": str(error)}


def _status_lines(driver: dict[str, Any]) -> Iterator[str]:
    kind, name = driver.get("kind"), driver.get("name")
    state = ", draining" if driver.get("draining") else ""
    if "error" in driver:
        yield f"{name}: {driver['error']}"
    elif kind == "batch":
        counts = ", ".join(f"{driver[each]} {each}" for each in ("done", "failed", "cancelled"))
        yield f"batch {name} on {driver['master']}: {', '.join(driver['services'])}; {counts}{state}"
        for job in driver["running"]:
            line = progress_line({"event": "progress", **job})
            state = "cancelled, but still runs: " if job["state"] == "cancelling" else ""
            yield f"  {job['job']}  {line}  {state}{what_ran(job)}"
    else:
        slots, queued = driver["slots"], driver["queued"]
        queue = "the broker does not tell its queue" if queued is None else f"{queued} queued"
        yield (
            f"{kind} {name} on {driver['master']}: {driver['service']} by {driver['handler']}; "
            f"{len(slots)} slots of {driver['min']} to {driver['max']}, {queue}{state}"
        )
        for slot in slots:
            known = {"on": slot["host"], "pid": slot["pid"], "executor": slot["executor"]}
            where = " ".join(f"{name} {value}" for name, value in known.items() if value is not None)
            yield f"  slot {slot['slot']}  {slot['state']}  {where or 'not started'}  {slot['served']} served"
        if driver.get("last_error"):
            yield f"  last error: {driver['last_error']}"


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@client_options(5)
def cancel(*, jobs: Sequence[str], client: Client) -> int:
    """Cancel jobs by the ID that `submit` and `status` show, or durable requests by UUID.

    Titanic also deletes a cancelled durable request. Exit code 4: one of the jobs is not running.
    """
    missing = [job for job in jobs if not _cancel_one(client, job)]
    for job in missing:
        click.echo(f"mdp-spark: {job} is not running", err=True)
    return 4 if missing else 0


def _cancel_one(client: Client, job: str) -> bool:
    uuid = parse_uuid(job.replace("-", "").encode(errors="replace"))
    if uuid is None:
        return any(answer["cancelled"] for _, answer in control.ask_all(client, "cancel", job=job))
    ticket = Titanic(client).ticket(uuid)
    try:
        if ticket.ready():
            return False
    except UnknownTicket:
        return False
    ticket.close()
    return True


@click.command()
@click.argument("drivers", nargs=-1, required=True, metavar="NAME…")
@client_options(5)
def drain(*, drivers: Sequence[str], client: Client) -> int:
    """Tell batches and fleets, named as in `status`, to finish running requests and exit."""
    for driver in drivers:
        answer = control.ask(client, driver, "drain")
        click.echo(f"{driver} is draining; {answer.get('running', 0)} still running", err=True)
    return 0


@click.command("reload")
@click.argument("drivers", nargs=-1, required=True, metavar="NAME…")
@client_options(300)
def reload_command(*, drivers: Sequence[str], client: Client) -> int:
    """Tell batches, named as in `status`, to read their --config again, and to infer schemas again.

    New requests use the new tables, catalogs and jobs. If the file is invalid, the batch keeps the old ones, and this
    command prints what is wrong (exit code 6). Python modules that are already loaded are not loaded again.
    """
    for driver in drivers:
        answer = control.ask(client, driver, "reload")
        counts = ", ".join(f"{answer[each]} {each}" for each in ("tables", "catalogs", "jobs"))
        click.echo(f"{driver} has reloaded its catalogue: {counts}", err=True)
    return 0

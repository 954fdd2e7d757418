"""What callers of batches and fleets do: `mdp-spark submit`, `status`, `cancel`, `drain`.

They only ask the broker: none of this needs PySpark or Java.
"""

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import click

from ...clients import Client, Reply, RequestTimeout, ServiceNotFound, bodies
from ...mdp.cli.console import with_default
from ...mdp.errors import ServiceError, SettingError, UnknownTicket
from ...mdp.transport.reach import check_listening
from ...titanic.cli.parameters import DURATION
from ...titanic.client import Ticket, Titanic
from ...titanic.submission import parse_uuid
from .. import control
from .commands import BROKER, PREFIX, pairs
from .jobs import FORMATS

PATIENCE: Final = 7 * 86400.0
"""Seconds that a request may wait in the broker's queue: what runs tells of itself every few."""
ANSWER: Final = 15.0
"""Seconds that the broker may take to say who is there."""
Command = Callable[..., Any]

_TIMEOUT = click.option(
    "--timeout", type=DURATION, default=5.0, help=with_default("How long an answer may take.", 5, "seconds")
)
_OUTPUT = click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the result's data to this file."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


# ── submit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _submitting(command: Command) -> Command:
    for option in reversed(
        [
            click.option(
                "--durable", is_flag=True,
                help="Hand it over to Titanic: it is done whatever ends meanwhile, and its reply kept.",
            ),
            click.option("--key", help="With --durable: the same key gives the first request again."),
            click.option("--detach", is_flag=True, help="With --durable: print the uuid and do not wait."),
            click.option(
                "--format", "format_", type=click.Choice(FORMATS), default="json",
                help=with_default("How rows are sent; Arrow goes to stdout as it is (IPC stream).", "json"),
            ),
            _OUTPUT,
            click.option("--deadline", type=DURATION, help="Cancel it if it is not done after so long."),
            PREFIX,
            BROKER,
            _JSON,
        ]
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@click.pass_context
def submit(context: click.Context) -> None:
    """Run a query or a named job, and print its result.

    Progress is shown on stderr. Ctrl-C cancels the job; with --durable it only stops waiting.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@submit.command("sql")
@click.argument("query")
@click.option("--arg", "args", multiple=True, metavar="NAME=VALUE", help="A parameter, :NAME in the query. Repeatable.")
@_submitting
def submit_sql(*, query: str, args: Sequence[str], format_: str, prefix: str, **asked: Any) -> int:
    """Run QUERY (or @FILE, or - for stdin): SELECT, VALUES, TABLE or WITH …, over the batch's tables."""
    (sql,) = bodies.frames([query])
    settings: dict[str, Any] = {"format": format_}
    if args:
        settings["args"] = {name: _value(text) for name, text in pairs(args).items()}
    return _submit(f"{prefix}.sql", [sql, json.dumps(settings).encode()], **asked)


@submit.command("job")
@click.argument("name")
@click.argument("arguments", required=False, default="{}", metavar="[JSON]")
@click.option(
    "--arg", "args", multiple=True, metavar="NAME=VALUE", help="An argument; JSON, or else a text. Repeatable."
)
@_submitting
def submit_job(*, name: str, arguments: str, args: Sequence[str], format_: str, prefix: str, **asked: Any) -> int:
    """Run the Python job NAME with arguments, a JSON object: '{"path": "book.txt"}', or --arg path=book.txt."""
    (text,) = bodies.frames([arguments])
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError
    except ValueError:
        raise click.BadParameter(f"{arguments!r}: the arguments are a JSON object, or --arg NAME=VALUE") from None
    given |= {each: _value(value) for each, value in pairs(args).items()}
    frames = [name.encode(), json.dumps(given).encode(), json.dumps({"format": format_}).encode()]
    return _submit(f"{prefix}.job", frames, **asked)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _submit(
    service: str,
    frames: list[bytes],
    *,
    durable: bool,
    key: str | None,
    detach: bool,
    output: Path | None,
    deadline: float | None,
    broker: str,
    as_json: bool,
) -> int:
    if (key is not None or detach) and not durable:
        raise click.UsageError("--key and --detach go with --durable")
    if durable and deadline is not None:
        raise click.UsageError("--deadline goes without --durable: Titanic does it whenever it can")
    check_listening([broker])
    with Client(broker, timeout=PATIENCE, retries=0) as client:
        if durable:
            if not client.available("titanic.request", timeout=ANSWER):
                raise ServiceNotFound(
                    f"no Titanic at {broker}: start one with `titanic serve`", service="titanic.request"
                )
            ticket = Titanic(client).submit(service, *frames, key=key)
            if detach:
                click.echo(ticket.uuid)
                return 0
            click.echo(f"handed over as {ticket.uuid}", err=True)
            reply = _follow(ticket)
        else:
            if not client.available(service, timeout=ANSWER):
                raise ServiceNotFound(_nobody(service, broker), service=service)
            reply = _shown(client.stream(service, *frames, wait=False, deadline=deadline))
    return _print(reply, output, as_json=as_json)


def _nobody(service: str, broker: str) -> str:
    return f"no batch offers {service!r} at {broker}: start one with `mdp-spark batch`"


def _follow(ticket: Ticket) -> Reply:
    try:
        with _bar() as show:
            for part in ticket.partials():
                show(part)
        return ticket.result()
    except KeyboardInterrupt:
        click.echo(f"it goes on: mdp-spark status {ticket.uuid} --wait", err=True)
        raise


def _shown(parts: Generator[Reply, None, None]) -> Reply:
    """The FINAL of a stream, the progress before it having been shown."""
    with _bar() as show:
        for part in parts:
            if part.final:
                return part
            show(part)
    raise AssertionError("a stream ends with its FINAL, or raises")


@contextmanager
def _bar() -> Iterator[Callable[[Reply], None]]:
    """A progress bar on stderr, fed with PARTIALs; where that is no terminal, a line now and then."""
    terminal = sys.stderr.isatty()
    told_at = float("-inf")
    shown = ""

    def show(part: Reply) -> None:
        nonlocal told_at, shown
        event: dict[str, Any] = {}
        with suppress(ValueError):
            event = json.loads(part[0])
        line = _line(event)
        if line is None:
            return
        if terminal:
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)
            shown = line
        elif event.get("event") != "progress" or time.monotonic() - told_at >= 5:
            told_at = time.monotonic()
            click.echo(line, err=True)

    try:
        yield show
    finally:
        if shown:
            click.echo("\r\x1b[K", nl=False, err=True)


BAR: Final = 30


def _line(event: dict[str, Any]) -> str | None:
    """How far it has come, in a line."""
    match event:
        case {"event": "started", "job": job, "driver": driver}:
            return f"job {job} at {driver}"
        case {"event": "waiting"}:
            return "waiting for a free place"
        case {"event": "yielded", "value": value}:
            return json.dumps(value, ensure_ascii=False)
        case {"event": "progress", "tasks": tasks, "tasks_done": done}:
            filled = BAR * done // tasks if tasks else 0
            failed = f", {event['tasks_failed']} failed" if event.get("tasks_failed") else ""
            rows = f", {event['rows_read']:,} rows read" if event.get("rows_read") else ""
            return (
                f"[{'#' * filled}{'-' * (BAR - filled)}] {done}/{tasks} tasks, "
                f"{event.get('stages_done')}/{event.get('stages')} stages{rows}{failed}, {event.get('seconds')} s"
            )
    return None


def _print(reply: Reply, output: Path | None, *, as_json: bool) -> int:
    """Print a result: rows one a line, or as a table on a terminal; a path; Arrow as it is."""
    try:
        described = json.loads(reply[0])
        data = reply[1]
        format_ = described["format"]
    except (ValueError, LookupError, TypeError):
        raise ServiceError(500, f"that is no batch's result: {reply[0][:100]!r}", service=reply.service) from None
    path = described.get("path")
    if path is not None:
        click.echo(json.dumps(described) if as_json else path)
        if not as_json:
            what = f"{described['rows']} rows" if "rows" in described else "its bytes"
            click.echo(f"{what}, too large to send, are there as {format_}", err=True)
        return 0
    if output is not None:
        output.write_bytes(data)
        click.echo(f"{described.get('rows', 1)} rows are in {output}", err=True)
        return 0
    if format_ == "arrow":
        bodies.write(data, newline=False)
    elif as_json:
        bodies.print_json({**described, "data": json.loads(data)})
    elif format_ == "value":
        bodies.write(data, newline=True)
    else:
        rows = json.loads(data)
        names = [column["name"] for column in described["columns"]]
        if sys.stdout.isatty():
            click.echo(table(names, rows))
        else:
            for row in rows:
                click.echo(json.dumps(row, ensure_ascii=False))
    return 0


def table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Rows in columns."""
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(row[at]) for row in cells), 0) for at, name in enumerate(names)]
    lines = ["  ".join(name.ljust(width) for name, width in zip(names, widths, strict=True)).rstrip()]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "".join(each if each.isprintable() else "?" for each in text)
    return text if len(text) <= 60 else text[:57] + "…"


# ── status, cancel, drain ────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("uuid", required=False)
@click.option("--wait", is_flag=True, help="With a UUID: wait for the result, showing progress.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="With a UUID: write the data to this file."
)
@BROKER
@_TIMEOUT
@_JSON
def status(*, uuid: str | None, wait: bool, output: Path | None, broker: str, timeout: float, as_json: bool) -> int:
    """Show the batches and fleets at the broker and what they run; or the request UUID that was handed over.

    Of a request (`submit --durable`) the result is printed if it is there; else the exit code is 3.
    """
    check_listening([broker])
    with Client(broker, timeout=timeout, retries=0) as client:
        if uuid is not None:
            ticket = Titanic(client).ticket(_uuid(uuid))
            if wait:
                reply = _follow(ticket)
            else:
                try:
                    reply = ticket.result(0)
                except RequestTimeout:
                    raise RequestTimeout(f"{uuid} has no result yet: --wait waits for it") from None
            return _print(reply, output, as_json=as_json)
        if wait or output is not None:
            raise click.UsageError("--wait and --output go with a UUID")
        found = [_status_of(client, driver) for driver in control.drivers(client)]
    if as_json:
        bodies.print_json(found)
    elif not found:
        click.echo(f"no batch and no fleet at {broker}: `mdp-spark batch` or `mdp-spark fleet` starts one", err=True)
    for driver in found if not as_json else ():
        click.echo("\n".join(_status_lines(driver)))
    return 0


def _status_of(client: Client, driver: str) -> dict[str, Any]:
    try:
        return control.ask(client, driver, "status")
    except (RequestTimeout, ServiceNotFound) as error:  # it ends just now, or hangs: the others are shown all the same
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
            line = _line({"event": "progress", **job})
            yield f"  {job['job']}  {line}  {job['what']}"
    else:
        slots = driver.get("slots", [])
        yield (
            f"{kind} {name} on {driver.get('master')}: {driver.get('service')} by {driver.get('handler')}; "
            f"{len(slots)} slots of {driver.get('min')} to {driver.get('max')}, {driver.get('queued', 0)} queued{state}"
        )
        for slot in slots:
            where = f"{slot.get('host')} pid {slot.get('pid')} executor {slot.get('executor')}"
            yield f"  slot {slot.get('slot')}  {slot.get('state')}  {where}  {slot.get('served', 0)} served"
        if driver.get("last_error"):
            yield f"  last error: {driver['last_error']}"


def _uuid(text: str) -> UUID:
    found = parse_uuid(text.replace("-", "").encode(errors="replace"))
    if found is None:
        raise click.BadParameter(f"{text!r} is no uuid: it takes the 32 hex digits that `submit --durable` printed")
    return found


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@BROKER
@_TIMEOUT
def cancel(*, jobs: Sequence[str], broker: str, timeout: float) -> int:
    """Cancel jobs: by the id that `submit` and `status` show, or the uuid of a request that was handed over.

    The latter is forgotten by Titanic as well. Exit code 4: one of them does not run.
    """
    check_listening([broker])
    with Client(broker, timeout=timeout, retries=0) as client:
        missing = [job for job in jobs if not _cancelled(client, job)]
    for job in missing:
        click.echo(f"mdp-spark: {job} does not run", err=True)
    return 4 if missing else 0


def _cancelled(client: Client, job: str) -> bool:
    uuid = parse_uuid(job.replace("-", "").encode(errors="replace"))
    if uuid is not None:
        ticket = Titanic(client).ticket(uuid)
        try:
            if ticket.ready():
                return False
        except UnknownTicket:
            return False
        ticket.close()
        return True
    for driver in control.drivers(client):
        with suppress(ServiceError, RequestTimeout, ServiceNotFound):  # a fleet, or one that ends just now
            if control.ask(client, driver, "cancel", job=job)["cancelled"]:
                return True
    return False


@click.command()
@click.argument("drivers", nargs=-1, required=True, metavar="NAME…")
@BROKER
@_TIMEOUT
def drain(*, drivers: Sequence[str], broker: str, timeout: float) -> int:
    """Have batches and fleets take no more, finish what runs, and end; by the names that `status` shows."""
    check_listening([broker])
    with Client(broker, timeout=timeout, retries=0) as client:
        for driver in drivers:
            try:
                control.checked_name(driver)
            except SettingError as error:
                raise click.BadParameter(str(error)) from None
            answer = control.ask(client, driver, "drain")
            click.echo(f"{driver} ends; it finishes {answer.get('running', 0)} first", err=True)
    return 0


COMMANDS: Final = {"submit": submit, "status": status, "cancel": cancel, "drain": drain}

"""The client command `mdp-spark submit`.

It only talks to the broker and needs neither PySpark nor Java.
"""

import json
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import Any, Final

import click
import msgspec

from ...clients import BrokerUnreachable, Client, Reply, RequestTimeout, ServiceNotFound
from ...clients.console import bodies
from ...clients.console.asking import BROKER
from ...mdp.cli.console import Group, key_options, options
from ...mdp.errors import RequestError, SettingError
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.reach import check_listening
from ...titanic.api.client import Ticket, Titanic
from ...titanic.operator.command.parameters import DURATION
from ..client.frames import STREAM_TIMEOUT_SECONDS, difference, job_frames, parse_result, sql_frames
from ..client.partials import showing
from .parameters import PREFIX

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
    """Return the JSON of an argument; any other text is a string."""
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
@_ARGS
@_submit_options
def submit_job(*, name: str, args: dict[str, str], format_: str, prefix: str, **options: Any) -> int:
    """Run the Python job NAME."""
    arguments = {each: msgspec.Raw(_argument(text)) for each, text in args.items()}  # numbers with all their digits
    return _submit(f"{prefix}.job", job_frames(name, arguments, format_), **options)


def _submit(
    service: str, frames: list[bytes], *, durable: bool, idempotency_key: str | None, detach: bool, wait: bool,
    deadline: float | None, broker: Sequence[str], keys: ClientKeys | None, as_json: bool,
) -> int:  # fmt: skip
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
            with told_once(as_json, deadline):
                (reply,) = deque(showing(parts), maxlen=1)
            return print_result(reply, as_json=as_json)
        ticket = Titanic(client).submit(service, *frames, key=idempotency_key)
        if idempotency_key is not None and (differs := difference(ticket, frames)):
            raise SettingError(
                f"--idempotency-key {idempotency_key}: it belongs to request {ticket.uuid}, which differs: {differs}"
            )
        if detach:
            click.echo(ticket.uuid)
            return 0
        click.echo(f"submitted as {ticket.uuid}", err=True)
        with told_once(as_json):
            reply = follow(ticket)
        return print_result(reply, as_json=as_json)


@contextmanager
def told_once(as_json: bool, deadline: float | None = None) -> Generator[None]:
    """Print the text of a request's error once: the JSON that repeats it is for `--json`."""
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


def follow(ticket: Ticket[Reply, Reply]) -> Reply:
    """Show the progress of a durable request, and return its reply."""
    try:
        deque(showing(ticket.partials()), maxlen=0)
        return ticket.result()
    except KeyboardInterrupt:
        click.echo(f"the job continues; to wait for it: mdp-spark status {ticket.uuid} --wait", err=True)
        raise


def print_result(reply: Reply, *, as_json: bool) -> int:
    """Print a result: rows as JSON lines; a path; Arrow unchanged."""
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
        for row in json.loads(data):
            click.echo(json.dumps(row, ensure_ascii=False))
    return 0

"""The client commands `mdp-spark status`, `jobs`, `cancel`, `reload` and `drain`.

They only talk to the broker and need neither PySpark nor Java.
"""

from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import Any
from uuid import UUID

import click

from ...clients import Client, RequestTimeout, ServiceNotFound
from ...clients.console import bodies
from ...mdp.errors import UnknownTicket
from ...titanic.api.client import Titanic
from ...titanic.api.options import parse_uuid
from ...titanic.operator.command.parameters import UUID_TYPE, client_options
from .. import drivers
from ..client.partials import progress_line
from .fetch import show_history, what_ran
from .submit import follow, print_result, told_once


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
            with told_once(as_json):
                reply = follow(ticket) if wait else ticket.result(0)
        except RequestTimeout:
            if wait:
                raise
            raise RequestTimeout(f"{uuid.hex} has no result yet; wait for it with --wait") from None
        return print_result(reply, as_json=as_json)
    if wait:
        raise click.UsageError("--wait requires a UUID")
    if history:
        show_history(client, as_json=as_json)
        return 0
    found = [_status_of(client, driver) for driver in drivers.names(client)]
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
        return drivers.ask(client, driver, "status")
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


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@client_options(5)
@bodies.JSON
def jobs(*, client: Client, as_json: bool) -> int:
    """List the Python jobs that you may run, with their parameters and docstrings."""
    catalogues = list(drivers.ask_all(client, "catalogue"))
    if not catalogues:
        click.echo("no batch at the broker; start one with `mdp-spark batch`", err=True)
    found = [{"batch": batch, **job} for batch, answer in catalogues for job in answer["jobs"]]
    if as_json:
        bodies.print_json(found)
        return 0
    for job in found:
        _echo(f"{job['name']}({job['parameters']})")
        _echo(indent(job["description"], "    "))
    return 0


def _echo(text: str) -> None:
    """Print lines as they are, except for control characters."""
    for line in text.splitlines():
        click.echo("".join(each if each.isprintable() else "?" for each in line.expandtabs()))


# ── cancel, drain, reload ────────────────────────────────────────────────────────────────────────────────────────────


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
        return any(answer["cancelled"] for _, answer in drivers.ask_all(client, "cancel", job=job))
    ticket = Titanic(client).ticket(uuid)
    try:
        if ticket.ready():
            return False
    except UnknownTicket:
        return False
    ticket.close()
    return True


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@client_options(5)
def drain(*, names: Sequence[str], client: Client) -> int:
    """Tell batches and fleets, named as in `status`, to finish running requests and exit."""
    for driver in names:
        answer = drivers.ask(client, driver, "drain")
        click.echo(f"{driver} is draining; {answer.get('running', 0)} still running", err=True)
    return 0


@click.command("reload")
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@client_options(300)
def reload_command(*, names: Sequence[str], client: Client) -> int:
    """Tell batches, named as in `status`, to read their --config again, and to infer schemas again.

    New requests use the new tables, catalogs and jobs. If the file is invalid, the batch keeps the old ones, and this
    command prints what is wrong (exit code 6). Python modules that are already loaded are not loaded again.
    """
    for driver in names:
        answer = drivers.ask(client, driver, "reload")
        counts = ", ".join(f"{answer[each]} {each}" for each in ("tables", "catalogs", "jobs"))
        click.echo(f"{driver} has reloaded its catalogue: {counts}", err=True)
    return 0

"""The subcommands of `mdclient` that watch a broker: health, top and tail."""

import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import click

from ....mdp.cli.console import EXIT_FAILED, Number
from ....mdp.errors import RequestRejected, RequestTimeout
from ....mdp.transport.reach import check_listening
from ...console import bodies
from ...console.asking import OF, addressed, advice, ask, connection_options, new_client
from ...console.completion import services as complete_services
from ...mdclient import Client
from . import brokers
from .health import Question, Thresholds, as_dict, checks
from .top import BrokerView, lines, milliseconds, with_rates

HEALTH_TIMEOUT_SECONDS: Final = 10.0
MAX_PAGES: Final = 10
"""Pages of `mmi.metrics` that `top` reads in each update: 1000 services, as many as `mmi.services` lists."""
DEFAULT_TAIL_LIMIT: Final = 100
"""Requests in a second."""
MAX_TAIL_INTERVAL_SECONDS: Final = 5.0
"""Half of the time after which a broker forgets a tail that is not asked for."""

# ── health ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("services", nargs=-1, metavar="[SERVICE]...", shell_complete=complete_services)
@click.option(
    "--min-workers",
    type=Number("workers", whole=True),
    show_default="1 worker, here or at a linked broker",
    help="Workers that each SERVICE needs, at this broker.",
)
@click.option(
    "--max-queue",
    type=Number("requests", whole=True, zero=True),
    help="Requests that may wait for each SERVICE; without SERVICE, for any service.",
)
@click.option(
    "--max-age",
    type=Number("seconds", zero=True),
    help="How long the oldest request may have waited for each SERVICE; without SERVICE, for any service.",
)
@OF
@connection_options(json_help="Print a JSON object.", timeout=HEALTH_TIMEOUT_SECONDS, retries=0)
def health(
    *,
    services: tuple[str, ...],
    min_workers: int | None,
    max_queue: int | None,
    max_age: float | None,
    on: str | None,
    as_json: bool,
    **connection: Any,
) -> int:
    """Check the broker and the SERVICEs, for probes.

    \b
    mdclient health                        the broker answers and is not draining
    mdclient health echo --min-workers 2   echo has two workers
    mdclient health --max-age 30           no request waits longer than 30 s

    Prints a line for each check, and exits with 0 if all succeed, and with 1 if one fails. A broker that cannot be
    reached, or does not answer within the timeout, has the exit codes of all subcommands.
    """
    if min_workers is not None and not services:
        raise click.UsageError("--min-workers needs a SERVICE")
    wanted = Thresholds(min_workers, max_queue, max_age)
    with new_client(connection) as client, advice(connection, "mmi.broker", on=on):
        # Without `check_listening`: a broker that is being started has until the timeout.
        found = []
        for each in checks(_asks(client, on, connection["timeout"]), services, wanted):
            found.append(each)
            if not as_json:
                click.echo(each.line())
        result = as_dict(found, client.endpoint)
    if as_json:
        bodies.print_json(result)
    return 0 if result["ok"] else EXIT_FAILED


def _asks(client: Client, on: str | None, seconds: float) -> Question:
    """Return a function that asks the broker; all questions together may take so many seconds."""
    until = time.monotonic() + seconds

    def question(service: str, body: bytes) -> bytes | None:
        left = round(until - time.monotonic(), 2)  # it is shown
        if left <= 0:
            raise RequestTimeout(f"no answer to {service}", service=service)
        try:
            return b" ".join(client.request(service, body, options=addressed(on), timeout=left))
        except RequestRejected:  # the client's role may not ask
            return None

    return question


# ── top ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.option("--interval", type=Number("seconds"), default=1.0, help="Pause between updates.")
@click.option("--count", type=Number("updates", whole=True), show_default="until Ctrl-C", help="Number of updates.")
@click.option("--all", "every", is_flag=True, help="Watch every broker that can be reached: links and services.")
@OF
@connection_options(json_help="Print each update as one line of JSON.")
def top(*, interval: float, count: int | None, every: bool, on: str | None, as_json: bool, **connection: Any) -> None:
    """Watch the broker: services, queues, errors, latency, and workers by process.

    The services with the longest queues come first. P50 and P99 are how long requests were at a worker, QUEUE P99 is
    how long they waited for one; both are estimates from the broker's histograms. LOAD is how many requests a process
    held on average. The rates of the first update are averages since the broker was started, or the link established.
    """
    if every and on is not None:
        raise click.UsageError("--all watches all brokers: leave out --on")
    if every and connection["protocol"] != "X1":
        raise click.UsageError("--all requires protocol X1: MDP/0.2 and 0.1 cannot address a broker")
    live = sys.stdout.isatty() and not as_json
    look = _looks_at_all(connection) if every else _looks(on)
    with new_client(connection) as client, advice(connection, "mmi.stats", on=on), suppress(KeyboardInterrupt):
        check_listening(connection["broker"], connection["keys"])
        for number in itertools.count(1):
            shown = look(client)
            if as_json:
                bodies.print_json(shown)
            else:
                height = shutil.get_terminal_size().lines if live else 1000
                text = "\n".join((brokers.all_lines if every else lines)(shown, client.endpoint, height))
                click.echo(f"\x1b[H\x1b[2J{text}" if live else f"{text}\n")
                sys.stdout.flush()
            if number == count:
                return
            time.sleep(interval)


def _looks(on: str | None) -> Callable[[Client], dict[str, Any]]:
    """Return a function that returns the report of a broker, with rates since the previous call."""
    before = None

    def look(client: Client) -> dict[str, Any]:
        nonlocal before
        services, workers, stats = (ask(client, f"mmi.{name}", on) for name in ("services", "workers", "stats"))
        view = BrokerView.from_answers(services, workers, stats, _pages(client, on))
        shown, before = with_rates(view, before), view
        return shown

    return look


def _looks_at_all(connection: dict[str, Any]) -> Callable[[Client], dict[str, Any]]:
    """Return a function that returns the reports of all reachable brokers, with rates since the previous call."""
    before: list[brokers.BrokerReport] = []

    def look(client: Client) -> dict[str, Any]:
        nonlocal before
        seen = brokers.ask_all(client, connection["timeout"])
        shown, before = brokers.all_with_rates(seen, before), seen
        return shown

    return look


def _pages(client: Client, on: str | None) -> Iterator[dict[str, Any]]:
    """Yield the first pages of `mmi.metrics`; none if the broker does not know it, or not tell it."""
    after = b""
    for _ in range(MAX_PAGES):
        answer = b""
        with suppress(RequestRejected):
            (answer,) = client.request("mmi.metrics", after, options=addressed(on))
        try:
            page = json.loads(answer)
            following = page["next"]
        except (ValueError, TypeError, KeyError):
            return
        yield page
        if following is None:
            return
        after = bytes.fromhex(following)


# ── tail ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("service", required=False, shell_complete=complete_services)
@click.option("--failed", is_flag=True, help="Only requests that were not answered with a FINAL.")
@click.option(
    "--limit",
    type=Number("requests", whole=True),
    default=DEFAULT_TAIL_LIMIT,
    help="Requests to show in a second, at most 1000; further ones are counted.",
)
@click.option(
    "--interval",
    type=Number("seconds"),
    default=0.5,
    help="Pause between questions to the broker, which forgets the tail after 10.",
)
@click.option(
    "--count", type=Number("requests", whole=True), show_default="until Ctrl-C", help="Number of requests to show."
)
@OF
@connection_options(json_help="Print each request as one line of JSON.")
def tail(
    *,
    service: str | None,
    failed: bool,
    limit: int,
    interval: float,
    count: int | None,
    on: str | None,
    as_json: bool,
    **connection: Any,
) -> None:
    """Show requests as they end: all, or those for SERVICE.

    \b
    mdclient tail                  all requests, at most 100 in a second
    mdclient tail echo --failed    those that echo failed to answer

    QUEUE is how long a request waited, TIME how long it was at its last worker. At a broker with roles, only those with
    `admin = true` may see requests.
    """
    # The broker forgets a tail after ten seconds, so one that asks less often would miss requests.
    interval = min(interval, MAX_TAIL_INTERVAL_SECONDS)
    asked = {"limit": limit, "service": service or "", "failed": failed}
    left = count
    with new_client(connection) as client, advice(connection, "mmi.tail", on=on), suppress(KeyboardInterrupt):
        check_listening(connection["broker"], connection["keys"])
        begun = False
        while True:
            answer = ask(client, "mmi.tail", on, json.dumps(asked).encode())
            if not begun:
                click.echo(f"following the requests at {client.endpoint}; Ctrl-C stops it", err=True)
            elif answer["tail"] != asked["tail"]:
                click.echo("requests may be missing: the broker was restarted, or was not asked in time", err=True)
            begun, asked["tail"] = True, answer["tail"]
            rows = tail_rows(answer, time.time())
            for row in rows if left is None else rows[:left]:
                if as_json:
                    bodies.print_json(row)
                else:
                    click.echo(tail_line(row))
            sys.stdout.flush()
            if answer["left_out"]:
                click.echo(f"{answer['left_out']} more were left out", err=True)
            if left is not None:
                left -= len(rows)
                if left <= 0:
                    return
            time.sleep(interval)


def tail_rows(answer: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """Return the requests of an answer, ready for JSON, with the time in ISO 8601; `now` is in seconds since 1970."""
    return [_with_time(row, now) for row in answer["requests"]]


def _with_time(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    rest = {name: value for name, value in row.items() if name != "ago_seconds"}
    ended = datetime.fromtimestamp(now - row["ago_seconds"], UTC)
    return {"ended": ended.isoformat(timespec="milliseconds"), **rest}


def tail_line(row: Mapping[str, Any]) -> str:
    """Return a request as a line of text."""
    ended = datetime.fromisoformat(row["ended"]).astimezone()
    details = {
        "worker": row["worker"],
        "role": row["role"],
        "client": row["client"],
        "attempts": row["attempts"] if row["attempts"] > 1 else None,
        "request": row["request_id"] or row["id"],
    }
    return (
        f"{ended:%H:%M:%S}.{ended.microsecond // 1000:03}  {row['outcome']:>4}  {row['service']}  "
        f"queue {milliseconds(row['queue_seconds'])}  time {milliseconds(row['worker_seconds'])}  "
        + "  ".join(f"{name} {value}" for name, value in details.items() if value not in (None, ""))
    )

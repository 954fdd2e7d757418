"""The command `mdclient`."""

import asyncio
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import click

from ..mdp import wire
from ..mdp.cli.console import EXIT_FAILED, Endpoint, Number, run, version_option, with_default
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import BrokerUnreachable, RequestTimeout, ServiceNotFound
from ..mdp.transport.reach import check_listening
from . import bodies
from .aio import AsyncClient
from .defaults import DEFAULT_RETRIES, DEFAULT_TIMEOUT, MAX_OUTSTANDING
from .load import Progress, Result, mixed, one_by_one, pipelined
from .mdclient import Client
from .top import View, lines, with_rates

MMI_TIMEOUT: Final = 0.5
"""Seconds that a broker may take to say whether a service has workers: those that implement MMI answer at once."""


def _options(*, json_lines: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that all subcommands have."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        options = [
            click.option(
                "--broker",
                type=Endpoint(),
                multiple=True,
                default=[DEFAULT_ENDPOINT],
                envvar="MDP_BROKER",
                show_envvar=True,
                help=with_default("Broker to ask. Can be repeated: each retry goes to the next.", DEFAULT_ENDPOINT),
            ),
            click.option(
                "--timeout",
                type=Number("seconds"),
                default=DEFAULT_TIMEOUT,
                help=with_default("How long a try may take; see --retries.", DEFAULT_TIMEOUT, "seconds"),
            ),
            click.option(
                "--retries",
                type=Number("retries", whole=True, zero=True),
                default=DEFAULT_RETRIES,
                help=with_default(
                    "Tries after the first: in all, TIMEOUT × (1 + RETRIES). X1 asks again only when a connection is "
                    "lost; 0.2 and 0.1 after each try.",
                    DEFAULT_RETRIES,
                    "times",
                ),
            ),
            click.option(
                "--protocol",
                type=click.Choice(["X1", "0.2", "0.1"]),
                default="X1",
                envvar="MDP_PROTOCOL",
                show_envvar=True,
                help=with_default("What to speak: 0.2 or 0.1 with a broker that is not zmdp's.", "X1"),
            ),
            click.option(
                "--envelope",
                is_flag=True,
                help="With 0.2: begin each message with an empty frame, as a ROUTER-DEALER proxy needs it. X1 and 0.1 "
                "always do.",
            ),
            click.option("--json", "as_json", is_flag=True, help=json_lines),
        ]
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(context_settings={"max_content_width": 110}, invoke_without_command=True)
@version_option()
@click.pass_context
def cli(context: click.Context) -> None:
    """Call services through a broker, and ask it who is there.

    \b
    mdclient call echo hello           one reply
    mdclient stream count @book.txt    each part as it comes
    mdclient services                  who is there
    mdclient top                       the same, live
    mdclient bench echo hello          how fast it is

    Replies go to stdout, everything else to stderr.

    \b
    Exit codes: 0 done; 1 another failure; 2 bad usage; 3 timeout; 4 no such service; 5 refused: no broker there;
    6 the service failed; 7 refused for now, retry later; 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


_SERVICE = click.argument("service")
_WAIT = click.option("--wait", is_flag=True, help="Wait for the service if nobody offers it yet, or for the broker.")


@cli.command(epilog=bodies.BODY_HELP)
@_SERVICE
@bodies.BODY
@_options(json_lines='Print the reply as a JSON object; frames that are no text as {"base64": …}.')
@bodies.HEADER
@_WAIT
def call(
    *,
    service: str,
    body: tuple[str, ...],
    headers: dict[str, str],
    as_json: bool,
    wait: bool,
    **asked: Any,
) -> None:
    """Call SERVICE and print its reply.

    A reply of one frame is printed byte for byte (to a terminal, with a newline); several frames, one a line.
    """
    frames = bodies.frames(body)
    with _client(asked) as client, _hint(asked["broker"], service):
        settings = _settings(client, service, headers, wait=wait, **asked)
        reply = client.request(service, *frames, **settings)
    if as_json:
        bodies.print_json(bodies.described(reply))
    else:
        bodies.write(b"\n".join(reply), newline=len(reply) > 1 or sys.stdout.isatty())


@cli.command(epilog=bodies.BODY_HELP)
@_SERVICE
@bodies.BODY
@_options(json_lines='Print each part as a JSON object on a line of its own; "final" tells the last.')
@bodies.HEADER
@_WAIT
def stream(
    *,
    service: str,
    body: tuple[str, ...],
    headers: dict[str, str],
    as_json: bool,
    wait: bool,
    **asked: Any,
) -> None:
    """Call SERVICE and print each part of its reply as it comes, the last being the FINAL.

    Frames are printed one a line.
    """
    frames = bodies.frames(body)
    with _client(asked) as client, _hint(asked["broker"], service):
        settings = _settings(client, service, headers, wait=wait, **asked)
        for part in client.stream(service, *frames, **settings):
            if as_json:
                bodies.print_json(bodies.described(part))
            else:
                bodies.write(b"\n".join(part), newline=True)


@cli.command()
@_options(json_lines="Print a JSON list.")
def services(*, as_json: bool, **asked: Any) -> None:
    """List the services that have a worker or a waiting request."""
    with _client(asked) as client:
        check_listening(asked["broker"])
        answer = _ask(client, "mmi.services")
    rows = answer["services"]
    if as_json:
        bodies.print_json(rows)
    elif rows:
        width = max(len("SERVICE"), *(len(row["name"]) for row in rows))
        click.echo(f"{'SERVICE':{width}}  {'WORKERS':>7}  {'IDLE':>7}  {'QUEUED':>7}")
        for row in sorted(rows, key=lambda row: str(row["name"])):
            click.echo(f"{row['name']:{width}}  {row['workers']:7}  {row['idle']:7}  {row['queued']:7}")
    else:
        click.echo("no services: start a worker, for example `mdworker zmdp.workers.echo:worker`", err=True)
    if answer["more"]:
        click.echo(f"{answer['more']} more are not shown", err=True)


@cli.command()
@_options(json_lines="Print a JSON object.")
def info(*, as_json: bool, **asked: Any) -> None:
    """Show the broker's version, settings and counts."""
    with _client(asked) as client:
        check_listening(asked["broker"])
        answer = {"broker": _ask(client, "mmi.broker"), "stats": _ask(client, "mmi.stats")}
    if as_json:
        bodies.print_json(answer)
        return
    for title, values in answer.items():
        click.echo(title)
        for name, value in values.items():
            if isinstance(value, dict):
                value = "  ".join(f"{key}={each}" for key, each in value.items()) or "none"  # noqa: PLW2901
            click.echo(f"  {name:14} {value}")


@cli.command()
@click.option(
    "--count", type=Number("pings", whole=True), default=4, help=with_default("How often to ask.", 4, "times")
)
@click.option(
    "--interval", type=Number("seconds"), default=0.5, help=with_default("Pause between two.", 0.5, "seconds")
)
@_options(json_lines="Print each round trip as a JSON object.")
def ping(*, count: int, interval: float, as_json: bool, **asked: Any) -> None:
    """Measure round trips to the broker (not to a worker)."""
    broker = asked["broker"]
    with _client(asked) as client:
        check_listening(broker)
        trips = []
        for number in range(count):
            if number:
                time.sleep(interval)
            started = time.perf_counter()
            client.available("ping")
            trips.append((time.perf_counter() - started) * 1000)
            if as_json:
                bodies.print_json({"broker": broker[0], "ms": round(trips[-1], 3)})
            else:
                click.echo(f"{broker[0]}: {trips[-1]:.2f} ms")
    if not as_json:
        least, mean, most = min(trips), sum(trips) / len(trips), max(trips)
        click.echo(f"{count} round trips: min {least:.2f}, mean {mean:.2f}, max {most:.2f} ms", err=True)


class _Share(click.FloatRange):
    def __init__(self) -> None:
        super().__init__(0, 1)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        del param, ctx
        return "SHARE"


@cli.command(epilog=bodies.BODY_HELP)
@_SERVICE
@bodies.BODY
@click.option(
    "--load",
    type=click.Choice(["sync", "pipelined", "mixed"]),
    default="pipelined",
    help=with_default(
        "sync: one request after the other. pipelined: OUTSTANDING at a time, one connection. mixed: RATE a second at "
        "random moments, whether those before are done or not, a SHARE of them with the body SLOW.",
        "pipelined",
    ),
)
@click.option("--seconds", type=Number("seconds"), default=5.0, help=with_default("How long to ask.", 5, "seconds"))
@click.option(
    "--outstanding",
    type=Number("requests", whole=True),
    default=64,
    help=with_default("For pipelined: requests at a time.", 64),
)
@click.option("--rate", type=Number("requests"), default=200.0, help=with_default("For mixed: requests a second.", 200))
@click.option("--slow", help="For mixed: the body of the slow requests, written as BODY is.")
@click.option("--share", type=_Share(), default=0.05, help=with_default("For mixed: the part of slow requests.", 0.05))
@_options(json_lines="Print a JSON object.")
def bench(
    *,
    service: str,
    body: tuple[str, ...],
    load: str,
    seconds: float,
    outstanding: int,
    rate: float,
    slow: str | None,
    share: float,
    as_json: bool,
    **asked: Any,
) -> int:
    """Put a load on SERVICE and show how it bears it: requests a second, latencies by percentile.

    \b
    mdworker zmdp.workers.sleep:worker --processes 4
    mdclient bench sleep 1 --load mixed --slow 200

    Each latency is kept to within one part in 128.  In a mixed load it counts from the moment at which the request was
    to be sent, so that a service that falls behind is not spared.  The exit code is 1 if there was no reply at all.
    """
    frames = bodies.frames(body)
    if (load == "mixed") != (slow is not None):
        raise click.UsageError("--slow BODY goes with --load mixed: it is the body of the slow requests")
    if load != "sync" and asked["protocol"] != "X1":
        raise click.UsageError("--load pipelined and mixed take protocol X1; 0.2 asks one after the other: --load sync")
    with _client(asked) as client, _hint(asked["broker"], service):
        check_listening(asked["broker"])
        if _is_missing(client, service, asked["timeout"]):
            raise ServiceNotFound(service)
    with click.progressbar(length=1000, label=service, file=sys.stderr, show_percent=False) as bar:

        def progress(part: float) -> None:
            bar.update(round(1000 * min(1.0, part)) - bar.pos)

        slow_frames = bodies.frames([slow]) if slow is not None else []
        result = _run_load(
            load, asked, service, frames, slow_frames,
            outstanding=outstanding, rate=rate, share=share, seconds=seconds, progress=progress,
        )  # fmt: skip
    figures = result.as_dict()
    if as_json:
        bodies.print_json(figures)
    else:
        errors = ", ".join(f"{count} {name}" for name, count in result.errors.items()) or "none"
        click.echo(
            f"{figures['replies']} replies in {figures['seconds']:g} s: {figures['replies_per_second']:,} a second"
        )
        click.echo(f"errors: {errors}")
        for kind, text in result.samples.items():
            click.echo(f"  the first {kind}: {text}")
        for kind, found in figures["latency_ms"].items():
            title = "latency" if kind == "all" else f"latency of the {kind}"
            percentiles = "  ".join(f"{name} {value:g}" for name, value in found.items() if name != "count")
            click.echo(f"{title} in ms ({found['count']}): {percentiles}")
    return 0 if result.replies else EXIT_FAILED


def _run_load(
    load: str,
    asked: dict[str, Any],
    service: str,
    frames: list[bytes],
    slow_frames: list[bytes],
    *,
    outstanding: int,
    rate: float,
    share: float,
    seconds: float,
    progress: Progress,
) -> Result:
    if load == "sync":
        with _client(asked) as client:
            wait = asked["protocol"] != "X1"
            return one_by_one(client, service, frames, wait=wait, seconds=seconds, progress=progress)

    async def run() -> Result:
        patience = asked["timeout"] * (1 + asked["retries"])
        most = max(MAX_OUTSTANDING, outstanding)
        async with AsyncClient(asked["broker"], timeout=patience, max_outstanding=most) as client:
            if load == "pipelined":
                return await pipelined(
                    client, service, frames, outstanding=outstanding, seconds=seconds, progress=progress
                )
            return await mixed(
                client, service, frames, slow_frames, share=share, rate=rate, seconds=seconds, progress=progress
            )

    return asyncio.run(run())


@cli.command()
@click.option(
    "--interval", type=Number("seconds"), default=1.0, help=with_default("Pause between two looks.", 1, "seconds")
)
@click.option("--count", type=Number("looks", whole=True), help=with_default("How often to look.", "until Ctrl-C"))
@_options(json_lines="Print each look as a JSON object on a line of its own.")
def top(*, interval: float, count: int | None, as_json: bool, **asked: Any) -> None:
    """Watch the broker: services, queues, workers, and what happens a second.

    Services with the longest queues come first.  The first look shows means since the broker's start.
    """
    live = sys.stdout.isatty() and not as_json
    before = None
    with _client(asked) as client, suppress(KeyboardInterrupt):
        check_listening(asked["broker"])
        for number in itertools.count(1):
            view = View.made_of(*(_ask(client, question) for question in ("mmi.services", "mmi.workers", "mmi.stats")))
            shown = with_rates(view, before)
            if as_json:
                bodies.print_json(shown)
            else:
                height = shutil.get_terminal_size().lines if live else 1000
                text = "\n".join(lines(shown, ", ".join(asked["broker"]), height))
                click.echo(f"\x1b[H\x1b[2J{text}" if live else f"{text}\n")
                sys.stdout.flush()
            if number == count:
                return
            before = view
            time.sleep(interval)


def _ask(client: Client, question: str) -> dict[str, Any]:
    """The JSON answer of the broker to an `mmi.*` question."""
    answer = b" ".join(client.request(question))
    with suppress(ValueError):
        value = json.loads(answer)
        if isinstance(value, dict):
            return value
    text = f"the broker does not know {question} (it answered {answer.decode(errors='replace')}): it is not zmdp's"
    raise ServiceNotFound(text, service=question)


def _client(asked: dict[str, Any]) -> Client:
    return Client(
        asked["broker"], timeout=asked["timeout"], retries=asked["retries"], protocol=asked["protocol"],
        envelope=asked["envelope"],
    )  # fmt: skip


def _is_missing(client: Client, service: str, timeout: float) -> bool:
    """Whether the broker says that no worker offers `service`.  One that does not implement MMI does not say it."""
    try:
        return client.request(
            "mmi.service", wire.service_name(service), timeout=min(timeout, MMI_TIMEOUT), retries=0
        ) == [b"404"]
    except BrokerUnreachable:
        raise
    except RequestTimeout:
        return False


def _settings(
    client: Client,
    service: str,
    headers: dict[str, str],
    *,
    wait: bool,
    broker: Sequence[str],
    protocol: str,
    timeout: float,
    **_: Any,
) -> dict[str, Any]:
    """The arguments of `request` and `stream`.  Raises if nobody offers the service, unless the user wants to wait."""
    if not wait:
        check_listening(broker)
    if protocol == "X1":
        return {"wait": wait, "headers": headers}
    if headers:
        raise click.UsageError("--header takes protocol X1: MDP/0.2 cannot carry headers")
    if not wait and not service.startswith("mmi.") and _is_missing(client, service, timeout):
        raise ServiceNotFound(f"no worker offers {service!r}", service=service)
    return {}


@contextmanager
def _hint(broker: Sequence[str], service: str) -> Iterator[None]:
    """Say what to do about a service that nobody offers."""
    try:
        yield
    except ServiceNotFound:
        raise ServiceNotFound(
            f"no worker offers {service!r} at {', '.join(broker)}: `mdclient services` lists what is there, "
            "--wait waits for it",
            service=service,
        ) from None


def main() -> NoReturn:
    """Entry point of `mdclient`."""
    run("mdclient", cli)


if __name__ == "__main__":
    main()

"""The command `mdclient`."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import click

from ...mdp import wire
from ...mdp.cli.console import CONTEXT_SETTINGS, EXIT_FAILED, Group, Number, run, version_option
from ...mdp.errors import (
    BrokerUnreachable,
    CodecError,
    RequestRejected,
    RequestTimeout,
    ServiceNotFound,
)
from ...mdp.services import About
from ...mdp.transport.reach import check_listening
from ..aio import AsyncClient
from ..calls.arguments import MAX_OUTSTANDING
from ..console import bodies
from ..console.asking import (
    OF,
    ON,
    SERVICE,
    addressed,
    advice,
    ask,
    check_known,
    connection_options,
    new_client,
    total_timeout,
)
from ..console.completion import completion
from ..console.completion import services as complete_services
from ..json_values import body_for, readable
from ..mdclient import Client
from .bench.load import Progress, Result, mixed, one_by_one, pipelined
from .describing import describe, stub
from .freelance import FREELANCE, call_servers
from .limiting import limit
from .monitoring import brokers
from .monitoring.command import health, tail, top
from .monitoring.top import elsewhere

MMI_TIMEOUT_SECONDS: Final = 0.5
"""How long a broker may take to say whether a service has workers: one that implements MMI answers immediately."""


@click.group(cls=Group, context_settings=CONTEXT_SETTINGS)
@version_option()
def cli() -> None:
    """Call services through a broker and inspect the broker.

    \b
    mdclient call echo hello           print the reply
    mdclient stream count @book.txt    print each part of the reply as it arrives
    mdclient services                  list the services
    mdclient describe resize           show what a service takes and returns
    mdclient stub resize > resize.py   write code to call it with types
    mdclient limit resize              show or set its limits
    mdclient top                       watch the broker
    mdclient tail                      show requests as they end
    mdclient health echo               check the broker and a service, for probes
    mdclient brokers                   show the brokers that it is linked to
    mdclient bench echo hello          benchmark a service
    mdclient completion bash           let the shell complete what you type

    \b
    Try it, each in a terminal of its own:
      mdp-broker                                start a broker on this machine
      mdworker zmdp.workers.examples:echo       offer the service echo
      mdclient call echo hello                  call it

    Replies go to stdout, everything else to stderr.

    \b
    Exit codes, the same for all subcommands:
      0  success                     5  no broker reachable
      1  other failure               6  the service failed, or its worker was lost
      2  invalid usage               7  refused for now, retry later
      3  timeout, or broken stream 130  interrupted
      4  no worker offers the service
    """


_WAIT = click.option(
    "--wait",
    is_flag=True,
    help="Wait until the broker is running and a worker offers the service. Without it, the command fails as soon as "
    "there is no broker or no worker, even if only for a moment because one is restarted.",
)


@cli.command(epilog=bodies.BODY_HELP)
@click.argument("service", required=False, metavar="SERVICE", shell_complete=complete_services)
@bodies.BODY
@FREELANCE
@connection_options(json_help='Print the reply as a JSON object; a frame that is not text becomes {"base64": …}.')
@bodies.HEADER
@bodies.VERBOSE
@ON
@_WAIT
def call(
    *,
    service: str | None,
    body: tuple[str, ...],
    freelance: tuple[str, ...],
    headers: dict[str, str],
    verbose: bool,
    as_json: bool,
    on: str | None,
    wait: bool,
    **connection: Any,
) -> None:
    """Call SERVICE and print its reply.

    For a service with types, BODY is a value in JSON, or a text for one that takes a text, and so is what is printed.
    Otherwise frames are printed one per line; a single frame that is not text, such as an image, is printed byte for
    byte, without a newline.

    \b
    mdclient call echo hello                                   through a broker
    mdclient call --freelance tcp://a:5555,tcp://b:5555 hello  without a broker
    """
    if freelance and on is not None:
        raise click.UsageError("--on addresses a broker, and --freelance uses none: use one of them")
    if freelance:
        frames = bodies.frames(body if service is None else (service, *body))
        timeout, keys = total_timeout(connection), connection["keys"]
        reply = call_servers(freelance, frames, timeout=timeout, keys=keys, wait=wait)
    elif service is None:
        raise click.UsageError("Missing argument 'SERVICE'", click.get_current_context())
    else:
        frames = bodies.frames(body)
        with new_client(connection) as client, advice(connection, service, wait=wait, on=on):
            headers = _named(headers, connection) if verbose else headers
            arguments = _request_arguments(client, service, headers, wait=wait, on=on, connection=connection)
            about = _about(client, service)
            reply = readable(about, client.request(service, *_body_for(about, service, frames), **arguments))
        check_known(service, reply)
    if as_json:
        bodies.print_json(bodies.described(reply))
    else:
        bodies.print_frames(reply)


@cli.command(epilog=bodies.BODY_HELP)
@SERVICE
@bodies.BODY
@connection_options(json_help='Print each part as one line of JSON; "final" marks the last.')
@bodies.HEADER
@bodies.VERBOSE
@ON
@_WAIT
def stream(
    *,
    service: str,
    body: tuple[str, ...],
    headers: dict[str, str],
    verbose: bool,
    as_json: bool,
    on: str | None,
    wait: bool,
    **connection: Any,
) -> None:
    """Call SERVICE and print each part of its reply as it arrives.

    Frames are printed one per line.
    """
    frames = bodies.frames(body)
    with new_client(connection) as client, advice(connection, service, wait=wait, on=on):
        headers = _named(headers, connection) if verbose else headers
        arguments = _request_arguments(client, service, headers, wait=wait, on=on, connection=connection)
        about = _about(client, service)
        for part in client.stream(service, *_body_for(about, service, frames), **arguments):
            check_known(service, part)
            part = readable(about, part)  # noqa: PLW2901
            if as_json:
                bodies.print_json(bodies.described(part))
            else:
                bodies.print_frames(part, parts=True)


@cli.command()
@OF
@connection_options(json_help="Print a JSON list.")
def services(*, on: str | None, as_json: bool, **connection: Any) -> None:
    """List the services that have a worker or a waiting request, or that other brokers offer.

    WORKERS and IDLE are the broker's own. ELSEWHERE is how many requests the workers of other brokers can take, and if
    the broker has none itself, how many links away the nearest are.
    """
    with new_client(connection) as client, advice(connection, "mmi.services", on=on):
        check_listening(connection["broker"], connection["keys"])
        answer = ask(client, "mmi.services", on)
    rows = answer["services"]
    if as_json:
        bodies.print_json(rows)
    elif rows:
        width = max(len("SERVICE"), *(len(row["name"]) for row in rows))
        linked = any(map(elsewhere, rows))
        title = f"{'SERVICE':{width}}  {'WORKERS':>7}  {'IDLE':>7}  {'QUEUED':>7}"
        click.echo(f"{title}  ELSEWHERE" if linked else title)
        for row in sorted(rows, key=lambda row: str(row["name"])):
            line = f"{row['name']:{width}}  {row['workers']:7}  {row['idle']:7}  {row['queued']:7}"
            click.echo(f"{line}  {elsewhere(row) or '-'}" if linked else line)
    else:
        click.echo("no services: start a worker, for example `mdworker zmdp.workers.examples:echo`", err=True)
    if answer["more"]:
        click.echo(f"{answer['more']} more are not shown", err=True)


@cli.command()
@OF
@connection_options(json_help="Print a JSON object.")
def info(*, on: str | None, as_json: bool, **connection: Any) -> None:
    """Show the broker's version, settings, statistics, and links to other brokers."""
    with new_client(connection) as client, advice(connection, "mmi.broker", on=on):
        check_listening(connection["broker"], connection["keys"])
        answer = {name: ask(client, f"mmi.{name}", on) for name in ("broker", "stats", "brokers")}
    if as_json:
        bodies.print_json(answer)
        return
    answer["brokers"] = brokers.summary(answer["brokers"])
    for title, values in answer.items():
        click.echo(title)
        for name, value in values.items():
            if isinstance(value, dict):
                value = "  ".join(f"{key}={each}" for key, each in value.items()) or "none"  # noqa: PLW2901
            click.echo(f"  {name:14} {value}")


@cli.command("brokers")
@OF
@connection_options(json_help="Print a JSON object.")
def show_brokers(*, on: str | None, as_json: bool, **connection: Any) -> None:
    """Show the broker's links to other brokers, and the brokers that it can reach.

    THERE and HERE are the requests that it has passed on over a link, or got over it, and that have not ended; SENT and
    RECEIVED are those since the link was configured or opened. TROUBLE is why a link is not up.
    """
    with new_client(connection) as client, advice(connection, "mmi.brokers", on=on):
        check_listening(connection["broker"], connection["keys"])
        answer = ask(client, "mmi.brokers", on)
    if as_json:
        bodies.print_json(answer)
    else:
        click.echo("\n".join(brokers.lines(answer)))


@cli.command()
@click.option("--count", type=Number("pings", whole=True), default=4, help="Number of pings.")
@click.option("--interval", type=Number("seconds"), default=0.5, help="Pause between pings.")
@connection_options(json_help="Print each round trip as one line of JSON.")
def ping(*, count: int, interval: float, as_json: bool, **connection: Any) -> None:
    """Measure the round-trip time to the broker (not to a worker)."""
    with new_client(connection) as client, advice(connection, "mmi.service"):
        check_listening(connection["broker"], connection["keys"])
        trips = []
        for number in range(count):
            if number:
                time.sleep(interval)
            started = time.perf_counter()
            client.available("ping")
            trips.append((time.perf_counter() - started) * 1000)
            if as_json:
                bodies.print_json({"broker": client.endpoint, "ms": round(trips[-1], 3)})
            else:
                click.echo(f"{client.endpoint}: {trips[-1]:.2f} ms")
    if not as_json:
        least, mean, most = min(trips), sum(trips) / len(trips), max(trips)
        click.echo(f"{count} round trips: min {least:.2f}, mean {mean:.2f}, max {most:.2f} ms", err=True)


@cli.command(epilog=bodies.BODY_HELP)
@SERVICE
@bodies.BODY
@click.option(
    "--load",
    type=click.Choice(["sync", "pipelined", "mixed"]),
    default="pipelined",
    help=(
        "sync: one request after the other. pipelined: always OUTSTANDING requests over one connection. mixed: "
        "RATE requests per second at random moments, whether or not earlier ones have finished; a SHARE of them has "
        "the body SLOW."
    ),
)
@click.option("--seconds", type=Number("seconds"), default=5.0, help="Duration of the benchmark.")
@click.option(
    "--outstanding",
    type=Number("requests", whole=True),
    default=64,
    help="With pipelined: number of outstanding requests.",
)
@click.option("--rate", type=Number("requests"), default=200.0, help="With mixed: requests per second.")
@click.option("--slow", help="With mixed: the body of slow requests, written like a BODY.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=0.05,
    help="With mixed: fraction of slow requests.",
)
@connection_options(json_help="Print a JSON object.")
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
    **connection: Any,
) -> int:
    """Benchmark SERVICE: throughput and latency percentiles.

    \b
    mdworker zmdp.workers.examples:sleep --processes 4
    mdclient bench sleep 1 --load mixed --slow 200

    Latencies are accurate to one part in 128.  In a mixed load a request's latency counts from the moment at which it
    was due to be sent, so it includes the delay when the service falls behind.  The exit code is 1 if there was no
    reply at all.
    """
    frames = bodies.frames(body)
    if (load == "mixed") != (slow is not None):
        raise click.UsageError("--slow BODY requires --load mixed: it is the body of the slow requests")
    if load != "sync" and connection["protocol"] != "X1":
        raise click.UsageError("--load pipelined and mixed require protocol X1: with 0.2 and 0.1 use --load sync")
    with new_client(connection) as client:
        check_listening(connection["broker"], connection["keys"])
        if _is_missing(client, service, connection["timeout"]):
            raise ServiceNotFound(
                f"no worker offers {service!r} at {client.endpoint}: `mdclient services` lists the services that exist",
                service=service,
            )
    with click.progressbar(length=1000, label=service, file=sys.stderr, show_percent=False) as bar:

        def progress(part: float) -> None:
            bar.update(round(1000 * min(1.0, part)) - bar.pos)

        slow_frames = bodies.frames([slow]) if slow is not None else []
        result = _run_load(
            load, connection, service, frames, slow_frames,
            outstanding=outstanding, rate=rate, share=share, seconds=seconds, progress=progress,
        )  # fmt: skip
    figures = result.as_dict()
    if as_json:
        bodies.print_json(figures)
    else:
        errors = ", ".join(f"{count} {name}" for name, count in result.errors.items()) or "none"
        click.echo(
            f"{figures['replies']} replies in {figures['seconds']:g} s: {figures['replies_per_second']:,} per second"
        )
        click.echo(f"errors: {errors}")
        for kind, text in result.samples.items():
            click.echo(f"  first {kind}: {text}")
        for kind, found in figures["latency_ms"].items():
            title = "latency" if kind == "all" else f"latency of {kind} requests"
            percentiles = "  ".join(f"{name} {value:g}" for name, value in found.items() if name != "count")
            click.echo(f"{title} in ms ({found['count']}): {percentiles}")
    return 0 if result.replies else EXIT_FAILED


def _run_load(
    load: str,
    connection: dict[str, Any],
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
        with new_client(connection) as client:
            wait = connection["protocol"] != "X1"
            return one_by_one(client, service, frames, wait=wait, seconds=seconds, progress=progress)

    async def run() -> Result:
        async with AsyncClient(
            connection["broker"], timeout=total_timeout(connection), key=connection["keys"],
            max_outstanding=max(MAX_OUTSTANDING, outstanding),
        ) as client:  # fmt: skip
            if load == "pipelined":
                return await pipelined(
                    client, service, frames, outstanding=outstanding, seconds=seconds, progress=progress
                )
            return await mixed(
                client, service, frames, slow_frames, share=share, rate=rate, seconds=seconds, progress=progress
            )

    return asyncio.run(run())


def _is_missing(client: Client, service: str, timeout: float) -> bool:
    """Return whether the broker says that no worker offers `service`: False if it does not implement MMI."""
    try:
        return client.request(
            "mmi.service", wire.service_name(service), timeout=min(timeout, MMI_TIMEOUT_SECONDS), retries=0
        ) == [b"404"]
    except BrokerUnreachable:
        raise
    except RequestTimeout:
        return False


def _body_for(about: About, service: str, frames: Sequence[bytes]) -> Sequence[bytes]:
    """Return the body of a request for a service with types, which takes one value, or for any other."""
    if about.codec and len(frames) > 1:
        text = f"{service} takes one value, and got {len(frames)}: put quotes around a text that has spaces"
        raise click.UsageError(f"{text}; several values are one JSON object or list")
    try:
        return body_for(about, frames)
    except CodecError as error:
        raise click.UsageError(f"{service}: {error}") from None


def _about(client: Client, service: str) -> About:
    """Return the description that the workers of a service give, if the broker passes it on."""
    if client.protocol == "X1" and not service.startswith("mmi."):
        with suppress(ServiceNotFound, RequestRejected):
            return client.describe(service).about
    return About()


def _named(headers: dict[str, str], connection: dict[str, Any]) -> dict[str, str]:
    """Return the headers with an id of the request, which is printed."""
    if connection["protocol"] != "X1":
        raise click.UsageError("--verbose requires protocol X1: MDP/0.2 and 0.1 cannot carry the id of a request")
    return bodies.named(headers)


def _request_arguments(
    client: Client, service: str, headers: dict[str, str], *, wait: bool, on: str | None, connection: dict[str, Any]
) -> dict[str, Any]:
    """Return the keywords for `request` and `stream`.

    Without `wait`, raises `BrokerUnreachable` if no broker is listening, and `ServiceNotFound` if no worker offers the
    service and the protocol (0.2 or 0.1) would not report that.
    """
    if not wait:
        check_listening(connection["broker"], connection["keys"])
    if connection["protocol"] == "X1":
        return {"wait": wait, "headers": headers, "options": addressed(on)}
    if on is not None:
        raise click.UsageError("--on requires protocol X1: MDP/0.2 and 0.1 cannot address a broker")
    if headers:
        raise click.UsageError("--header requires protocol X1: MDP/0.2 and 0.1 cannot carry headers")
    if not wait and not service.startswith("mmi.") and _is_missing(client, service, connection["timeout"]):
        raise ServiceNotFound(f"no worker offers {service!r}", service=service)
    return {}


for _command in (describe, stub, limit, health, tail, top, completion):
    cli.add_command(_command)


def main(name: str = "mdclient") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()

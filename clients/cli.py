"""The command `mdclient`."""

import base64
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from ..mdp import wire
from ..mdp.console import EXIT_FAILED, Endpoint, Number, run, version_option, with_default
from ..mdp.errors import (
    BrokerUnreachable,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    StreamInterrupted,
    ZmdpError,
)
from ..mdp.server import DEFAULT_ENDPOINT
from .mdclient import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Client, why_unreachable
from .session import Reply

CODES: Final[dict[type[ZmdpError], int]] = {
    BrokerUnreachable: 5,
    RequestTimeout: 3,
    StreamInterrupted: 3,
    ServiceNotFound: 4,
    ServiceError: 6,
}
"""Exit code by error; the first that fits counts."""


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
                help=with_default("Silence after which a request is sent again.", DEFAULT_TIMEOUT, "seconds"),
            ),
            click.option(
                "--retries",
                type=Number("retries", whole=True, zero=True),
                default=DEFAULT_RETRIES,
                help=with_default("How often a request is sent again.", DEFAULT_RETRIES, "times"),
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

    Replies go to stdout, everything else to stderr.

    \b
    Exit codes: 0 done; 1 another failure; 2 bad usage; 3 timeout; 4 no such service; 5 refused: no broker there;
    6 the service failed; 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


_SERVICE = click.argument("service")
_BODY = click.argument("body", nargs=-1)
_WAIT = click.option("--wait", is_flag=True, help="Wait for the service if nobody offers it yet, or for the broker.")
_BODY_HELP = (
    "Each BODY is a frame of the request: text; @FILE for a file's content; - for stdin; @@TEXT for text that begins "
    "with @. Without any, the request has one empty frame. Files and stdin are sent byte for byte."
)


@cli.command(epilog=_BODY_HELP)
@_SERVICE
@_BODY
@_options(json_lines='Print the reply as a JSON object; frames that are no text as {"base64": …}.')
@_WAIT
def call(
    *,
    service: str,
    body: tuple[str, ...],
    broker: tuple[str, ...],
    timeout: float,
    retries: int,
    as_json: bool,
    wait: bool,
) -> None:
    """Call SERVICE and print its reply.

    A reply of one frame is printed byte for byte (to a terminal, with a newline); several frames, one a line.
    """
    frames = _frames(body)
    with Client(broker, timeout=timeout, retries=retries) as client:
        if not wait:
            _check_offered(client, broker, service)
        reply = client.request(service, *frames)
    if as_json:
        _print_json(_described(reply))
    else:
        _write(b"\n".join(reply), newline=len(reply) > 1 or sys.stdout.isatty())


@cli.command(epilog=_BODY_HELP)
@_SERVICE
@_BODY
@_options(json_lines='Print each part as a JSON object on a line of its own; "final" tells the last.')
@_WAIT
def stream(
    *,
    service: str,
    body: tuple[str, ...],
    broker: tuple[str, ...],
    timeout: float,
    retries: int,
    as_json: bool,
    wait: bool,
) -> None:
    """Call SERVICE and print each part of its reply as it comes, the last being the FINAL.

    Frames are printed one a line.
    """
    frames = _frames(body)
    with Client(broker, timeout=timeout, retries=retries) as client:
        if not wait:
            _check_offered(client, broker, service)
        for part in client.stream(service, *frames):
            if as_json:
                _print_json(_described(part))
            else:
                _write(b"\n".join(part), newline=True)


@cli.command()
@_options(json_lines="Print a JSON list.")
def services(*, broker: tuple[str, ...], timeout: float, retries: int, as_json: bool) -> None:
    """List the services that have a worker or a waiting request."""
    with Client(broker, timeout=timeout, retries=retries) as client:
        _check_listening(broker)
        answer = _ask(client, "mmi.services")
    rows = answer["services"]
    if as_json:
        _print_json(rows)
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
def info(*, broker: tuple[str, ...], timeout: float, retries: int, as_json: bool) -> None:
    """Show the broker's version, settings and counts."""
    with Client(broker, timeout=timeout, retries=retries) as client:
        _check_listening(broker)
        answer = {"broker": _ask(client, "mmi.broker"), "stats": _ask(client, "mmi.stats")}
    if as_json:
        _print_json(answer)
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
def ping(*, count: int, interval: float, broker: tuple[str, ...], timeout: float, retries: int, as_json: bool) -> None:
    """Measure round trips to the broker (not to a worker)."""
    with Client(broker, timeout=timeout, retries=retries) as client:
        _check_listening(broker)
        trips = []
        for number in range(count):
            if number:
                time.sleep(interval)
            started = time.perf_counter()
            client.available("ping")
            trips.append((time.perf_counter() - started) * 1000)
            if as_json:
                _print_json({"broker": broker[0], "ms": round(trips[-1], 3)})
            else:
                click.echo(f"{broker[0]}: {trips[-1]:.2f} ms")
    if not as_json:
        least, mean, most = min(trips), sum(trips) / len(trips), max(trips)
        click.echo(f"{count} round trips: min {least:.2f}, mean {mean:.2f}, max {most:.2f} ms", err=True)


def _ask(client: Client, question: str) -> dict[str, Any]:
    """The JSON answer of the broker to an `mmi.*` question."""
    answer = b" ".join(client.request(question))
    with suppress(ValueError):
        value = json.loads(answer)
        if isinstance(value, dict):
            return value
    text = f"the broker does not know {question} (it answered {answer.decode(errors='replace')}): it is not zmdp's"
    raise ServiceNotFound(text, service=question)


def _check_listening(broker: Sequence[str]) -> None:
    """Tell at once that there is no broker, rather than after every retry."""
    reasons = [why_unreachable(endpoint) for endpoint in broker]
    if all(reasons):
        each = (f"{endpoint}: {reason}" for endpoint, reason in zip(broker, reasons, strict=True))
        raise BrokerUnreachable(f"cannot reach a broker at {'; '.join(each)}")


def _check_offered(client: Client, broker: Sequence[str], service: str) -> None:
    """Tell at once that nobody offers the service, rather than after every retry."""
    _check_listening(broker)
    if service.startswith("mmi.") or client.request("mmi.service", wire.service_name(service)) != [b"404"]:
        return
    raise ServiceNotFound(
        f"no worker offers {service!r} at {', '.join(broker)}: `mdclient services` lists what is there, "
        "--wait waits for it",
        service=service,
    )


def _frames(body: Sequence[str]) -> list[bytes]:
    frames = []
    for part in body:
        if part == "-":
            frames.append(sys.stdin.buffer.read())
        elif part.startswith("@@"):
            frames.append(os.fsencode(part[1:]))
        elif part.startswith("@"):
            try:
                frames.append(Path(part[1:]).read_bytes())
            except OSError as error:
                raise click.UsageError(f"cannot read {part[1:]}: {error.strerror}") from None
        else:
            # As the shell gave it, also where that is no UTF-8.
            frames.append(os.fsencode(part))
    return frames


def _described(reply: Reply) -> dict[str, Any]:
    return {"service": reply.service, "final": reply.final, "frames": [_text_or_base64(frame) for frame in reply]}


def _text_or_base64(frame: bytes) -> str | dict[str, str]:
    try:
        return frame.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(frame).decode()}


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))
    sys.stdout.flush()


def _write(data: bytes, *, newline: bool) -> None:
    sys.stdout.buffer.write(data + b"\n" if newline else data)
    sys.stdout.buffer.flush()


def _code(error: ZmdpError) -> int:
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), EXIT_FAILED)


def main() -> NoReturn:
    """Entry point of `mdclient`."""
    run(
        "mdclient",
        cli,
        lambda error: next((code for kind, code in CODES.items() if isinstance(error, kind)), EXIT_FAILED),
    )


if __name__ == "__main__":
    main()

"""The command `titanic`: what callers do.  What operators do is in `operators.py`, imported when it is asked for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NoReturn
from uuid import UUID

import click
from click.core import ParameterSource

from ...clients import Client, Reply, RequestTimeout, bodies
from ...mdp.cli.console import Endpoint, Number, run, version_option, with_default
from ...mdp.defaults import DEFAULT_ENDPOINT
from ...mdp.transport.reach import check_listening
from ..client import Titanic
from ..submission import MAX_PRIORITY, MAX_RETRIES
from .parameters import DURATION, DURATION_FROM_0, UUID_TYPE, Moment

DEFAULT_TIMEOUT: Final = 15.0
OPERATORS: Final = ("serve", "ls", "show", "retry", "cancel", "purge", "stats", "db")
Command = Callable[..., Any]


class _Commands(click.Group):
    """Imports SQLAlchemy only for those who need it: callers wait for nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [OPERATORS[0], *self.commands, *OPERATORS[1:]]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OPERATORS:
            found: click.Command = import_module(".operators", __package__).COMMANDS[cmd_name]
            return found
        return super().get_command(ctx, cmd_name)


def _broker_options(command: Command) -> Command:
    for option in reversed(
        [
            click.option(
                "--broker",
                type=Endpoint(),
                multiple=True,
                default=[DEFAULT_ENDPOINT],
                envvar="MDP_BROKER",
                show_envvar=True,
                help=with_default(
                    "Broker to ask. Can be repeated: if one is lost the next is tried.", DEFAULT_ENDPOINT
                ),
            ),
            click.option(
                "--timeout",
                type=DURATION,
                default=DEFAULT_TIMEOUT,
                help=with_default("How long Titanic has to answer.", DEFAULT_TIMEOUT, "seconds"),
            ),
        ]
    ):
        command = option(command)
    return command


@click.group(cls=_Commands, context_settings={"max_content_width": 110}, invoke_without_command=True)
@version_option()
@click.pass_context
def cli(context: click.Context) -> None:
    """Requests that outlive everyone: hand one over, get a number, come back for the reply.

    \b
    titanic serve                       keep requests and replies in ./titanic.db
    titanic request echo hello          hand a request over; prints its uuid
    titanic reply UUID --wait           the reply, once it is there
    titanic close UUID                  forget it
    titanic ls --state failed           what went wrong

    `request`, `reply` and `close` ask a broker, at which a Titanic serves; the others open the database itself.

    \b
    Exit codes: 0 done; 1 another failure; 2 bad usage; 3 the reply is not there yet, or no answer in time; 4 no such
    request, or no Titanic; 5 no broker there; 6 the request failed, or Titanic could not do it; 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# ── callers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@cli.command(epilog=bodies.BODY_HELP)
@click.argument("service")
@bodies.BODY
@click.option("--key", help="The same key and service give the first request's uuid again; nothing is done twice.")
@click.option("--key-ttl", type=DURATION, help=with_default("For how long.", "for ever"))
@click.option("--delay", type=DURATION_FROM_0, help="Not before so long from now.")
@click.option(
    "--at", type=Moment(), help="Not before this time: 2030-01-31T12:00, in this machine's zone if it has no offset."
)
@click.option(
    "--priority",
    type=click.IntRange(0, MAX_PRIORITY),
    default=0,
    metavar=f"0-{MAX_PRIORITY}",
    help=with_default(f"{MAX_PRIORITY} goes first; one after the other within one.", 0),
)
@click.option(
    "--retries",
    type=click.IntRange(0, MAX_RETRIES),
    default=0,
    metavar="N",
    help=with_default("How often it is tried again if the service's handler fails.", 0, "times"),
)
@click.option(
    "--backoff", type=DURATION, help=with_default("Pause before the first of these, then doubled.", 1, "second")
)
@click.option("--ttl", type=DURATION, help=with_default("For how long the reply is kept.", "until it is closed"))
@bodies.HEADER
@_broker_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def request(
    *,
    service: str,
    body: tuple[str, ...],
    headers: dict[str, str],
    broker: Sequence[str],
    timeout: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Hand over a request for SERVICE; prints its uuid.

    Then it is on the disk.  Nobody needs to offer the service yet.  Who knows the uuid can fetch the reply, and close
    it.
    """
    frames = bodies.frames(body)
    with _titanic(broker, timeout) as titanic:
        ticket = titanic.submit(service, *frames, headers=headers, **options)
    if as_json:
        bodies.print_json({"uuid": ticket.uuid, "service": service})
    else:
        click.echo(ticket.uuid)


@cli.command()
@click.argument("uuid", type=UUID_TYPE)
@click.option("--wait", is_flag=True, help="Wait until it is there, for as long as that takes, or --timeout.")
@click.option("--stream", is_flag=True, help="Print the PARTIALs as well, as they come; implies --wait.")
@click.option(
    "--from", "start", type=Number("parts", whole=True, zero=True), default=0,
    help=with_default("With --stream: the first PARTIAL that is wanted.", 0),
)  # fmt: skip
@_broker_options
@click.option(
    "--json", "as_json", is_flag=True, help='Print JSON, a line a part; frames that are no text as {"base64": …}.'
)
@click.pass_context
def reply(
    context: click.Context,
    *,
    uuid: UUID,
    wait: bool,
    stream: bool,
    start: int,
    broker: Sequence[str],
    timeout: float,
    as_json: bool,
) -> None:
    """Fetch the reply to the request UUID.  It stays there until it is closed.

    A reply of one frame is printed byte for byte (to a terminal, with a newline); several frames, one a line.  Exit
    code 3: it is not there yet.
    """
    given = context.get_parameter_source("timeout") is not ParameterSource.DEFAULT
    patience = timeout if given else None
    with _titanic(broker, timeout) as titanic:
        ticket = titanic.ticket(uuid)
        if stream:
            for part in ticket.partials(start, timeout=patience):
                _print_part(part, as_json=as_json, newline=True)
        try:
            result = ticket.result(patience if wait or stream else 0)
        except RequestTimeout as error:
            if wait or stream or error.code is not None:
                raise
            raise RequestTimeout(f"the reply to {uuid.hex} is not there yet: --wait waits for it") from None
    _print_part(result, as_json=as_json, newline=stream or len(result) > 1 or sys.stdout.isatty())


@cli.command()
@click.argument("uuids", type=UUID_TYPE, nargs=-1, required=True, metavar="UUID…")
@_broker_options
def close(*, uuids: Sequence[UUID], broker: Sequence[str], timeout: float) -> None:
    """Forget requests and their replies.

    What is running of them is cancelled.  It is no error if there are none any more.
    """
    with _titanic(broker, timeout) as titanic:
        for uuid in uuids:
            titanic.ticket(uuid).close()


@contextmanager
def _titanic(broker: Sequence[str], timeout: float) -> Iterator[Titanic]:
    check_listening(broker)
    with Client(broker, timeout=timeout, retries=0) as client:
        yield Titanic(client)


def _print_part(part: Reply, *, as_json: bool, newline: bool) -> None:
    if as_json:
        bodies.print_json({"final": part.final, "frames": [bodies.text_or_base64(frame) for frame in part]})
    else:
        bodies.write(b"\n".join(part), newline=newline)


def main() -> NoReturn:
    """Entry point of `titanic`."""
    run("titanic", cli)


if __name__ == "__main__":
    main()

"""The command `titanic`: submit requests and fetch replies."""

import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn
from uuid import UUID

import click
from click.core import ParameterSource

from ....clients import Client, Reply, RequestTimeout, ServiceError, ServiceNotFound
from ....clients.console import bodies
from ....clients.console.completion import services as complete_services
from ....mdp.cli.console import CONTEXT_SETTINGS, LazyGroup, Number, run, version_option
from ....mdp.errors import TitanicError
from ...api.client import Titanic
from ...api.submission import OPTIONS
from .parameter_types import DEFAULT_TIMEOUT, UUID_TYPE, client_options, declared_options

REGISTRATION_SECONDS: Final = 15.0
"""How long a Titanic that has just started, or is restarting, may take to register; `--timeout` may say less."""
HINT_SECONDS: Final = 1.0
"""When to tell that there is none yet."""
POLL_SECONDS: Final = 0.05
LAZY_COMMANDS: Final = {
    "backup": "zmdp.titanic.operator.command.copies:backup",
    "move": "zmdp.titanic.operator.command.copies:move",
    "schedule": "zmdp.titanic.operator.command.schedule:schedule",
    "serve": "zmdp.titanic.operator.command.serve:serve",
    **{
        name: f"zmdp.titanic.operator.command.operators:{name}"
        for name in ("ls", "show", "failures", "retry", "cancel", "purge", "export", "stats", "db")
    },
}
"""Commands that need what callers do not need: SQLAlchemy, cronsim."""


@click.group(cls=LazyGroup, commands_in=LAZY_COMMANDS, context_settings=CONTEXT_SETTINGS)
@version_option()
def cli() -> None:
    """Durable requests: submit one, get its UUID, fetch the reply at any time.

    \b
    titanic serve                       store requests and replies in ./titanic.db
    titanic request echo hello          submit a request; prints its UUID
    titanic reply UUID --wait           print the reply once it is there
    titanic close UUID                  delete the request and its reply
    titanic schedule add NAME SERVICE   submit a request again and again
    titanic ls --state failed           list failed requests
    titanic backup titanic-monday.db    copy the database, also while Titanic is running

    `request`, `reply`, `close` and `schedule` ask the Titanic that is registered at the broker. The other commands
    except `serve` open the database directly.

    \b
    Exit codes:
      0  success                     4  unknown request, or no Titanic
      1  other failure               5  no broker reachable
      2  invalid usage               6  the request, Titanic or its database failed
      3  no reply yet, or timeout  130  interrupted
    """


# ── callers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@cli.command(epilog=bodies.BODY_HELP)
@click.argument("service", shell_complete=complete_services)
@bodies.BODY
@declared_options(OPTIONS)
@bodies.HEADER
@client_options(DEFAULT_TIMEOUT)
@bodies.JSON
def request(
    *,
    service: str,
    body: tuple[str, ...],
    headers: dict[str, str],
    client: Client,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit a request for SERVICE and print its UUID.

    Once you have the UUID, the request is on disk: it survives any crash and will be executed as soon as a worker
    offers the service. Anyone who knows the UUID can fetch the reply and close the request, unless the broker has
    access control: then only the role that submitted it can, and admins.

    A BODY is stored as it is, since there may be no worker yet that tells its types: for a service that takes a text
    as JSON, write '"hello"', not hello.
    """
    frames = bodies.frames(body)
    ticket = _titanic(client).submit(service, *frames, headers=headers, **options)
    if as_json:
        bodies.print_json({"uuid": ticket.uuid, "service": service})
    else:
        click.echo(ticket.uuid)


@cli.command()
@click.argument("uuid", type=UUID_TYPE)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait for the reply, without limit unless --timeout is given, even while Titanic is restarted.",
)
@click.option("--stream", is_flag=True, help="Print the PARTIALs as they arrive, then the reply; implies --wait.")
@click.option(
    "--from", "start", type=Number("parts", whole=True, zero=True), default=0,
    help="With --stream: the first PARTIAL to print.",
)  # fmt: skip
@client_options(DEFAULT_TIMEOUT)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help='Print JSON, one part per line; a frame that is not text becomes {"base64": …}.',
)
@click.pass_context
def reply(
    context: click.Context,
    *,
    uuid: UUID,
    wait: bool,
    stream: bool,
    start: int,
    client: Client,
    as_json: bool,
) -> None:
    """Fetch the reply to the request UUID. Titanic keeps the reply until the request is closed.

    Frames are printed one per line; a single frame that is not text, such as an image, is printed byte for byte,
    without a newline. Exit code 3 means that there is no reply yet.
    """
    if start and not stream:
        raise click.UsageError("--from requires --stream", context)
    given = context.get_parameter_source("timeout") is not ParameterSource.DEFAULT
    limit = context.params["timeout"] if given else None
    ticket = _titanic(client).ticket(uuid)
    try:
        if stream:
            for part in ticket.partials(start, timeout=limit):
                _print_part(part, as_json=as_json, parts=True)
        result = ticket.result(limit if wait or stream else 0)
    except ServiceError as error:
        raise TitanicError(f"request {uuid.hex} has failed: {error}") from None
    except RequestTimeout as error:
        if wait or stream or error.code is not None:
            raise
        raise RequestTimeout(f"there is no reply to {uuid.hex} yet: use --wait to wait for it") from None
    _print_part(result, as_json=as_json, parts=stream)


@cli.command()
@click.argument("uuids", type=UUID_TYPE, nargs=-1, required=True, metavar="UUID…")
@client_options(DEFAULT_TIMEOUT)
def close(*, uuids: Sequence[UUID], client: Client) -> None:
    """Delete requests and their replies.

    Requests that are running are cancelled. Closing an unknown request is not an error.
    """
    titanic = _titanic(client)
    for uuid in uuids:
        titanic.ticket(uuid).close()


def _titanic(client: Client) -> Titanic:
    """Raise `ServiceNotFound` if there is no Titanic, for which a call would wait until its timeout."""
    hint_at = time.monotonic() + HINT_SECONDS
    until = time.monotonic() + min(REGISTRATION_SECONDS, click.get_current_context().params["timeout"])
    hinted = False
    while not client.available("titanic.request"):
        now = time.monotonic()
        if now >= until:
            raise ServiceNotFound(f"no Titanic is registered at {client.endpoint}: start one with `titanic serve`")
        if now >= hint_at and not hinted:
            hinted = True
            click.echo(f"titanic: no Titanic is registered at {client.endpoint} yet; waiting for one", err=True)
        time.sleep(POLL_SECONDS)
    return Titanic(client)


def _print_part(part: Reply, *, as_json: bool, parts: bool) -> None:
    if as_json:
        bodies.print_json({"final": part.final, "frames": [bodies.text_or_base64(frame) for frame in part]})
    else:
        bodies.print_frames(part, parts=parts)


def main(name: str = "titanic") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()

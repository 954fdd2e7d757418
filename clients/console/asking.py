"""What the subcommands of `mdclient` share: their options, the client, and questions to the broker."""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import click

from ...mdp.cli.console import Decorator, Number, brokers_option, key_options, options
from ...mdp.errors import (
    BrokerUnreachable,
    RequestRejected,
    RequestTimeout,
    ServiceNotFound,
    WorkerLost,
)
from ..calls.arguments import DEFAULT_RETRIES, DEFAULT_TIMEOUT
from ..mdclient import Client
from .completion import services

BROKER: Final = brokers_option(
    "Broker to connect to. Can be repeated, or separate endpoints with commas: if one is lost or drains, the next is "
    "used until the first is back."
)
ON: Final = click.option(
    "--on",
    metavar="NAME",
    help="Address the broker of that name, which `mdclient brokers` lists: only its workers get the request.",
)
SERVICE: Final = click.argument("service", shell_complete=services)
OF: Final = click.option("--on", metavar="NAME", help="Ask the broker of that name, which `mdclient brokers` lists.")


def connection_options(
    *, json_help: str, timeout: float = DEFAULT_TIMEOUT, retries: int = DEFAULT_RETRIES
) -> Decorator:
    """Add the options that all subcommands share, with these defaults."""
    return options(
        BROKER,
        key_options,
        click.option(
            "--timeout",
            type=Number("seconds"),
            default=timeout,
            help="How long each attempt may take; see --retries.",
        ),
        click.option(
            "--retries",
            type=Number("retries", whole=True, zero=True),
            default=retries,
            help=(
                "Attempts after the first. A command gives up after TIMEOUT × (1 + RETRIES) seconds. With X1 a "
                "request is resent only if the connection is lost; with 0.2 and 0.1, after each TIMEOUT."
            ),
        ),
        click.option(
            "--protocol",
            type=click.Choice(["X1", "0.2", "0.1"]),
            default="X1",
            envvar="MDP_PROTOCOL",
            show_envvar=True,
            help="Protocol to speak: 0.2 or 0.1 if the broker is not zmdp's.",
        ),
        click.option(
            "--envelope",
            is_flag=True,
            help="With 0.2: begin each message with an empty frame, as a ROUTER-DEALER proxy between client and "
            "broker requires. X1 and 0.1 always do.",
        ),
        click.option("--json", "as_json", is_flag=True, help=json_help),
    )


def ask(client: Client, question: str, on: str | None = None, body: bytes = b"") -> dict[str, Any]:
    """Return the JSON answer to an `mmi.*` question, of the client's broker or of the one of that name."""
    answer = b" ".join(client.request(question, body, options=addressed(on)))
    with suppress(ValueError):
        value = json.loads(answer)
        if isinstance(value, dict):
            return value
    text = answer.decode(errors="replace")
    raise ServiceNotFound(
        f"the broker at {client.endpoint} does not know {question} (it answered {text}): it is not zmdp's",
        service=question,
    )


def check_known(service: str, reply: Sequence[bytes]) -> None:
    """Raise `ServiceNotFound` or `RequestRejected` if a broker has not understood `mmi.*` (docs/reference/mmi.md)."""
    if service.startswith("mmi.") and list(reply) == [b"501"]:
        text = f"the broker does not know {service!r} (501): mmi.service, mmi.services, mmi.workers, mmi.stats, "
        text += "mmi.broker and others are its own, and no worker can offer a service mmi.*"
        raise ServiceNotFound(text, service=service, code=501)
    if service.startswith("mmi.") and list(reply) == [b"400"]:
        raise RequestRejected(f"the broker cannot read what {service!r} was asked (400)", service=service, code=400)


def addressed(on: str | None) -> dict[str, Any] | None:
    """Return the options of a request to the broker of that name; None is the client's own."""
    return None if on is None else {"broker": on}


def new_client(connection: dict[str, Any]) -> Client:
    """Return a client with these `connection_options`."""
    return Client(
        connection["broker"], timeout=connection["timeout"], retries=connection["retries"],
        protocol=connection["protocol"], envelope=connection["envelope"], key=connection["keys"],
    )  # fmt: skip


def total_timeout(connection: dict[str, Any]) -> float:
    """Return how many seconds all attempts together may take."""
    timeout: float = connection["timeout"] * (1 + connection["retries"])
    return timeout


@contextmanager
def advice(connection: dict[str, Any], service: str, *, wait: bool = True, on: str | None = None) -> Generator[None]:
    """Add a remedy to the error of a request to `service`."""
    try:
        yield
    except BrokerUnreachable:
        raise
    except ServiceNotFound:
        if service.startswith("mmi."):
            raise
        where = ", ".join(connection["broker"]) if on is None else f"broker {on}"
        raise ServiceNotFound(
            f"no worker offers {service!r} at {where}: `mdclient services` lists the services that exist, --wait waits "
            "for this one",
            service=service,
        ) from None
    except WorkerLost as error:
        if on is not None:
            text = "`mdclient brokers` lists the brokers that can be reached"
        elif error.reason == "workers-lost":
            text = "the logs of the service's workers say what they died of"
        elif error.reason == "last-worker-lost":
            text = "without --wait, a request does not wait for a worker to be started"
        else:
            raise
        raise WorkerLost(f"{error}; {text}", service=service, code=error.code, text=error.text) from None
    except RequestTimeout as error:
        timeout, retries = f"{connection['timeout']:g}", connection["retries"]
        limits = f"--timeout {timeout} × (1 + --retries {retries}) = {total_timeout(connection):g} s"
        raise RequestTimeout(f"{error}; the limit was {limits}", service=service) from None

"""`mdclient call --freelance`: its option, and the call to one of the servers."""

from collections.abc import Sequence
from typing import Any, Final

import click
from click.core import ParameterSource

from ...interop.freelance.client import FreelanceClient
from ...mdp.cli.console import EndpointList, all_values
from ...mdp.errors import BrokerUnreachable
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.reach import why_unreachable
from ..calls.reply import Reply

FREELANCE: Final = click.option(
    "--freelance",
    type=EndpointList(),
    multiple=True,
    callback=all_values,
    help="Call this server directly, without a broker (mdworker --freelance): there is no SERVICE then, and every "
    "argument is a BODY. Can be repeated, or separate endpoints with commas: if a server is lost or silent, the next "
    "is tried.",
)
_NOT_WITH_FREELANCE: Final = ("broker", "protocol", "envelope", "headers", "verbose")


def call_servers(
    endpoints: Sequence[str], frames: Sequence[bytes], *, timeout: float, keys: ClientKeys | None, wait: bool
) -> Reply:
    """Call one of the servers and return its reply.

    Raises as `FreelanceClient.request`; without `wait`, `BrokerUnreachable` immediately if no server is listening.
    """
    check_options()
    if not wait:
        _check_listening(endpoints, keys)
    with FreelanceClient(endpoints, timeout=timeout, key=keys) as client:
        return client.request(*frames)


def check_options() -> None:
    """Raise `click.UsageError` for options on the command line that have no meaning without a broker."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if name in _NOT_WITH_FREELANCE and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} has no meaning with --freelance, which uses no broker", context)


def _check_listening(endpoints: Sequence[str], keys: ClientKeys | None) -> None:
    reasons: dict[str, Any] = {}
    for endpoint in endpoints:
        reason = why_unreachable(endpoint, keys)
        if reason is None:
            return
        if reason.startswith(_NOTHING):
            reason = f"{_NOTHING}. `mdworker MODULE:NAME --freelance {endpoint}` starts a server"
        reasons[endpoint] = reason
    each = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in reasons.items())
    raise BrokerUnreachable(f"cannot reach a server at {each}")


_NOTHING: Final = "nothing is listening there"

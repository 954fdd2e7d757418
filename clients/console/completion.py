"""The subcommand `mdclient completion`, and the completion of the names of services, which a broker tells."""

import json
from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from ...mdp.cli.console import CONTEXT_SETTINGS
from ...mdp.errors import ZmdpError
from ...mdp.security.keys import load_keys
from ...mdp.transport.endpoints import split_brokers
from ..mdclient import Client

COMMANDS: Final = ("zmdp", "mdp-broker", "mdp-keys", "mdclient", "mdworker", "titanic", "mdp-gateway", "mdp-spark")
ANSWER_SECONDS: Final = 0.2
"""How long the broker may take: the user is waiting, and can also type the name."""


def services(context: click.Context, argument: click.Parameter, incomplete: str) -> "list[CompletionItem[str]]":
    """Return the services that begin with `incomplete`, or none if no broker answers in time."""
    del argument
    given = context.params
    try:
        brokers = split_brokers(given["broker"])
        keys = load_keys(given["key_file"], given["broker_key"], brokers)
        with Client(tuple(brokers), timeout=ANSWER_SECONDS, retries=0, key=keys) as client:
            found = json.loads(client.request("mmi.services")[0])["services"]
    except (ZmdpError, ValueError, TypeError, LookupError):  # no broker, or not ours
        return []
    return [CompletionItem(each["name"]) for each in found if each["name"].startswith(incomplete)]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete all commands of zmdp: options, subcommands, and the names of services.

    \b
    eval "$(mdclient completion bash)"     in ~/.bashrc
    eval "$(mdclient completion zsh)"      in ~/.zshrc, after compinit
    mdclient completion fish | source      in ~/.config/fish/config.fish

    Services are asked of the broker (--broker, MDP_BROKER), if it answers within 0.2 s.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this release of click cannot complete for {shell}")
    for name in COMMANDS:
        variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
        # The scripts run the commands, and say nothing of what these are.
        click.echo(kind(click.Command(name), {}, name, variable).source())

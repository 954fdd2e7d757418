"""The subcommand `mdclient completion`."""

from typing import Final

import click
from click.shell_completion import get_completion_class

from ...mdp.cli.console import CONTEXT_SETTINGS

COMMANDS: Final = ("zmdp", "mdp-broker", "mdp-keys", "mdclient", "mdworker", "titanic", "mdp-gateway", "mdp-spark")


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

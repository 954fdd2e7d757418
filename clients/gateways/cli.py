"""The command `mdp-gateway`."""

from importlib import import_module
from typing import Final

import click

from ...mdp.cli.console import CONTEXT_SETTINGS, run, version_option

COMMANDS: Final = {"http": "http.cli", "flux": "flux.cli", "token": "http.token_cli"}
"""The module of each command."""


class _Gateways(click.Group):
    """Imports a command, and with it what it depends on, only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        found: click.Command = import_module(f".{COMMANDS[cmd_name]}", __package__).cli
        return found


@click.group(cls=_Gateways, context_settings=CONTEXT_SETTINGS, invoke_without_command=True)
@version_option()
@click.pass_context
def cli(context: click.Context) -> None:
    """Let programs that do not speak ZeroMQ call services.

    \b
    mdp-gateway http                        HTTP at http://127.0.0.1:8080
    mdp-gateway token shop --access FILE    a token for HTTP
    mdp-gateway flux --socket /tmp/flux     Flux's own tools, with FLUX_URI=local:///tmp/flux
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the command."""
    run("mdp-gateway", cli)


if __name__ == "__main__":
    main()

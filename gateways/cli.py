"""The command `mdp-gateway`."""

from typing import Final, NoReturn

import click

from ..mdp.cli.console import CONTEXT_SETTINGS, LazyGroup, run, version_option

COMMANDS: Final = {
    "http": "zmdp.gateways.http.cli:cli",
    "mcp": "zmdp.gateways.mcp.cli:cli",
    "flux": "zmdp.interop.flux.cli:cli",
    "token": "zmdp.gateways.token_cli:cli",
}


@click.group(cls=LazyGroup, commands_in=COMMANDS, context_settings=CONTEXT_SETTINGS)
@version_option()
def cli() -> None:
    """Let programs that do not speak ZeroMQ call services.

    \b
    mdp-gateway http                        HTTP at http://127.0.0.1:8080
    mdp-gateway token shop --access FILE    a token for HTTP
    mdp-gateway mcp                         tools for agents, over stdio or HTTP
    mdp-gateway flux --socket /tmp/flux     Flux's own tools (FLUX_URI)
    """


def main(name: str = "mdp-gateway") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()

"""The command `mdp-spark`.  Each subcommand's module is imported only when it is used."""

from importlib import import_module
from typing import Final, NoReturn

import click

from ..mdp.cli.console import run, version_option

MODULES: Final = {
    "batch": "batch.commands",
    "fleet": "fleet.commands",
    "submit": "batch.client_commands",
    "status": "batch.client_commands",
    "fetch": "batch.client_results",
    "logs": "batch.client_results",
    "cancel": "batch.client_commands",
    "reload": "batch.client_commands",
    "drain": "batch.client_commands",
    "doctor": "fleet.commands",
}
"""The module of each subcommand; its `COMMANDS` maps names to commands."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return super().get_command(ctx, cmd_name)  # which suggests similar names
        found: click.Command = import_module(f".{MODULES[cmd_name]}", __package__).COMMANDS[cmd_name]
        return found


@click.group(cls=_Commands, context_settings={"max_content_width": 110}, invoke_without_command=True)
@version_option()
@click.pass_context
def cli(context: click.Context) -> None:
    """Run Spark jobs as services, and Spark executors as workers.

    \b
    mdp-spark doctor                            check that everything is installed and reachable
    mdp-spark batch --config catalogue.toml     offer spark.sql and spark.job
    mdp-spark submit sql "SELECT 1 AS one"      run a query, show its progress and print its result
    mdp-spark fleet yourmodule:handler --service NAME --max 4    serve NAME with executors
    mdp-spark status                            show the batches and fleets at the broker

    Needs `pip install 'zmdp[spark]'` and Java 17 or newer. The client commands (submit, status, fetch, logs, cancel,
    reload, drain) need neither.

    \b
    Exit codes:
      0  success                     5  no broker reachable
      1  other failure, or a failed  6  the job failed
         check of doctor             7  refused for now, retry later
      2  invalid usage             130  interrupted
      3  timeout
      4  not found
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """Run `mdp-spark`."""
    run("mdp-spark", cli)


if __name__ == "__main__":
    main()

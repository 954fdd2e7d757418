"""The command `mdp-spark`: its subcommands, each imported when it is asked for."""

from importlib import import_module
from typing import Final, NoReturn

import click

from ..mdp.cli.console import run, version_option

MODULES: Final = {
    "batch": "batch.commands",
    "fleet": "fleet.commands",
    "submit": "batch.callers",
    "status": "batch.callers",
    "cancel": "batch.callers",
    "drain": "batch.callers",
    "pack": "fleet.commands",
    "doctor": "fleet.commands",
}
"""For each subcommand the module that has it, in its `COMMANDS`."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return super().get_command(ctx, cmd_name)  # which says what is near
        found: click.Command = import_module(f".{MODULES[cmd_name]}", __package__).COMMANDS[cmd_name]
        return found


@click.group(cls=_Commands, context_settings={"max_content_width": 110}, invoke_without_command=True)
@version_option()
@click.pass_context
def cli(context: click.Context) -> None:
    """Spark behind services: its jobs can be called, its executors are workers.

    \b
    mdp-spark doctor                            is everything there?
    mdp-spark batch --config catalogue.toml     offer spark.sql and spark.job
    mdp-spark submit sql "SELECT 1 AS one"      run a query; shows progress, prints the result
    mdp-spark fleet yourmodule:handler --service NAME --max 4    executors serve NAME
    mdp-spark status                            the batches and fleets at the broker

    Needs `pip install 'zmdp[spark]'` and Java 17, except for what only asks the broker (submit, status, cancel, drain).

    \b
    Exit codes: 0 done; 1 another failure, or a check of doctor's; 2 bad usage; 3 timeout; 4 not there; 5 no broker;
    6 the job failed; 7 refused for now, retry later; 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """Entry point of `mdp-spark`."""
    run("mdp-spark", cli)


if __name__ == "__main__":
    main()

"""Write docs/commands.md from the commands' own --help.  `python docs/generate.py`; a test compares."""

from pathlib import Path

import click

from zmdp.clients.cli import cli as mdclient
from zmdp.mdp.cli.broker import cli as mdp_broker
from zmdp.spark.cli import cli as mdp_spark
from zmdp.titanic.cli.main import cli as titanic
from zmdp.workers.cli import cli as mdworker

WIDTH = 100


def reference() -> str:
    """The whole page."""
    parts = ["# Commands\n\nMade from each command's `--help` by `docs/generate.py`.\n"]
    for name, command in (
        ("mdp-broker", mdp_broker),
        ("mdclient", mdclient),
        ("mdworker", mdworker),
        ("titanic", titanic),
        ("mdp-spark", mdp_spark),
    ):
        parts += sections(command, click.Context(command, info_name=name, **command.context_settings), 2)
    return "\n".join(parts)


def sections(command: click.Command, context: click.Context, level: int) -> list[str]:
    """A command's help, then its subcommands'."""
    context.terminal_width = WIDTH
    parts = [f"{'#' * level} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            parts += sections(child, click.Context(child, info_name=name, parent=context), level + 1)
    return parts


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(reference())

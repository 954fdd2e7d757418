"""The command `zmdp` itself: its help and completion, which import no command that they only name."""

from pkgutil import resolve_name
from typing import Final, NoReturn

import click

from .entry_points import PROGRAMS, SHORTCUTS

HELP: Final = {
    "For development": {
        "dev": "Run broker, worker, Titanic and gateway in one terminal.",
        "call": "Call a service.",
        "stream": "Call a service and print each part of its reply.",
        "services": "List the services.",
        "describe": "Show the types of a service.",
        "top": "Show what the broker does, again and again.",
    },
    "The programs": {
        "broker": "Run a broker (mdp-broker).",
        "worker": "Serve your functions (mdworker).",
        "titanic": "Keep requests until they are done (titanic).",
        "gateway": "Let programs call services with HTTP (mdp-gateway).",
        "spark": "Run Spark jobs as services, and executors as workers (mdp-spark).",
    },
    "Tools": {
        "client": "Everything that callers can do (mdclient).",
        "keys": "Make keys, and say what each may do (mdp-keys).",
        "completion": "Print what makes a shell complete these commands.",
    },
}
"""What the help says of each command, under its heading."""


class _Commands(click.Group):
    """The commands, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        del ctx
        return [name for names in HELP.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command.  Return None if there is none of that name."""
        if cmd_name in PROGRAMS:
            command: click.Command = resolve_name(f"{PROGRAMS[cmd_name]}:cli")
            return command
        if cmd_name in SHORTCUTS:
            client: click.Group = resolve_name(f"{PROGRAMS['client']}:cli")
            return client.get_command(ctx, cmd_name)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their headings, without importing any."""
        del ctx
        for heading, commands in HELP.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        resolve_name("zmdp.mdp.cli.console:show_version")(context)


@click.group(cls=_Commands, context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and which modules are compiled, and exit.",
)
def cli() -> None:
    """Offer Python functions as services, and call them.

    \b
    zmdp dev words:services                  serve what words.py declares, with everything around it
    zmdp call words.count '"hello world"'    call it from another terminal

    `zmdp COMMAND --help` says what a command does.
    """


def main(name: str = "zmdp") -> NoReturn:
    """Show the help, complete a command line, or say what is wrong with it."""
    cli.main(prog_name=name)

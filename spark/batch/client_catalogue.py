"""The client command `mdp-spark jobs`: the Python jobs that batches offer to the caller's role.

It only talks to the broker and needs neither PySpark nor Java.
"""

from textwrap import indent

import click

from ...clients import Client
from ...clients.console import bodies
from ...titanic.operator.command.parameter_types import client_options
from .. import control


@click.command()
@client_options(5)
@bodies.JSON
def jobs(*, client: Client, as_json: bool) -> int:
    """List the Python jobs that you may run, with their parameters and docstrings."""
    catalogues = list(control.ask_all(client, "catalogue"))
    if not catalogues:
        click.echo("no batch at the broker; start one with `mdp-spark batch`", err=True)
    found = [{"batch": batch, **job} for batch, answer in catalogues for job in answer["jobs"]]
    if as_json:
        bodies.print_json(found)
        return 0
    for job in found:
        _echo(f"{job['name']}({job['parameters']})")
        _echo(indent(job["description"], "    "))
    return 0


def _echo(text: str) -> None:
    """Print lines as they are, except for control characters."""
    for line in text.splitlines():
        click.echo("".join(each if each.isprintable() else "?" for each in line.expandtabs()))

"""The command `zmdp dev`."""

import asyncio
import fcntl
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import click

from ..mdp.cli.console import CONTEXT_SETTINGS, run
from ..mdp.errors import SettingError
from ..mdp.limits import DEFAULT_ENDPOINT
from ..mdp.transport.endpoints import BROKER_VARIABLE
from . import runner
from .programs import BROKER_PORT, FOLDER, Choice, Plan, plan, procfile

LOCK: Final = "dev.lock"


@click.command(context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.argument("targets", metavar="MODULE:NAME...", nargs=-1, required=True)
@click.option("--no-broker", is_flag=True, help=f"Use the broker at {BROKER_VARIABLE}, or at {DEFAULT_ENDPOINT}.")
@click.option("--no-titanic", is_flag=True, help="Keep no requests.")
@click.option("--no-gateway", is_flag=True, help="Offer no HTTP.")
@click.option("--no-dashboard", is_flag=True, help="Show no dashboard.")
@click.option("--print", "show", is_flag=True, help="Print the commands that would run, with their environment.")
@click.option("--procfile", "show_procfile", is_flag=True, help="Print them as a Procfile, for honcho or foreman.")
def cli(
    *,
    targets: tuple[str, ...],
    no_broker: bool,
    no_titanic: bool,
    no_gateway: bool,
    no_dashboard: bool,
    show: bool,
    show_procfile: bool,
) -> int:
    """Serve MODULE:NAME, as `mdworker` does, with everything around it: a broker, Titanic, the HTTP gateway and the
    dashboard.

    They are the programs that production runs, each a process, which restarts if it crashes.  The worker restarts with
    your new code whenever it changes.  Their addresses are printed to stdout, what they log goes to stderr, each line
    behind the name of its program.  Titanic keeps its requests in .zmdp/titanic.db, and follows the schedules that your
    services declare.  Where a port is not free, the next one is used.

    Ctrl-C or SIGTERM ends them all once the requests in progress are finished; a second one kills them.

    \b
    zmdp dev words:services
    zmdp call words.count '"hello world"'    in another terminal

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  stopped before that
      2  invalid usage, or it runs in this folder already
      other codes are those of a program that could not start
    """
    choice = Choice(
        targets, broker=not no_broker, titanic=not no_titanic, gateway=not no_gateway, dashboard=not no_dashboard
    )
    if show or show_procfile:
        programs = plan(choice).programs
        click.echo(procfile(programs) if show_procfile else "\n".join(each.shown for each in programs))
        return 0
    with _locked(FOLDER) as lock:
        made = plan(choice)
        os.write(lock, f"process {os.getpid()}, broker {made.endpoint or 'elsewhere'}".encode())
        for name, address in made.addresses.items():
            click.echo(f"{name:10} {address}")
        sys.stdout.flush()
        log = runner.Log([each.name for each in made.programs], sys.stderr)
        for text in made.missing:
            log.say(runner.SELF, text)
        return asyncio.run(runner.run(made.programs, log, _hint(made)))


def _hint(made: Plan) -> str:
    """Return how to call a service from another terminal."""
    elsewhere = made.endpoint not in {None, DEFAULT_ENDPOINT}
    first = f"port {BROKER_PORT} is not free, so callers need `export {BROKER_VARIABLE}={made.endpoint}`; "
    return f"{first if elsewhere else ''}call a service: zmdp call NAME VALUE"


@contextmanager
def _locked(folder: Path) -> Generator[int]:
    """Hold the folder of this project, which is made if need be, and yield the descriptor of the file that tells by
    whom.  Raises `SettingError` if another process holds it."""
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(descriptor, 1000).decode(errors="replace") or "it has just started"
            raise SettingError(
                f"it runs in {Path.cwd()} already ({who}): stop that one with Ctrl-C, or use another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def main(name: str = "zmdp dev") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)

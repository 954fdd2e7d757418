"""The subcommands of `mdp-spark` that are about executors: fleet, pack, doctor."""

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from ...clients import bodies
from ...mdp.cli.console import EXIT_FAILED, Endpoint, Number, log_level_option, log_to_stderr, printable, with_default
from ...mdp.defaults import DEFAULT_ENDPOINT
from ...titanic.cli.parameters import DURATION
from ..batch.commands import quiet_py4j
from ..control import default_name
from .doctor import Doctor
from .driver import DEFAULT_IDLE, DEFAULT_LEASE, Fleet, Settings
from .ship import ENVIRONMENT, EXECUTOR_PYTHON, LAUNCHER, PACKAGE, UNPACKED, Cluster, pack

Command = Callable[..., Any]

log = logging.getLogger("zmdp.spark")


def _conf(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    del context, option
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (equals and name.startswith("spark.")):
            raise click.BadParameter(f"{value!r}: it takes a setting of Spark's, spark.NAME=VALUE")
        found[name] = text
    return found


def _cluster_options(command: Command) -> Command:
    """Where the executors are, and what they get."""
    for option in reversed(
        [
            click.option(
                "--broker",
                type=Endpoint(),
                default=DEFAULT_ENDPOINT,
                envvar="MDP_BROKER",
                show_envvar=True,
                help=with_default("Broker to serve.", DEFAULT_ENDPOINT),
            ),
            click.option(
                "--broker-from-executors",
                type=Endpoint(),
                help=with_default("The broker's address for executors, if they reach it at another.", "--broker"),
            ),
            click.option(
                "--master",
                metavar="URL",
                help=with_default(
                    "Spark cluster: local[N], spark://HOST:PORT, yarn, k8s://…", "spark-submit's, else local[*]"
                ),
            ),
            click.option(
                "--conf",
                multiple=True,
                metavar="NAME=VALUE",
                callback=_conf,
                help="Setting of Spark's. Can be repeated.",
            ),
            click.option(
                "--py-files",
                multiple=True,
                metavar="FILE",
                help="Module or zip that executors import from. Can be repeated. zmdp itself goes by itself.",
            ),
            click.option(
                "--archive",
                metavar="FILE",
                help=f"Environment whose Python executors run: {ENVIRONMENT} of `mdp-spark pack`.",
            ),
            click.option(
                "--dynamic",
                is_flag=True,
                help="Have Spark start executors of one core when they are needed, and end them.",
            ),
            click.option(
                "--reserve",
                type=Number("cores", whole=True, zero=True),
                default=1,
                help=with_default("Cores that slots never take, so that other jobs of the application start.", 1),
            ),
        ]
    ):
        command = option(command)
    return command


def _cluster(given: dict[str, Any]) -> Cluster:
    return Cluster(
        master=given.pop("master"), conf=given.pop("conf"), py_files=given.pop("py_files"),
        archive=given.pop("archive"), dynamic=given.pop("dynamic"),
    )  # fmt: skip


# ── fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("handler", metavar="MODULE:FUNCTION")
@click.option("--service", metavar="NAME", required=True, help="Service to offer.")
@_cluster_options
@click.option("--name", help=with_default("Name of this fleet, for `mdp-spark status` and `drain`.", "fleet-HOST-PID"))
@click.option(
    "--min",
    "minimum",
    type=Number("slots", whole=True, zero=True),
    default=1,
    help=with_default("Slots (cores that serve) that there always are.", 1),
)
@click.option(
    "--max",
    "maximum",
    type=Number("slots", whole=True),
    help=with_default("Slots that there are when requests wait.", "all cores but --reserve"),
)
@click.option(
    "--lease",
    type=DURATION,
    default=DEFAULT_LEASE,
    help=with_default("How long a slot serves in one Spark job.", DEFAULT_LEASE, "seconds"),
)
@click.option(
    "--idle",
    type=DURATION,
    default=DEFAULT_IDLE,
    help=with_default("Slots that were not needed for so long are given back.", DEFAULT_IDLE, "seconds"),
)
@click.option(
    "--codec",
    type=click.Choice(["json", "msgpack", "arrow"]),
    help="What the function's argument and results are; without, frames of bytes.",
)
@click.option(
    "--handler-timeout",
    type=Number("seconds"),
    help=with_default("Give up a request whose handler has neither returned nor yielded for this long.", "never"),
)
@click.option(
    "--heartbeat",
    type=Number("seconds"),
    default=1.0,
    envvar="MDP_HEARTBEAT",
    show_envvar=True,
    help=with_default("Interval of heartbeats.", 1.0, "seconds"),
)
@click.option(
    "--liveness",
    type=Number("intervals", whole=True),
    default=5,
    envvar="MDP_LIVENESS",
    show_envvar=True,
    help=with_default("Silent intervals after which the broker is taken for dead.", 5, "intervals"),
)
@log_level_option
def fleet(*, handler: str, name: str | None, log_level: str, broker_from_executors: str | None, **given: Any) -> int:
    """Have the executors of a Spark cluster serve requests with MODULE:FUNCTION, as `mdworker` does on one machine.

    There are between --min and --max slots, as the broker's queue needs them; one that dies is started again.
    Executors need Python and pyzmq: `mdp-spark doctor` looks whether they have them, `mdp-spark pack` brings them.
    With local masters the function's module is found in the current directory too.

    SIGTERM, Ctrl-C or `mdp-spark drain NAME` finishes what is being worked on and ends; a second signal ends at once.

    \b
    Try it: mdp-spark fleet zmdp.workers.echo:echo --service echo --master 'local[2]'
    Exit codes: 0 ended as asked; 1 Spark cannot be reached, or a second signal; 2 bad usage.
    """
    log_to_stderr(log_level)
    quiet_py4j()
    cluster = _cluster(given)
    settings = Settings(
        handler, name=name or default_name("fleet"), executors_broker=broker_from_executors,
        log_level=log_level.upper(), **given,
    )  # fmt: skip
    running = Fleet(settings, cluster)

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        if running.ending:
            os._exit(1)
        running.drain()
        with suppress(RuntimeError):  # the signal may have come while this thread was writing to stderr
            log.info("ending: what is being worked on is finished first; once more ends at once")

    def ready() -> None:
        log.info(
            "fleet %s serves %s at %s with %s; Ctrl-C ends",
            settings.name, settings.service, settings.broker, running.status()["master"],
        )  # fmt: skip

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)
    log.info("starting Spark on %s", cluster.master or "local[*]")
    running.run(ready)
    return 0


# ── pack ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command("pack")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--requirement",
    "requirements",
    multiple=True,
    metavar="PACKAGE",
    help="Package for the environment, as for pip: NAME, NAME==VERSION, a wheel's path, '-r FILE'. Can be repeated.",
)
@click.option("--no-environment", is_flag=True, help=f"Only {PACKAGE} and {LAUNCHER}.")
def pack_command(*, folder: Path, requirements: tuple[str, ...], no_environment: bool) -> None:
    """Write what executors need into FOLDER, and say how it is used.

    \b
    zmdp.zip             zmdp itself, for --py-files
    environment.tar.gz   a virtual environment with pyzmq and what --requirement names, for --archive
    main.py              a program for spark-submit

    The environment runs where the Python that made it is at the same path as here.
    """
    if no_environment and requirements:
        raise click.UsageError("--requirement is for the environment: leave out --no-environment")
    made = pack(folder, requirements=requirements, environment=not no_environment)
    for each in made:
        click.echo(f"{each}  {each.stat().st_size / 1e6:.1f} MB")
    zipped, launcher = made[0], made[1]
    fleet_command = "fleet MODULE:FUNCTION --service NAME --broker tcp://HOST:PORT"
    environment, submitted = "", ""
    if not no_environment:
        environment = f" --archive {made[2]}"
        submitted = f" --archives {made[2]}#{UNPACKED} --conf spark.pyspark.python={EXECUTOR_PYTHON}"
        submitted += " --conf spark.pyspark.driver.python=python3"
    click.echo(f"\nFrom here:\n  mdp-spark {fleet_command} --master spark://HOST:PORT{environment}")
    click.echo(f"With spark-submit:\n  spark-submit --py-files {zipped}{submitted} {launcher} {fleet_command}")


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@_cluster_options
@click.option(
    "--min",
    "minimum",
    type=Number("slots", whole=True, zero=True),
    default=1,
    help=with_default("Slots that there must be cores for.", 1),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line a check.")
def doctor(
    *, broker: str, broker_from_executors: str | None, reserve: int, minimum: int, as_json: bool, **given: Any
) -> int:
    """Look whether there is all that Spark's side needs, and say what to do where it is not.

    Java, Python and the libraries; the broker; a session on --master; what its executors have, and whether they reach
    the broker; cores for slots.  Give it the options that you give to `mdp-spark fleet`.

    Exit codes: 0 all is well; 1 something is not.
    """
    log_to_stderr("error")
    quiet_py4j()
    well = True
    for check in Doctor(_cluster(given), broker, broker_from_executors, reserve, minimum).checks():
        well = well and check.state == "ok"
        if as_json:
            bodies.print_json(asdict(check))
            continue
        click.echo(f"{check.state:<8} {check.name}: {printable(check.found)}")
        if check.advice:
            click.echo(f"         → {printable(check.advice)}")
    return 0 if well else EXIT_FAILED


COMMANDS: Final[dict[str, click.Command]] = {"fleet": fleet, "pack": pack_command, "doctor": doctor}
"""The subcommands of this module."""

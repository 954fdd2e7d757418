"""The commands `mdp-spark fleet`, `pack` and `doctor`."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from ...clients import bodies
from ...mdp.cli.console import (
    EXIT_FAILED,
    Endpoints,
    Number,
    all_endpoints,
    handler_timeout_option,
    heartbeat_options,
    key_options,
    log_format,
    log_level_option,
    log_to_stderr,
    printable,
    with_default,
)
from ...mdp.keys import ClientKeys
from ...titanic.cli.parameters import DURATION
from ..control import default_driver_name
from ..parameters import BROKER, CONF, MASTER, PY_FILES, name_option
from ..session import silence_py4j
from .doctor import Doctor
from .driver import DEFAULT_IDLE_SECONDS, DEFAULT_LEASE_SECONDS, Fleet, FleetSettings
from .packaging import ENVIRONMENT, ENVIRONMENT_FOLDER, EXECUTOR_PYTHON, LAUNCHER, PACKAGE, Cluster, pack

Command = Callable[..., Any]

log = logging.getLogger("zmdp.spark")


def _cluster_options(command: Command) -> Command:
    """Add the options for the cluster to use and what to ship to its executors."""
    for option in reversed(
        [
            BROKER,
            key_options,
            click.option(
                "--broker-from-executors",
                type=Endpoints(),
                multiple=True,
                callback=all_endpoints,
                help=with_default("Broker address that executors use, if it differs. Can be repeated.", "--broker"),
            ),
            MASTER,
            CONF,
            PY_FILES,
            click.option(
                "--archive",
                metavar="FILE",
                help=f"Python environment for executors: {ENVIRONMENT} made by `mdp-spark pack`.",
            ),
            click.option(
                "--dynamic",
                is_flag=True,
                help="Let Spark start and stop executors of one core as needed (dynamic allocation).",
            ),
            click.option(
                "--reserve",
                type=Number("cores", whole=True, zero=True),
                default=1,
                help=with_default("Cores to leave free for other jobs of the application.", 1),
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
@name_option("fleet")
@click.option(
    "--min",
    "minimum",
    type=Number("slots", whole=True, zero=True),
    default=1,
    help=with_default("Minimum number of slots (cores that serve).", 1),
)
@click.option(
    "--max",
    "maximum",
    type=Number("slots", whole=True),
    help=with_default("Maximum number of slots.", "all cores but --reserve"),
)
@click.option(
    "--lease",
    type=DURATION,
    default=DEFAULT_LEASE_SECONDS,
    help=with_default("How long a slot serves in one Spark job.", DEFAULT_LEASE_SECONDS, "seconds"),
)
@click.option(
    "--idle",
    type=DURATION,
    default=DEFAULT_IDLE_SECONDS,
    help=with_default("How long a slot must be unneeded before it is released.", DEFAULT_IDLE_SECONDS, "seconds"),
)
@click.option(
    "--codec",
    type=click.Choice(["json", "msgpack", "arrow"]),
    help="Encoding of requests and replies. Without it, handlers get and return frames of bytes.",
)
@handler_timeout_option
@heartbeat_options()
@log_level_option
def fleet(*, handler: str, name: str | None, log_level: str, broker_from_executors: Sequence[str], **given: Any) -> int:
    """Serve requests with MODULE:FUNCTION on the executors of a Spark cluster, as `mdworker` does on one machine.

    The number of slots follows the broker's queue, between --min and --max; a slot that dies is restarted.
    Executors need Python and pyzmq: `mdp-spark doctor` checks for them, `mdp-spark pack` ships them. zmdp itself is
    always shipped. With a local master, modules are also imported from the current directory.

    SIGTERM, Ctrl-C or `mdp-spark drain NAME` finishes running requests and exits; a second signal exits immediately.

    \b
    Try it: mdp-spark fleet zmdp.workers.echo:echo --service echo --master 'local[2]'

    \b
    Exit codes:
      0  stopped
      1  Spark cannot be reached, or stopped by a second signal
      2  invalid usage
    """
    log_to_stderr(log_level)
    silence_py4j()
    cluster = _cluster(given)
    settings = FleetSettings(
        handler, name=name or default_driver_name("fleet"), executors_broker=broker_from_executors,
        log_level=log_level.upper(), log_format=log_format(), **given,
    )  # fmt: skip
    running = Fleet(settings, cluster)

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        if running.ending:
            os._exit(1)
        running.drain()
        with suppress(RuntimeError):  # the signal may have interrupted a write to stderr
            log.info("finishing running requests; interrupt again to exit immediately")

    def ready() -> None:
        log.info(
            "fleet %s serves %s at %s with %s; Ctrl-C stops it",
            settings.name, settings.service, " or ".join(settings.brokers), running.status()["master"],
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
    help="Package to install in the environment, as for pip: NAME, NAME==VERSION, a wheel, '-r FILE'. Can be repeated.",
)
@click.option("--no-environment", is_flag=True, help=f"Write only {PACKAGE} and {LAUNCHER}.")
def pack_command(*, folder: Path, requirements: tuple[str, ...], no_environment: bool) -> None:
    """Write what executors need into FOLDER and print the commands that use it.

    \b
    zmdp.zip             zmdp itself, for --py-files
    environment.tar.gz   a virtual environment with pyzmq and each --requirement, for --archive
    main.py              a program for spark-submit

    The environment needs the Python that created it at the same path on every machine.
    """
    if no_environment and requirements:
        raise click.UsageError(
            "--requirement cannot be combined with --no-environment: packages are installed in the environment"
        )
    made = pack(folder, requirements=requirements, environment=not no_environment)
    for each in made:
        click.echo(f"{each}  {each.stat().st_size / 1e6:.1f} MB")
    zipped, launcher = made[0], made[1]
    fleet_command = "fleet MODULE:FUNCTION --service NAME --broker tcp://HOST:PORT"
    environment, submitted = "", ""
    if not no_environment:
        environment = f" --archive {made[2]}"
        submitted = f" --archives {made[2]}#{ENVIRONMENT_FOLDER} --conf spark.pyspark.python={EXECUTOR_PYTHON}"
        submitted += " --conf spark.pyspark.driver.python=python3"
    click.echo(f"\nTo start a fleet from here:\n  mdp-spark {fleet_command} --master spark://HOST:PORT{environment}")
    click.echo(f"With spark-submit:\n  spark-submit --py-files {zipped}{submitted} {launcher} {fleet_command}")


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@_cluster_options
@click.option(
    "--min",
    "minimum",
    type=Number("slots", whole=True, zero=True),
    default=1,
    help=with_default("Number of slots that the cluster must have room for.", 1),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per check.")
def doctor(
    *,
    broker: Sequence[str],
    broker_from_executors: Sequence[str],
    keys: ClientKeys | None,
    reserve: int,
    minimum: int,
    as_json: bool,
    **given: Any,
) -> int:
    """Check everything that Spark services need, and explain how to fix what is missing.

    Checks Java, Python and libraries; the broker; a session on --master; Python and libraries on its executors, and
    whether they reach the broker; cores for slots. Pass the same options as to `mdp-spark fleet`.

    Exit codes: 0 all checks passed; 1 a check failed; 2 invalid usage.
    """
    log_to_stderr("error")
    silence_py4j()
    well = True
    for check in Doctor(_cluster(given), broker, broker_from_executors, reserve, minimum, keys).checks():
        well = well and check.state == "ok"
        if as_json:
            bodies.print_json(asdict(check))
            continue
        click.echo(f"{check.state:<8} {check.name}: {printable(check.found)}")
        if check.advice:
            click.echo(f"         → {printable(check.advice)}")
    return 0 if well else EXIT_FAILED


COMMANDS: Final[dict[str, click.Command]] = {"fleet": fleet, "pack": pack_command, "doctor": doctor}

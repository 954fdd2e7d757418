"""`mdp-spark batch`: the driver whose jobs are services."""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from ...mdp.cli.console import Endpoint, Number, log_level_option, log_to_stderr, with_default
from ...mdp.defaults import DEFAULT_ENDPOINT
from ...mdp.transport.reach import why_unreachable
from ...titanic.cli.parameters import DURATION
from .. import control
from ..session import SparkError, check_installed, connect_session, is_elsewhere, open_session, settled_master
from .catalogue import Catalogue, read
from .jobs import load_jobs
from .results import DEFAULT_INLINE, LARGEST_INLINE, Results

BACKOFF: Final = (1.0, 60.0)
"""Seconds before a session that could not be made is tried again; doubled each time."""
LOOK: Final = 0.2
"""Seconds between two looks at whether it was asked to end."""
SWEEP: Final = 600.0
"""Seconds between two looks for old results."""
MOST_COLLECTED: Final = "128m"
"""What all tasks of a job may send to the driver: larger results are written where they are made."""
log = logging.getLogger("zmdp.spark")

BROKER = click.option(
    "--broker",
    type=Endpoint(),
    default=DEFAULT_ENDPOINT,
    envvar="MDP_BROKER",
    show_envvar=True,
    help=with_default("Broker to use.", DEFAULT_ENDPOINT),
)
PREFIX = click.option(
    "--prefix",
    default="spark",
    help=with_default("First part of the services' names, PREFIX.sql and PREFIX.job.", "spark"),
)


def pairs(values: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE options as a dictionary.  Raises `click.BadParameter`."""
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{value!r}: it takes NAME=VALUE")
        found[name] = text
    return found


def quiet_py4j() -> None:
    """Leave out what py4j says of its connections, partly in the root logger's name: what they end with is raised."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "py4j" not in record.pathname)


# ── batch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@BROKER
@click.option("--name", help=with_default("This driver's name, by which status and drain know it.", "batch-HOST-PID"))
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path),
    help="The catalogue, TOML: [tables.NAME] with format, path, schema, options; [jobs] with NAME = 'MODULE:FUNCTION'.",
)  # fmt: skip
@click.option(
    "--job", "jobs", multiple=True, metavar="NAME=MODULE:FUNCTION",
    help="A Python job that may be called. Can be repeated; installed packages offer theirs by entry points.",
)  # fmt: skip
@click.option("--master", help=with_default("Spark master: local[4], spark://HOST:7077, yarn, k8s://….", "local[*]"))
@click.option("--connect", metavar="sc://HOST:PORT", help="Use this Spark Connect server, not a driver of its own.")
@click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A Spark setting. Can be repeated.")
@click.option(
    "--py-files", multiple=True, metavar="FILE", callback=lambda context, option, values: _no_wheels(values),
    help="Python file or zip for the executors. Can be repeated.",
)  # fmt: skip
@click.option(
    "--concurrency", type=Number("requests", whole=True), default=4,
    help=with_default("Requests of each of the two services at a time; they share the cluster fairly.", 4),
)  # fmt: skip
@click.option(
    "--inline", type=Number("bytes", whole=True), default=DEFAULT_INLINE,
    help=with_default("Results up to this size are sent; larger ones become Parquet files.", DEFAULT_INLINE, "bytes"),
)  # fmt: skip
@click.option(
    "--results", metavar="FOLDER",
    help=with_default("Where those go: a folder that all executors share, or a URL.", "./spark-results on local"),
)  # fmt: skip
@click.option(
    "--keep-results", type=DURATION, default="7d",
    help=with_default("For how long, if the folder is on this machine.", "7d"),
)  # fmt: skip
@click.option(
    "--heartbeat", type=Number("seconds"), default=1.0, help=with_default("Interval of heartbeats.", 1, "second")
)
@click.option(
    "--liveness", type=Number("intervals", whole=True), default=5,
    help=with_default("Silent intervals after which the broker is taken for dead.", 5, "intervals"),
)  # fmt: skip
@PREFIX
@log_level_option
def batch(
    *,
    broker: str,
    name: str | None,
    config: Path | None,
    jobs: Sequence[str],
    master: str | None,
    connect: str | None,
    conf: Sequence[str],
    py_files: Sequence[str],
    concurrency: int,
    inline: int,
    results: str | None,
    keep_results: float,
    heartbeat: float,
    liveness: int,
    prefix: str,
    log_level: str,
) -> int:
    """Offer Spark jobs as services: queries (spark.sql) and named Python jobs (spark.job).

    \b
    mdclient stream spark.sql "SELECT count(*) FROM orders"
    mdclient stream spark.job wordcount '{"path": "book.txt"}'

    PARTIALs tell how far a job has come, the FINAL has its result. To cancel a request is to cancel its Spark job.
    SIGTERM or Ctrl-C finishes what runs and ends; the second time it is cancelled.
    """
    log_to_stderr(log_level)
    quiet_py4j()
    if inline > LARGEST_INLINE:
        raise click.BadParameter(
            f"{inline}: at most {LARGEST_INLINE} bytes can be sent; larger results go to --results"
        )
    if connect is not None and (master is not None or conf or py_files):
        raise click.UsageError("--connect takes neither --master, --conf nor --py-files: its server has all that")
    name = control.checked_name(name) if name is not None else control.default_name("batch")
    catalogue = Catalogue() if config is None else read(config)
    if config is not None:
        sys.path.insert(0, str(config.parent.absolute()))  # its jobs' modules may stand beside it
    known = load_jobs(catalogue.jobs | pairs(jobs))
    settings = {"spark.driver.maxResultSize": MOST_COLLECTED, **pairs(conf)}
    if py_files:
        settings["spark.submit.pyFiles"] = ",".join(py_files)
    if connect is None:
        master = settled_master(master, settings)
        check_installed()

    from .lanes import Lanes  # noqa: PLC0415
    from .service import Batch  # noqa: PLC0415 - what only asks the broker needs none of it

    def make() -> Any:
        if connect is not None:
            return connect_session(connect)
        return open_session(f"mdp-spark {name}", master=master, conf=settings)

    log.info("starting Spark on %s", connect or master)
    stopper = _Stopper()
    lanes = Lanes(make, 2 * concurrency)
    _open(lanes, patient=connect is not None or is_elsewhere(master))
    kept = Results(_results_folder(results or catalogue.results, master, connect), inline)
    driver = Batch(
        lanes, broker=broker, name=name, catalogue=catalogue, jobs=known, results=kept, concurrency=concurrency,
        prefix=prefix, master=connect or str(master), heartbeat=heartbeat, liveness=liveness,
    )  # fmt: skip
    try:
        with driver:
            stopper.started = True
            reason = why_unreachable(broker)
            if reason is not None:
                log.warning("no broker at %s yet: %s; connecting goes on until there is one", broker, reason)
            log.info("serving %s as %s at %s; Ctrl-C ends", " and ".join(driver.services), name, broker)
            swept_at = float("-inf")
            while not driver.drained.is_set() and not stopper.stops:
                time.sleep(LOOK)
                if time.monotonic() - swept_at > SWEEP:
                    swept_at = time.monotonic()
                    kept.sweep(keep_results)
            driver.stop()
            while not driver.wait(LOOK):
                if stopper.stops > 1:
                    driver.cancel_all()
    finally:
        lanes.close()
    return 0


def _no_wheels(files: Sequence[str]) -> Sequence[str]:
    for each in files:
        if each.endswith(".whl"):
            raise click.BadParameter(f"{each}: Spark passes over wheels; one of pure Python can be renamed to .zip")
    return files


def _results_folder(results: str | None, master: str | None, connect: str | None) -> str | None:
    if results is not None:
        return results if ":" in results else os.path.abspath(results)
    local = connect is None and (master is None or master.startswith("local"))
    return os.path.abspath("spark-results") if local else None  # elsewhere, executors would write to their own disks


def _open(lanes: Any, *, patient: bool) -> None:
    """Make the session; if `patient`, however long its cluster is away."""
    pause = BACKOFF[0]
    while True:
        try:
            lanes.give(lanes.take(0))
        except SparkError as error:
            if not patient:
                raise
            log.error("%s; trying again in %g s", error, pause)
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, BACKOFF[1])


class _Stopper:
    """Counts how often the driver was asked to end, for its loop to see; the third time, ends the process."""

    def __init__(self) -> None:
        self.started = False
        self.stops = 0
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.stops += 1
        if not self.started:
            os._exit(0)  # Spark is being started: there is nothing yet to finish
        if self.stops > 2:
            os._exit(1)
        if self.stops == 1:
            log.info("ending: what runs is finished first; once more cancels it")


COMMANDS: Final = {"batch": batch}

"""The command `mdp-spark batch`: the driver that offers Spark jobs as services."""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from ...clients.console.asking import BROKER
from ...clients.console.bodies import pairs
from ...mdp.cli import console
from ...mdp.cli.shutdown import Shutdown, drain_timeout_option
from ...mdp.errors import SettingError
from ...mdp.program.control_services import name_or_default
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.reach import warn_if_unreachable
from ...titanic.operator.command.parameter_types import DURATION
from .. import session as sessions
from ..batch.catalogue.catalogue_file import Catalogue, read
from ..batch.catalogue.named_jobs import load_jobs
from ..batch.catalogue.offer import Offer, checks
from ..batch.driver import DEFAULT_QUERY_BYTES, Batch, BatchSettings
from ..batch.job_history import History
from ..batch.results.collecting import is_url
from ..batch.results.sending import DEFAULT_INLINE_BYTES, MAX_INLINE_BYTES, Results
from ..batch.sessions import SessionPool
from .parameters import CONF, MASTER, PREFIX, PY_FILES, SPARK_GRACE_SECONDS, name_option

STOP_CHECK_SECONDS: Final = 0.2
"""Interval at which the driver checks whether it should stop."""
DEFAULT_DRAIN_SECONDS: Final = 600.0
"""How long running jobs may take to finish: they take minutes, and the work of a cancelled job is lost."""
SWEEP_SECONDS: Final = 600.0
"""Interval at which old results are deleted."""
MAX_COLLECTED: Final = "128m"
"""Default of spark.driver.maxResultSize: Spark writes larger results to files."""
log = logging.getLogger("zmdp.spark")


@click.command()
@BROKER
@console.key_options
@name_option("batch")
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path),
    help="Catalogue (TOML): [tables.NAME] with format, path, schema, options; [jobs] with NAME = 'MODULE:FUNCTION'.",
)  # fmt: skip
@click.option(
    "--job", "jobs", multiple=True, metavar="NAME=MODULE:FUNCTION",
    help="Python job that callers may run. Can be repeated; installed packages add theirs through entry points.",
)  # fmt: skip
@MASTER
@click.option(
    "--connect", metavar="sc://HOST:PORT", help="Use this Spark Connect server instead of a driver in this process."
)
@CONF
@PY_FILES
@click.option(
    "--concurrency", type=console.Number("requests", whole=True), default=4,
    help="Maximum number of concurrent requests of each service.",
)  # fmt: skip
@click.option(
    "--max-query", type=console.Number("bytes", whole=True), default=DEFAULT_QUERY_BYTES,
    help="Maximum size of a query with its parameters, in bytes.",
)  # fmt: skip
@click.option(
    "--inline", type=console.Number("bytes", whole=True), default=DEFAULT_INLINE_BYTES,
    help="Maximum size of a result in a reply; larger ones are written as Parquet.",
)  # fmt: skip
@click.option(
    "--results", metavar="FOLDER",
    show_default="./spark-results on local", help="Folder or URL for larger results, shared by all executors.",
)  # fmt: skip
@click.option(
    "--keep-results", type=DURATION, default="7d",
    help="How long to keep results in a local --results folder.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Open each table, catalog and job, print a line for each, and exit.")
@click.option(
    "--history", type=click.Path(dir_okay=False, path_type=Path), default="spark-history.db", metavar="FILE",
    help="SQLite file on this machine with a record of each job; several batches can share it.",
)  # fmt: skip
@click.option("--keep-history", type=DURATION, default="30d", help="How long to keep records of jobs.")
@console.heartbeat_options()
@drain_timeout_option(
    DEFAULT_DRAIN_SECONDS, "How long running jobs may take to finish after SIGTERM or Ctrl-C; then they are cancelled."
)
@PREFIX
@console.log_level_option
def batch(
    *, broker: Sequence[str], keys: ClientKeys | None, name: str | None, config: Path | None, jobs: Sequence[str],
    master: str | None, connect: str | None, conf: Mapping[str, str], py_files: Sequence[str], inline: int,
    results: str | None, keep_results: float, check: bool, history: Path, keep_history: float, drain_timeout: float,
    log_level: str, **given: Any,
) -> int:  # fmt: skip
    """Offer Spark as two services: queries (spark.sql) and named Python jobs (spark.job).

    \b
    mdclient stream spark.sql "SELECT count(*) FROM orders"
    mdclient stream spark.job wordcount '{"path": "book.txt"}'

    PARTIALs report progress; the FINAL has the result. Cancelling a request cancels its Spark jobs.

    SIGTERM, Ctrl-C or `mdp-spark drain NAME` finishes running jobs and exits; a second signal, or --drain-timeout,
    cancels them; a third one exits immediately. SIGHUP or `mdp-spark reload NAME` reads --config again; an invalid file
    changes nothing.

    \b
    Exit codes:
      0  stopped; with --check, everything can be opened
      1  stopped by --drain-timeout or a third signal; or --check found a problem
      2  invalid usage, or another batch serves another catalogue under the same --prefix
    """
    console.log_to_stderr("error" if check else log_level)
    sessions.silence_py4j()
    if inline > MAX_INLINE_BYTES:
        raise click.BadParameter(
            f"--inline {inline}: at most {MAX_INLINE_BYTES} bytes can be sent; --results takes larger results"
        )
    if connect is not None and (master is not None or conf):
        raise click.UsageError(
            "--connect cannot be combined with --master or --conf: configure the Spark Connect server"
        )
    name = name_or_default(name, "batch", os.getpid())
    catalogue = Catalogue() if config is None else read(config, remote=connect is not None)
    targets = pairs(jobs)
    if config is not None:
        sys.path.insert(0, str(config.parent.absolute()))  # modules of jobs may be next to the file
    known = {} if check else load_jobs(catalogue.jobs | targets)
    if connect is None:
        master = sessions.resolve_master(master, conf)
        sessions.check_installed()
    opener = _session_opener(name, master, connect, conf, py_files)
    if check:
        return _check(opener, catalogue, catalogue.jobs | targets)
    pool = SessionPool(opener, 2 * given["concurrency"], catalogue.settings)
    place = str(master) if connect is None else sessions.without_parameters(connect)
    log.info("starting Spark on %s", place)
    kept = Results(_results_folder(results or catalogue.results, master, connect), inline)
    settings = BatchSettings(name, broker, master=place, keys=keys, **given)
    load = partial(_load, config, targets, remote=connect is not None)
    with closing(History(history, name)) as records, ExitStack() as stack:
        driver = Batch(settings, pool, kept, Offer(catalogue, known), history=records, load=load)
        stopper = _Stopper(driver, drain_timeout)
        stack.enter_context(stopper.shutdown)
        if connect is not None or sessions.is_remote(master):
            sessions.open_patiently(pool.open, lambda error, pause: log.error("%s; retrying in %g s", error, pause))
        else:
            pool.open()
        stack.callback(pool.close)
        with driver:
            stopper.started = True
            warn_if_unreachable(log, broker, keys)
            services = " and ".join(driver.services)
            log.info("serving %s as %s at %s; Ctrl-C stops it", services, name, " or ".join(broker))

            def sweep() -> None:
                kept.delete_old(keep_results)
                records.prune(keep_history)

            _serve(driver, stopper, sweep)
    return console.EXIT_FAILED if stopper.gave_up else 0


def _load(config: Path | None, jobs: Mapping[str, str], *, remote: bool) -> Offer:
    """Read the file again; return its catalogue and jobs, with those of the command line.  Raises `SettingError`."""
    if config is None:
        raise SettingError("the batch was started without --config, so there is nothing to reload")
    catalogue = read(config, remote=remote)
    return Offer(catalogue, load_jobs({**catalogue.jobs, **jobs}))


def _check(opener: Callable[[], Any], catalogue: Catalogue, jobs: Mapping[str, str]) -> int:
    """Print whether each table, catalog and job can be opened; return the exit code."""
    session = opener()
    code = 0
    try:
        for name, opened, found in checks(session, catalogue, jobs):
            click.echo(f"{'ok' if opened else 'failed':<8} {name}: {console.printable(found)}")
            code = code or int(not opened)
    finally:
        sessions.stop_quietly(session)
    return code


def _session_opener(
    name: str, master: str | None, connect: str | None, conf: Mapping[str, str], py_files: Sequence[str]
) -> Callable[[], Any]:
    """Return a function that opens the batch's session, again if Spark is lost."""
    sessions.check_py_files(py_files)
    if connect is not None:
        return partial(sessions.connect_session, connect, py_files)
    settings = {
        "spark.driver.maxResultSize": MAX_COLLECTED,
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # the default, INT96, has no time zone
        **conf,
    }
    return partial(sessions.open_session, f"mdp-spark {name}", master=master, conf=settings, py_files=py_files)


def _serve(driver: Batch, stopper: "_Stopper", sweep: Callable[[], object]) -> None:
    """Serve until a signal or a command to drain, then until the running jobs have ended; a second signal cancels them.

    `sweep` deletes old results; it is called now and then.
    """
    swept_at = float("-inf")
    while not driver.draining.is_set():
        time.sleep(STOP_CHECK_SECONDS)
        driver.serve()
        if time.monotonic() - swept_at > SWEEP_SECONDS:
            swept_at = time.monotonic()
            sweep()
    stopper.shutdown.begin()
    driver.stop()
    while not driver.wait(STOP_CHECK_SECONDS):
        if stopper.cancels:
            driver.running.cancel_all()


def _results_folder(results: str | None, master: str | None, connect: str | None) -> str | None:
    if results is not None:
        results = re.sub(r"^file:(//(localhost)?)?/(?!/)", "/", results)  # a path: old results in it are deleted
        return results if is_url(results) else os.path.abspath(results)
    local = connect is None and (master is None or master.startswith("local"))
    return os.path.abspath("spark-results") if local else None  # on a cluster, executors would write to their own disks


class _Stopper:
    """How `_serve` is to stop, as signals, `mdp-spark drain` and the limit of the drain have decided."""

    def __init__(self, driver: Batch, drain_timeout: float) -> None:
        self.started = False
        """Whether Spark has started."""
        self.cancels = False
        """Whether running jobs are cancelled rather than finished."""
        self.gave_up = False
        """Whether jobs were still running at the end of the limit."""
        self.shutdown = Shutdown(
            self._finish, self._cancel, limit=drain_timeout, unfinished=self._unfinished, announcement="",
            at_limit=self._give_up, grace=SPARK_GRACE_SECONDS, reload=self._reload, logger=log,
        )  # fmt: skip
        self._driver = driver
        self._drain_timeout = drain_timeout

    def _reload(self) -> None:
        with suppress(SettingError):  # logged; nothing changes
            self._driver.reload()

    def _finish(self) -> None:
        if not self.started:
            os._exit(0)  # there is nothing to finish
        self._driver.draining.set()
        log.info("finishing running jobs, within %g s; interrupt again to cancel them", self._drain_timeout)

    def _cancel(self) -> None:
        self.cancels = True

    def _give_up(self) -> None:
        running = self._driver.running.describe()
        if running:
            self.gave_up = self.cancels = True
            log.error("not finished within %g s: cancelling %s", self._drain_timeout, running)

    def _unfinished(self) -> str:
        return self._driver.running.describe() or "waiting for Spark to end"

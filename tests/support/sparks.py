"""Batches and fleets on the one Spark session of a test process."""

import json
import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import eventually

from zmdp.mdp.limits import Limits
from zmdp.spark import session as sessions

HERE = Path(__file__).parents[1] / "spark"
"""The folder with the handlers and jobs of these tests."""
BEATS = {"heartbeat": 0.2, "liveness": 600}
"""For all peers of a test: Java and Python may be silent for a minute or two where the machine is busy."""
LIMITS = Limits(**BEATS)
QUICK = ("--heartbeat", "0.2", "--liveness", "600")
"""The same for commands."""
SMALL_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@cache
def _java_problem():
    return sessions.java_problem()


def skip_without_java():
    """Skip the test, from here for all tests: so pytest's summary has one line, however many they are."""
    problem = _java_problem()
    if problem is not None:
        pytest.skip(f"{problem}: {sessions.NEEDS_JAVA}")


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def running_batch(
    spark,
    endpoint,
    folder,
    *,
    tables="",
    concurrency=2,
    inline=10_000,
    name="batch",
    prefix="spark",
    results=True,
    keys=None,
    history=None,
    jobs=None,
    open_session=None,
):
    """Run a batch with the jobs of batch_jobs.py, or other `jobs`, and a catalogue and results in `folder`."""
    import batch_jobs

    from zmdp.spark.batch.catalogue import catalogue_file
    from zmdp.spark.batch.catalogue.offer import Offer
    from zmdp.spark.batch.driver import Batch, BatchSettings
    from zmdp.spark.batch.job_history import History
    from zmdp.spark.batch.results.sending import Results
    from zmdp.spark.batch.sessions import SessionPool

    if jobs is None:
        jobs = {each: job for each, job in vars(batch_jobs).items() if getattr(job, "__module__", "") == "batch_jobs"}
    config = folder / "catalogue.toml"
    config.write_text(tables)
    offer = Offer(catalogue_file.read(config), jobs)
    driver = Batch(
        BatchSettings(name, endpoint, prefix=prefix, concurrency=concurrency, keys=keys, **BEATS),
        SessionPool(open_session or (lambda: spark), 2 * concurrency, offer.catalogue.settings),
        Results(str(folder / "results") if results else None, inline),
        offer,
        load=lambda: Offer(catalogue_file.read(config), jobs),
        history=history or History(Path(":memory:"), name),
    )
    try:
        with driver:
            yield driver
    finally:
        driver.running.cancel_all()


def frames(*values):
    """Return the frames of a request: texts as they are, other values as JSON."""
    return [value.encode() if isinstance(value, str) else json.dumps(value).encode() for value in values]


def result(client, service, *values):
    """Return description and data of a batch's result."""
    reply = client.request(service, *frames(*values))
    described, data = reply[reply.collected :]
    return json.loads(described), data


def rows(client, sql, **settings):
    """Return the rows of a query."""
    described, data = result(client, "spark.sql", sql, settings)
    assert described["rows"] == len(json.loads(data))
    return json.loads(data)


def free(spark):
    """Whether Spark runs nothing."""
    return not spark.sparkContext.statusTracker().getActiveJobsIds()


def task_pids(folder, tasks=2):
    """Wait until all tasks of the job `gated` run; return the pids of their processes."""
    told = [folder / f"task-{number}" for number in range(tasks)]
    eventually(lambda: all(each.exists() and each.read_text() for each in told), SPARK_TIMEOUT_SECONDS)
    return [int(each.read_text()) for each in told]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def finish(stream):
    """Start a streaming query, and wait until it has ended by itself.

    Spark gives the Python process of a data source ten seconds to start, also on a busy machine.  A query that this has
    ended continues from its checkpoint.
    """
    from pyspark.errors import StreamingQueryException

    until = time.monotonic() + SPARK_TIMEOUT_SECONDS
    while True:
        query = stream.start()
        try:
            assert query.awaitTermination(SPARK_TIMEOUT_SECONDS)
            return
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error) or time.monotonic() > until:
                raise
        finally:
            query.stop()


def forget_last_batch(checkpoint):
    """Make Spark repeat a stream's last micro-batch, as if it had died before it had noted that it was done."""
    commits = checkpoint / "commits"
    latest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for name in (f"{latest}", f".{latest}.crc"):
        (commits / name).unlink(missing_ok=True)


# ── fleets ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Shared:
    """A cluster whose session outlives the fleet, or the doctor, that uses it."""

    master, conf = "local[2,3]", {}

    def __init__(self, spark):
        self._spark = spark

    def open(self, name, *, slots=None, reserve=0):
        context, version = self._spark.sparkContext, self._spark.version
        return SimpleNamespace(sparkContext=context, version=version, stop=lambda: None)


@contextmanager
def running_fleet(spark, endpoint, **settings):
    """Run a fleet in a thread.  The current folder must be that of the handlers."""
    from zmdp.spark.fleet.driver import Fleet
    from zmdp.spark.fleet.settings import FleetSettings

    given = {"handler": "fleet_handlers:pid", "service": "pid", "name": "test", "broker": endpoint, **BEATS, **settings}
    fleet = Fleet(FleetSettings(**given), Shared(spark))
    ready = threading.Event()
    thread = threading.Thread(target=fleet.run, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(SPARK_TIMEOUT_SECONDS)
        yield fleet
    finally:
        fleet.drain()
        thread.join()


def busy(client, service):
    """Whether a worker of the service has a request."""
    (row,) = json.loads(client.request("mmi.services", service.encode())[0])["services"]
    return row["running"] > 0

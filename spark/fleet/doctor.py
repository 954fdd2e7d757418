"""The checks of `mdp-spark doctor`: is everything that Spark services need installed and reachable?"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from json import loads
from typing import TYPE_CHECKING, Any, Final, Literal

from ...clients import Client
from ...mdp.errors import SettingError, ZmdpError
from ...mdp.extras import install_command
from ...mdp.keys import ClientKeys
from ...mdp.transport.reach import why_none_reachable
from ...mdp.transport.sockets import checked_endpoints
from .. import session as sessions
from .cluster import Cluster, cores, task_cores
from .executor import BROKER_TIMEOUT_SECONDS, probe
from .leases import classify_failure
from .settings import is_loopback

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTOR_TIMEOUT_SECONDS: Final = 60.0
"""How long executors may take to start and answer."""
SUPPORTED_VERSIONS: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]]] = {
    "pyzmq": ((26,), None),
    "msgspec": ((0, 19), None),
    "pyspark": ((4, 0), (4, 4)),
    "pandas": ((2, 2), (3,)),
    "pyarrow": ((18,), None),
}
"""For each package the oldest supported version, and the first one that is too new (as in `pyproject.toml`)."""
EXECUTOR_CHECKS: Final = ("executors", "executors reach the broker")

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """What one check found, and what to do if it failed."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Doctor:
    """Checks this machine, the broker and the executors of the cluster."""

    cluster: Cluster
    broker: str | Sequence[str]
    executors_broker: str | Sequence[str] = ()
    reserve: int = 1
    minimum: int = 1
    keys: ClientKeys | None = field(default=None, repr=False)

    def checks(self) -> Iterator[Check]:
        """Yield each check as soon as it is done.  A check that depends on a failed one is skipped."""
        yield Check("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
        libraries = [_library(name) for name in SUPPORTED_VERSIONS]
        yield from libraries
        java = _java()
        yield java
        broker = self._broker()
        yield broker
        reason = next((each.name for each in (*libraries, java) if each.state == "failed"), None)
        if reason is None:
            yield from self._cluster_checks(broker_answers=broker.state == "ok")
        else:
            yield from _skipped(("session", *EXECUTOR_CHECKS, "cores"), reason)

    def _broker(self) -> Check:
        name = "broker"
        brokers = checked_endpoints(self.broker)
        where = " or ".join(brokers)
        reason = why_none_reachable(brokers, self.keys)
        if reason is None:
            try:
                with Client(brokers, timeout=BROKER_TIMEOUT_SECONDS, retries=0, key=self.keys) as client:
                    reply = client.request("mmi.broker")[0]
            except ZmdpError as error:
                reason = f"{where}: {error}"
            else:
                return Check(name, "ok", f"{_broker_version(reply)} at {where}")
        return Check(name, "failed", reason, "start mdp-broker, or give its address with --broker")

    @property
    def _addresses(self) -> tuple[str, ...]:
        """The endpoints that executors use."""
        return tuple(checked_endpoints(self.executors_broker or self.broker))

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _cluster_checks(self, *, broker_answers: bool) -> Iterator[Check]:
        try:
            session = self.cluster.open("zmdp-doctor", slots=max(1, self.minimum), reserve=self.reserve)
        except (SettingError, sessions.SparkError) as error:
            advice = "name a cluster with --master; `--master 'local[2]'` works without one"
            yield Check("session", "failed", str(error), advice)
            yield from _skipped((*EXECUTOR_CHECKS, "cores"), "session")
            return
        try:
            yield Check("session", "ok", f"Spark {session.version} on {session.sparkContext.master}")
            yield from self._executors(session, broker_answers=broker_answers)
            yield self._cores(session)
        finally:
            session.stop()

    def _executors(self, session: "SparkSession", *, broker_answers: bool) -> Iterator[Check]:
        found = _probed(session, self._addresses, self.keys)
        if isinstance(found, Check):
            yield found
            yield from _skipped(EXECUTOR_CHECKS[1:], EXECUTOR_CHECKS[0])
            return
        where = ", ".join(sorted({str(each["host"]) for each in found}))
        yield Check(EXECUTOR_CHECKS[0], "ok", f"Python {found[0]['python']} with zmdp, pyzmq and msgspec on {where}")
        bad = next((each for each in found if each["broker"] is not None), None)
        if not broker_answers and not self.executors_broker:
            yield from _skipped(EXECUTOR_CHECKS[1:], "broker")
        elif bad is None:
            yield Check(EXECUTOR_CHECKS[1], "ok", f"on {where}")
        else:
            advice = self._advice(str(session.sparkContext.master))
            yield Check(EXECUTOR_CHECKS[1], "failed", f"on {bad['host']}: {bad['broker']}", advice)

    def _advice(self, master: str) -> str:
        if sessions.is_remote(master) and any(map(is_loopback, self._addresses)):
            return (
                "other machines cannot reach a loopback address: bind the broker to another and pass it with --broker"
            )
        return "pass an address that executors can reach with --broker-from-executors; look for a firewall in between"

    def _cores(self, session: "SparkSession") -> Check:
        name = "cores"
        try:
            number = cores(session.sparkContext)
            each = task_cores(session.sparkContext)
        except SettingError as error:
            return Check(name, "failed", str(error), "set a maximum")
        left = (number - self.reserve) // each
        needed = max(1, self.minimum)
        if left >= needed:
            return Check(name, "ok", f"{number}: {left} for slots, {self.reserve} reserved for other jobs (--reserve)")
        text = f"{number}, of which {self.reserve} are reserved for other jobs: too few for {needed} slots"
        text += f" of {each} cores (spark.task.cpus)" if each > 1 else ""
        advice = "give the application more cores (local[N], spark.cores.max, more executors), or --reserve 0"
        return Check(name, "failed", text, advice)


def _broker_version(reply: bytes) -> str:
    try:
        return f"zmdp {loads(reply)['version']}"
    except (ValueError, TypeError, LookupError):
        return "not a zmdp broker, so fleets do not scale,"


def _library(name: str) -> Check:
    first, after = SUPPORTED_VERSIONS[name]
    wanted = f"{_dotted(first)} or newer" + (f", below {_dotted(after)}" if after else "")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "failed", "is not installed", f"install {wanted}: {install_command('spark')}")
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if parts < first or (after is not None and parts >= after):
        return Check(name, "failed", version, f"install {wanted}: {install_command('spark')}")
    return Check(name, "ok", version)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _java() -> Check:
    problem = sessions.java_problem()
    if problem is not None:
        return Check("Java", "failed", problem, sessions.NEEDS_JAVA)
    return Check("Java", "ok", f"{sessions.java_version()} at {sessions.find_java()}")


def _skipped(names: Sequence[str], because: str) -> Iterator[Check]:
    for name in names:
        yield Check(name, "skipped", f"because this failed: {because}")


def _probed(session: "SparkSession", broker: tuple[str, ...], keys: ClientKeys | None) -> list[dict[str, Any]] | Check:
    """Return what the executors report, or the failed check if they do not."""
    context = session.sparkContext
    pool = ThreadPoolExecutor(1)
    try:
        tasks = max(1, context.defaultParallelism)
        job = context.parallelize(range(tasks), tasks).mapPartitions(partial(probe, broker, keys))
        return pool.submit(job.collect).result(EXECUTOR_TIMEOUT_SECONDS)
    except TimeoutError:
        context.cancelAllJobs()  # which ends the thread, so that this process can exit
        found = f"no executor answered within {EXECUTOR_TIMEOUT_SECONDS:g} s"
        advice = "check the cluster's web page: does it have free cores, and does it start executors?"
    except Exception as error:  # noqa: BLE001 - whatever ended the job is the finding
        found = classify_failure(error).reason
        advice = (
            "give executors pyzmq, msgspec and the driver's minor version of Python, with PYSPARK_PYTHON or --archive"
        )
    return Check(EXECUTOR_CHECKS[0], "failed", found, advice)

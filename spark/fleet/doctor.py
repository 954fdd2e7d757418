"""The checks of `mdp-spark doctor`: is everything that Spark services need installed and reachable?"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from json import loads
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from ...clients import Client
from ...mdp.errors import SettingError, ZmdpError
from ...mdp.program.extras import install_command
from ...mdp.security.keys import ClientKeys
from ...mdp.transport import listening
from ...mdp.transport.endpoints import checked_endpoints
from ...mdp.transport.reach import why_none_reachable
from .. import session as sessions
from .cluster import Cluster, cores, task_cores
from .executor import BROKER_TIMEOUT_SECONDS, probe
from .leases import classify_failure

if TYPE_CHECKING:
    from pyspark import SparkContext
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
State = Literal["ok", "failed", "skipped"]
Look = Callable[[], str]
"""The function of a check, which returns its finding, or raises `CheckFailed`."""


@dataclass(frozen=True)
class Check:
    """The finding of one check, and the remedy if it failed."""

    name: str
    state: State
    found: str
    advice: str = ""


class CheckFailed(Exception):
    """A check has failed; the arguments are its finding and the remedy."""


@dataclass
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
        broken: set[str] = set()
        with ExitStack() as self._opened:
            for name, (needed, look) in self._looks().items():
                reason = next((each for each in needed if each in broken), None)
                try:
                    skipped = reason and Check(name, "skipped", f"because this failed: {reason}")
                    check = skipped or Check(name, "ok", look())
                except CheckFailed as error:
                    check = Check(name, "failed", *error.args)
                if check.state != "ok":
                    broken.add(name)
                yield check

    def _looks(self) -> dict[str, tuple[Sequence[str], Look]]:
        """Return for each check its name, the names of the checks that it needs, and its function."""
        session, executors = ("session",), ("session", "executors")
        reaches = executors if self.executors_broker else (*executors, "broker")
        return {
            "Python": ((), lambda: f"{sys.version.split()[0]} at {sys.executable}"),
            **{name: ((), partial(library, name)) for name in SUPPORTED_VERSIONS},
            "Java": ((), java),
            "broker": ((), self._broker),
            "session": ((*SUPPORTED_VERSIONS, "Java"), self._open_session),
            "executors": (session, self._executors),
            "executors reach the broker": (reaches, self._executors_reach),
            "cores": (session, lambda: self.cores(self._session.sparkContext)),
        }

    def _broker(self) -> str:
        brokers = checked_endpoints(self.broker)
        where = " or ".join(brokers)
        reason = why_none_reachable(brokers, self.keys)
        if reason is None:
            try:
                with Client(brokers, timeout=BROKER_TIMEOUT_SECONDS, retries=0, key=self.keys) as client:
                    return f"{_broker_version(client.request('mmi.broker')[0])} at {where}"
            except ZmdpError as error:
                reason = f"{where}: {error}"
        raise CheckFailed(reason, "start mdp-broker, or give its address with --broker")

    @property
    def _addresses(self) -> tuple[str, ...]:
        """The endpoints that executors use."""
        return tuple(checked_endpoints(self.executors_broker or self.broker))

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _open_session(self) -> str:
        try:
            self._session = self.cluster.open("zmdp-doctor", slots=max(1, self.minimum), reserve=self.reserve)
        except (SettingError, sessions.SparkError) as error:
            advice = "name a cluster with --master; `--master 'local[2]'` works without one"
            raise CheckFailed(str(error), advice) from None
        self._opened.callback(self._session.stop)
        return f"Spark {self._session.version} on {self._session.sparkContext.master}"

    def _executors(self) -> str:
        self._reports = _probed(self._session, self._addresses, self.keys)
        self._where = ", ".join(sorted({str(each["host"]) for each in self._reports}))
        return f"Python {self._reports[0]['python']} with zmdp, pyzmq and msgspec on {self._where}"

    def _executors_reach(self) -> str:
        bad = next((each for each in self._reports if each["broker"] is not None), None)
        if bad is None:
            return f"on {self._where}"
        advice = "pass an address that executors can reach with --broker-from-executors; look for a firewall in between"
        if sessions.is_remote(str(self._session.sparkContext.master)) and any(map(is_loopback, self._addresses)):
            advice = (
                "other machines cannot reach a loopback address: bind the broker to another and pass it with --broker"
            )
        raise CheckFailed(f"on {bad['host']}: {bad['broker']}", advice)

    def cores(self, context: "SparkContext") -> str:
        """Check that there are cores for the slots."""
        try:
            number, each = cores(context), task_cores(context)
        except SettingError as error:
            raise CheckFailed(str(error), "set a maximum") from None
        left = (number - self.reserve) // each
        needed = max(1, self.minimum)
        if left >= needed:
            return f"{number}: {left} for slots, {self.reserve} reserved for other jobs (--reserve)"
        text = f"{number}, of which {self.reserve} are reserved for other jobs: too few for {needed} slots"
        text += f" of {each} cores (spark.task.cpus)" if each > 1 else ""
        advice = "give the application more cores (local[N], spark.cores.max, more executors), or --reserve 0"
        raise CheckFailed(text, advice)


def is_loopback(endpoint: str) -> bool:
    """Whether only programs on this machine can reach the endpoint."""
    return not endpoint.startswith("tcp://") or listening.is_loopback(urlsplit(endpoint).hostname or "")


def _broker_version(reply: bytes) -> str:
    try:
        return f"zmdp {loads(reply)['version']}"
    except (ValueError, TypeError, LookupError):
        return "not a zmdp broker, so fleets do not scale,"


def library(name: str) -> str:
    """Check that a library is installed, in a supported version."""
    first, after = SUPPORTED_VERSIONS[name]
    wanted = f"{_dotted(first)} or newer" + (f", below {_dotted(after)}" if after else "")
    advice = f"install {wanted}: {install_command('spark')}"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise CheckFailed("is not installed", advice) from None
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if parts < first or (after is not None and parts >= after):
        raise CheckFailed(version, advice)
    return version


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def java() -> str:
    """Check that there is a Java that Spark supports."""
    problem = sessions.java_problem()
    if problem is not None:
        raise CheckFailed(problem, sessions.NEEDS_JAVA)
    return f"{sessions.java_version()} at {sessions.find_java()}"


def _probed(session: "SparkSession", broker: tuple[str, ...], keys: ClientKeys | None) -> list[dict[str, Any]]:
    """Return the executors' reports."""
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
    raise CheckFailed(found, advice)

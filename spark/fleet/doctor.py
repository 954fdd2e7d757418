"""`mdp-spark doctor`: is there all that the Spark side needs?  Each check that fails says what to do."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from json import loads
from typing import TYPE_CHECKING, Any, Final, Literal

from ...clients import Client
from ...mdp.errors import SettingError, ZmdpError
from ...mdp.transport.reach import why_unreachable
from .. import session as sessions
from .driver import cores, explained, is_loopback, message
from .ship import Cluster, on_this_machine, python
from .worker import probe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE: Final = 5.0
"""Seconds that the broker has to answer."""
JOB_PATIENCE: Final = 60.0
"""Seconds in which executors must have come and answered."""
RANGES: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]]] = {
    "pyzmq": ((26,), None),
    "pyspark": ((4, 0), (4, 4)),
    "pandas": ((2, 2), (3,)),
    "pyarrow": ((18,), None),
}
"""For each package the first version that will do, and the first that will not again (see `pyproject.toml`)."""
INSTALL: Final = "pip install 'zmdp[spark]'"
ON_EXECUTORS: Final = (
    "executors' Python",
    "executors' pyzmq",
    "executors' zmdp",
    "executors reach the broker",
)

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, what was found, and what to do if that is not well."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Doctor:
    """Looks at this machine, the broker, and the cluster's executors."""

    cluster: Cluster
    broker: str
    executors_broker: str | None = None
    reserve: int = 1
    minimum: int = 1

    def checks(self) -> Iterator[Check]:
        """All checks, each as soon as it is done; what cannot be looked at because of another is skipped."""
        yield Check("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
        libraries = [_library(name) for name in RANGES]
        yield from libraries
        java = _java()
        yield java
        broker = self._broker()
        yield broker
        reason = next((each.name for each in (*libraries, java) if each.state == "failed"), None)
        if reason is None:
            yield from self._cluster_checks(broker_answers=broker.state == "ok")
        else:
            yield from _skipped(("session", *ON_EXECUTORS, "cores"), reason)

    def _broker(self) -> Check:
        name = "broker"
        reason = why_unreachable(self.broker)
        if reason is None:
            try:
                with Client(self.broker, timeout=PATIENCE, retries=0) as client:
                    told = client.request("mmi.broker")[0]
            except ZmdpError as error:
                reason = str(error)
            else:
                return Check(name, "ok", f"{_described(told)} at {self.broker}")
        return Check(name, "failed", f"{self.broker}: {reason}", "start mdp-broker, or say where it is with --broker")

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _cluster_checks(self, *, broker_answers: bool) -> Iterator[Check]:
        try:
            session = self.cluster.open("zmdp-doctor", most=self.minimum + self.reserve)
        except (SettingError, sessions.SparkError) as error:
            advice = "say which cluster with --master; `--master 'local[2]'` needs none"
            yield Check("session", "failed", str(error), advice)
            yield from _skipped((*ON_EXECUTORS, "cores"), "session")
            return
        try:
            yield Check("session", "ok", f"Spark {session.version} on {session.sparkContext.master}")
            yield from self._executors(session, broker_answers=broker_answers)
            yield self._cores(session)
        finally:
            session.stop()

    def _executors(self, session: "SparkSession", *, broker_answers: bool) -> Iterator[Check]:
        found, wrong = _probed(session, self.executors_broker or self.broker)
        if wrong is not None:
            what, advice = wrong
            yield Check(ON_EXECUTORS[0], "failed", what, advice)
            yield from _skipped(ON_EXECUTORS[1:], ON_EXECUTORS[0])
            return
        where = ", ".join(sorted({str(each["host"]) for each in found}))
        yield Check(ON_EXECUTORS[0], "ok", f"{found[0]['python']} on {where}, as here {python()}")
        advices = (
            "install it on the executors, or bring it along: mdp-spark pack FOLDER, then --archive",
            "let the driver ship it (it does unless --master is local), or use --py-files zmdp.zip of mdp-spark pack",
            self._advice(str(session.sparkContext.master)),
        )
        failed = None
        for name, key, advice in zip(ON_EXECUTORS[1:], ("pyzmq", "zmdp", "broker"), advices, strict=True):
            bad = next((each for each in found if each[key] is not None), None)
            if failed is not None:
                yield from _skipped((name,), failed)
            elif key == "broker" and not broker_answers and self.executors_broker is None:
                yield from _skipped((name,), "broker")
            elif bad is None:
                yield Check(name, "ok", f"on {where}")
            else:
                failed = name
                yield Check(name, "failed", f"on {bad['host']}: {bad[key]}", advice)

    def _advice(self, master: str) -> str:
        if not on_this_machine(master) and is_loopback(self.executors_broker or self.broker):
            return (
                "other machines cannot reach a loopback address: bind the broker to another, and give it with --broker"
            )
        return "give the broker's address as executors see it with --broker-from-executors; is a firewall between them?"

    def _cores(self, session: "SparkSession") -> Check:
        name = "cores"
        try:
            number = cores(session.sparkContext)
        except SettingError as error:
            return Check(name, "failed", str(error), "say how many at the most")
        left = number - self.reserve
        needed = max(1, self.minimum)
        if left >= needed:
            return Check(name, "ok", f"{number}: {left} for slots, {self.reserve} stay free for other jobs (--reserve)")
        return Check(
            name,
            "failed",
            f"{number}, of which {self.reserve} stay free for other jobs: {needed} slots do not fit",
            "give the application more cores (local[N], spark.cores.max, more executors), or --reserve 0",
        )


def _described(told: bytes) -> str:
    try:
        return f"zmdp {loads(told)['version']}"
    except (ValueError, TypeError, LookupError):
        return "a broker that is not zmdp's, so that fleets do not scale,"


def _library(name: str) -> Check:
    first, after = RANGES[name]
    wanted = f"{_dotted(first)} or newer" + (f", below {_dotted(after)}" if after else "")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "failed", "is not installed", f"it takes {wanted}: {INSTALL}")
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if parts < first or (after is not None and parts >= after):
        return Check(name, "failed", version, f"it takes {wanted}: {INSTALL}")
    return Check(name, "ok", version)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _java() -> Check:
    version = sessions.java_version()
    if version is None:
        return Check("Java", "failed", sessions.no_java(), sessions.NEEDS_JAVA)
    if version < sessions.OLDEST_JAVA:
        return Check("Java", "failed", f"{version} at {sessions.java()}", sessions.NEEDS_JAVA)
    return Check("Java", "ok", f"{version} at {sessions.java()}")


def _skipped(names: Sequence[str], because: str) -> Iterator[Check]:
    for name in names:
        yield Check(name, "skipped", f"because of: {because}")


def _probed(session: "SparkSession", broker: str) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
    """What the executors tell; or what is wrong, and what to do."""
    from pyspark import InheritableThread  # noqa: PLC0415

    context = session.sparkContext
    outcome: list[Any] = []

    def ask() -> None:
        tasks = max(1, context.defaultParallelism)
        try:
            outcome.append(context.parallelize(range(tasks), tasks).mapPartitions(partial(probe, broker)).collect())
        except Exception as error:  # noqa: BLE001 - whatever ends a job is what is wrong
            outcome.append(explained(message(error)).reason)

    asking = InheritableThread(target=ask, daemon=True)
    asking.start()
    asking.join(JOB_PATIENCE)
    if not outcome:
        context.cancelAllJobs()
        what = f"no executor has answered within {JOB_PATIENCE:g} s"
        return [], (what, "look at the cluster's own page: has it free cores, does it start executors?")
    if isinstance(outcome[0], str):
        return [], (outcome[0], "see that executors have this Python's minor version, by PYSPARK_PYTHON or --archive")
    return outcome[0], None

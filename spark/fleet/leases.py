"""Run leases as Spark jobs of one task each, and classify their ends."""

import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from ..reasons import reason
from ..session import is_remote
from .application import Application
from .executor import LeaseTask, serve
from .settings import FleetSettings
from .slots import Died, Lease, LeaseEnd, Refused, Served

_LOST: Final = re.compile(r".*Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor (\S+)\): ")
_CLASS: Final = re.compile(r"(?:[a-z]\w*\.)+[A-Z]\w*: ")


class LeaseJobs:
    """Runs the leases of a fleet as Spark jobs, whose tasks report to the service `reports`."""

    def __init__(self, settings: FleetSettings, run: str, reports: str, application: Application) -> None:
        self._settings = settings
        self._run = run
        self._application = application
        self._reports = reports

    def run(self, lease: Lease) -> LeaseEnd:
        """Run a lease's job to its end, in a thread of its own."""
        paths = () if is_remote(self._application.master) else (os.getcwd(),)
        task = LeaseTask(self._settings, self._run, self._reports, lease, paths)
        try:
            context, tag = self._application.context, self._tag(lease.number)
            context.setJobGroup(tag, f"{self._settings.service}: slot {lease.slot}, lease {lease.number}")
            context.addJobTag(tag)
            (found,) = context.parallelize([0], 1).mapPartitions(partial(serve, task)).collect()
            return self._outcome(found)
        except Exception as error:  # noqa: BLE001 - whatever ended the job, the slot gets another lease
            return classify_failure(error)

    def _outcome(self, found: Mapping[str, Any]) -> LeaseEnd:
        if "refused" in found:
            return Refused(f"{found['host']} cannot serve {self._settings.service}: {found['refused']}")
        where = f"on {found['host']} has not reached {self.broker}: {found['unreachable']}"
        return Served(found["served"], None if found["unreachable"] is None else where)

    def is_running(self, lease: int) -> bool:
        """Whether the lease's task is running on an executor."""
        tracker = self._application.context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._tag(lease)))
        stages = (tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds)
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    def cancel(self, lease: int) -> None:
        """Cancel the lease's job."""
        self._application.context.cancelJobsWithTag(self._tag(lease))

    def _tag(self, lease: int) -> str:
        return f"{self._reports}-{lease}"

    @property
    def broker(self) -> str:
        """Return the text that names the brokers that executors use."""
        return f"the broker at {' or '.join(self._settings.addresses)}"


# ── failed jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def classify_failure(error: BaseException) -> Refused | Died:
    """Classify the error of a failed job: the executor cannot serve at all, or it was lost."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java.toString())
    if "No module named 'zmdp'" in text:
        return Refused("executors cannot import zmdp: install it in the Python that PYSPARK_PYTHON names")
    for module, package in {"zmq": "pyzmq", "msgspec": "msgspec"}.items():
        if f"No module named '{module}'" in text:
            return Refused(
                f"executors have no {package}: install it in their Python, or ship an environment that has pyzmq and "
                "msgspec, made by venv-pack, with --archive"
            )
    if "PYTHON_VERSION_MISMATCH" in text:
        return Refused(
            f"executors do not run the driver's Python version, {sys.version_info.major}.{sys.version_info.minor}: set "
            "PYSPARK_PYTHON to such a Python, or ship one with --archive"
        )
    if match := re.search(r'Cannot run program "([^"]+)"', text):
        return Refused(
            f"executors have no Python at {match[1]}: name another with --conf spark.pyspark.python=PATH; an archive "
            "made by venv-pack needs the Python that created it at the same path on every machine"
        )
    lost = _LOST.search(text)
    where = f"executor {lost[2]} on {lost[1]}" if lost else "the job"
    line = _CLASS.sub("", _LOST.sub("", reason(RuntimeError(text))).partition(" Consider setting")[0])
    return Died(f"{where}: {line[:300]}")

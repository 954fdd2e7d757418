"""Report how far a Spark job has come."""

from contextlib import suppress
from dataclasses import astuple, dataclass
from operator import add
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts over all Spark jobs of a request.  The totals grow as Spark plans further stages."""

    stages: int = 0
    stages_done: int = 0
    tasks: int = 0
    tasks_done: int = 0
    tasks_running: int = 0
    tasks_failed: int = 0
    rows_read: int = 0
    rows_written: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(*map(add, astuple(self), astuple(other)))


class ClassicProgress:
    """Polls the driver's status tracker for the jobs of one job group."""

    def __init__(self, context: "SparkContext", group: str) -> None:
        self._context = context
        self._tracker = context.statusTracker()
        self._status_store = context._jsc.sc().statusStore()  # the only source of row counts
        self._group = group
        self._ended: dict[int, Progress] = {}
        """Final counts of jobs that have ended, which are not polled again."""

    def now(self) -> Progress:
        """Return the progress over all jobs of the group."""
        jobs = self._tracker.getJobIdsForGroup(self._group)
        return sum((self._ended.get(job) or self._job(job) for job in jobs), Progress())

    def _job(self, job: int) -> Progress:
        info = self._tracker.getJobInfo(job)
        if info is None:
            return Progress()
        found = sum(map(self._stage, info.stageIds), Progress())
        if info.status != "RUNNING":
            self._ended[job] = found
        return found

    def _stage(self, stage: int) -> Progress:
        info = self._tracker.getStageInfo(stage)
        if info is None:  # not started yet, or skipped because its result exists
            return Progress()
        read = written = 0
        with suppress(Exception):  # the store does not know the stage yet, or no longer
            seen = self._status_store.lastStageAttempt(stage)
            read, written = int(seen.inputRecords()), int(seen.outputRecords())
        done = info.numTasks == info.numCompletedTasks
        return Progress(
            1, int(done), info.numTasks, info.numCompletedTasks, info.numActiveTasks, info.numFailedTasks, read, written
        )


class ConnectProgress:
    """Collects the reports of a Connect server about one session's operations; they do not count rows."""

    def __init__(self) -> None:
        self._operations: dict[str, Progress] = {}

    def __call__(self, stages: Any, inflight_tasks: int, operation_id: str | None = None, done: bool = False) -> None:
        """Record the state of one operation; `SparkSession.registerProgressHandler` calls this."""
        del done
        stages = stages or ()
        self._operations[str(operation_id)] = Progress(
            stages=len(stages),
            stages_done=sum(bool(stage.done) for stage in stages),
            tasks=sum(stage.num_tasks for stage in stages),
            tasks_done=sum(stage.num_completed_tasks for stage in stages),
            tasks_running=inflight_tasks,
        )

    def begin(self) -> None:
        """Start counting another request."""
        self._operations = {}

    def now(self) -> Progress:
        """Return the progress over all operations since `begin`."""
        return sum(list(self._operations.values()), Progress())


def spark_ui(job: str | None = None) -> str | None:
    """Return the URL of Spark's web page, or of its page about the latest Spark job of `job`; None if there is none."""
    with suppress(Exception):  # Spark is lost, or not a classic driver
        from pyspark import SparkContext  # noqa: PLC0415

        context: Any = SparkContext._active_spark_context
        url: str | None = context.uiWebUrl
        started = () if job is None else context.statusTracker().getJobIdsForGroup(job)
        return f"{url}/jobs/job/?id={max(started)}" if url and started else url
    return None

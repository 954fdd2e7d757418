"""How far a Spark job has come, for those who wait for it."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts over all Spark jobs of a request, as far as Spark knows of them yet: totals grow as it plans."""

    stages: int = 0
    stages_done: int = 0
    tasks: int = 0
    tasks_done: int = 0
    tasks_running: int = 0
    tasks_failed: int = 0
    rows_read: int = 0
    rows_written: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        mine, others = asdict(self), asdict(other)
        return Progress(**{name: mine[name] + others[name] for name in mine})


class ClassicProgress:
    """Asks the driver's status tracker for what runs in a job group."""

    def __init__(self, context: "SparkContext", group: str) -> None:
        self._context = context
        self._tracker = context.statusTracker()
        self._stages_known = context._jsc.sc().statusStore()  # rows are told nowhere else
        self._group = group
        self._ended: dict[int, Progress] = {}
        """Of jobs that have ended: not asked for again."""

    def now(self) -> Progress:
        """The sum over all its jobs."""
        total = Progress()
        for job in self._tracker.getJobIdsForGroup(self._group):
            total += self._ended[job] if job in self._ended else self._job(job)
        return total

    def _job(self, job: int) -> Progress:
        info = self._tracker.getJobInfo(job)
        if info is None:
            return Progress()
        found = Progress()
        for stage in info.stageIds:
            found += self._stage(stage)
        if info.status != "RUNNING":
            self._ended[job] = found
        return found

    def _stage(self, stage: int) -> Progress:
        info = self._tracker.getStageInfo(stage)
        if info is None:  # not begun yet, or its result was there already
            return Progress()
        read = written = 0
        with suppress(Exception):  # the store has not heard of it yet, or forgotten it
            seen = self._stages_known.lastStageAttempt(stage)
            read, written = int(seen.inputRecords()), int(seen.outputRecords())
        done = info.numTasks == info.numCompletedTasks
        return Progress(
            1, int(done), info.numTasks, info.numCompletedTasks, info.numActiveTasks, info.numFailedTasks, read, written
        )


class ConnectProgress:
    """Listens to what a Connect server tells of the operations of one session; it does not tell of rows."""

    def __init__(self) -> None:
        self._operations: dict[str, Progress] = {}

    def __call__(self, stages: Any, inflight_tasks: int, operation_id: str | None = None, done: bool = False) -> None:
        """What `SparkSession.registerProgressHandler` calls."""
        del done
        self._operations[str(operation_id)] = Progress(
            stages=len(stages or ()),
            stages_done=sum(bool(stage.done) for stage in stages or ()),
            tasks=sum(stage.num_tasks for stage in stages or ()),
            tasks_done=sum(stage.num_completed_tasks for stage in stages or ()),
            tasks_running=inflight_tasks,
        )

    def begin(self) -> None:
        """Another request of the session begins."""
        self._operations = {}

    def now(self) -> Progress:
        """The sum over the operations since `begin`."""
        return sum(list(self._operations.values()), Progress())

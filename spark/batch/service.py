"""Spark jobs as services: `spark.sql` for queries over a catalogue, `spark.job` for named Python jobs.

Each request is a job with an id.  Its PARTIALs are one frame of JSON each, how far it has come:

    {"event": "started", "job": id, "driver": name}
    {"event": "waiting"}                                     there is no free place, or the session is being made
    {"event": "progress", "job": id, "seconds": s, "stages": n, "stages_done": n, "tasks": n, …}
    {"event": "yielded", "job": id, "value": …}              what a job that is a generator yields

and its FINAL is the result (`results.py`).  A request that is cancelled, by its caller, by its deadline or with its
connection, has its Spark job cancelled.
"""

import json
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, Self

from ... import __version__
from ...mdp.codes import Code
from ...mdp.errors import RequestCancelled, ServiceError, ZmdpError
from ...workers import Request, Worker
from ..control import Control
from ..session import SparkError, reason
from .catalogue import Catalogue
from .jobs import NOT_TAKEN, ONLY_QUERIES, Call, Query, call, not_taken, query
from .lanes import Lane, Lanes
from .progress import Progress
from .results import JOB_LENGTH, Results, plain

LOOK: Final = 0.1
"""Seconds between two looks at whether a request was cancelled."""
TELL: Final = ((10.0, 0.25), (600.0, 1.0), (float("inf"), 5.0))
"""Up to an age in seconds, the seconds between two PARTIALs that tell of progress: Titanic stores them all."""
KEEP_ALIVE: Final = 5.0
"""Seconds after which progress is told although there was none: callers need not be more patient than that."""
ENDS_WITHIN: Final = 10.0
"""Seconds that a cancelled job has to end, before its place is given to another."""
MOST_YIELDED: Final = 1000
"""Values that a generator may be ahead of the caller who reads them."""

ON_FILES: Final = "spark.sql.runSQLOnFiles"
"""Whether a query may name files, csv.`/etc/passwd`: a job's may, a caller's has the catalogue."""
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]")
_LINE: Final = re.compile(r"\bline (\d+)")

log = logging.getLogger("zmdp.spark")


class Job:
    """One request while it runs: a thread in which Spark is asked, seen from the thread that serves the request."""

    def __init__(self, asked: Query | Call, lane: Lane, work: "Callable[[Job], list[bytes]]") -> None:
        self.id = secrets.token_hex(JOB_LENGTH // 2)
        self.asked = asked
        self.lane = lane
        self.started = time.monotonic()
        self.cancelled = threading.Event()
        self.yielded: queue.Queue[Any] = queue.Queue(MOST_YIELDED)
        self.ended = threading.Event()
        self.outcome: list[bytes] | BaseException = []
        self._work = work

    def start(self) -> None:
        """Run it."""
        threading.Thread(target=self._run, name=f"job-{self.id}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.lane.begin(self.id)
            self.outcome = self._work(self)
        except BaseException as error:  # noqa: BLE001 - a job is a user's code: whatever it raises is its outcome
            self.outcome = error
        finally:
            self.ended.set()

    def tell(self, value: object) -> None:
        """From its own thread: have `value` sent, once there is room.  Raises `RequestCancelled`."""
        while not self.cancelled.is_set():
            with suppress(queue.Full):
                self.yielded.put(value, timeout=LOOK)
                return
        raise RequestCancelled("cancelled")

    def cancel(self) -> None:
        """End it in Spark; what the thread begins there afterwards needs another call."""
        self.cancelled.set()
        with suppress(Exception):  # the session is lost, and the job with it
            self.lane.cancel(self.id)

    def progress(self) -> Progress | None:
        """How far it has come; None if Spark does not say now."""
        with suppress(Exception):
            return self.lane.progress()
        return None

    def described(self) -> dict[str, Any]:
        """For `mdp-spark status`."""
        progress = self.progress() or Progress()
        return {
            "job": self.id,
            "what": self.asked.title,
            "seconds": round(time.monotonic() - self.started, 1),
            "cancelled": self.cancelled.is_set(),
            **asdict(progress),
        }


class Batch:
    """A driver: offers the services, while the `with` block lasts.

    `lanes` is the session, shared by as many requests at a time as it has lanes; `jobs` are the named jobs.  `prefix`
    is the first part of the services' names.  `concurrency` is the number of requests of each service that it takes at
    a time.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        broker: str,
        name: str,
        catalogue: Catalogue,
        jobs: Mapping[str, Callable[..., Any]],
        results: Results,
        concurrency: int,
        prefix: str = "spark",
        master: str = "",
        **settings: Any,
    ) -> None:
        self.name = name
        self.drained = threading.Event()
        """Set when it was told to end."""
        self._lanes = lanes
        self._catalogue = catalogue
        self._jobs = dict(jobs)
        self._results = results
        self._master = master
        self._running: dict[str, Job] = {}
        self._counts = {"done": 0, "failed": 0, "cancelled": 0}
        self._lock = threading.Lock()
        self._workers = [
            Worker(f"{prefix}.{kind}", handler, broker=broker, concurrency=concurrency, **settings)
            for kind, handler in (("sql", self.sql), ("job", self.job))
        ]
        operations = {"status": self._status, "cancel": self._cancel, "drain": self._drain}
        self._control = Control(name, operations, broker=broker)

    @property
    def services(self) -> list[str]:
        """What it offers."""
        return [worker.service.decode() for worker in self._workers]

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        self._control.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        for worker in self._workers:
            worker.wait()
        self._control.__exit__(*exception)

    def wait(self, timeout: float) -> bool:
        """After `stop`: wait until what runs has ended, for so many seconds at most.  Whether it has."""
        until = time.monotonic() + timeout
        return all(worker.wait(max(0.0, until - time.monotonic())) for worker in self._workers)

    def stop(self) -> None:
        """Take no more requests; those that run go on."""
        self.drained.set()
        for worker in self._workers:
            worker.stop()

    def cancel_all(self) -> None:
        """Cancel what runs."""
        for job in list(self._running.values()):
            job.cancel()

    # ── the services ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sql(self, request: Request) -> Iterator[bytes]:
        """The handler of `spark.sql`."""
        asked = query(request)
        return self._run(request, asked, lambda job: self._run_query(asked, job))

    def job(self, request: Request) -> Iterator[bytes]:
        """The handler of `spark.job`."""
        asked = call(request, self._jobs)
        return self._run(request, asked, lambda job: self._run_call(asked, job))

    def _run(
        self, request: Request, asked: Query | Call, work: Callable[[Job], list[bytes]]
    ) -> Generator[bytes, None, list[bytes]]:
        """What is sent for a request: PARTIALs, and the FINAL as what the generator returns."""
        lane = yield from self._lane(request)
        job = Job(asked, lane, work)
        with self._lock:
            self._running[job.id] = job
        log.info("job %s: %s", job.id, asked.title)
        job.start()
        try:
            yield _event("started", job, driver=self.name)
            yield from self._watch(request, job)
        finally:
            # Also where nobody waits any more: then this generator is closed in the middle.
            lost = self._end(job)
            with self._lock:
                del self._running[job.id]
                self._counts["cancelled"] += job.cancelled.is_set()
        return self._outcome(job, lost=lost)

    def _lane(self, request: Request) -> Generator[bytes, None, Lane]:
        told_at = float("-inf")
        while not request.cancelled:
            try:
                lane = self._lanes.take(1.0)
            except ZmdpError as error:
                log.error("%s", error)
                raise ServiceError(Code.WORKER_LOST, str(error)) from None
            if lane is not None:
                return lane
            if time.monotonic() - told_at >= KEEP_ALIVE:
                told_at = time.monotonic()
                yield json.dumps({"event": "waiting"}).encode()
        raise RequestCancelled("cancelled before it began")

    def _watch(self, request: Request, job: Job) -> Iterator[bytes]:
        told = Progress()
        told_at = looked_at = time.monotonic()
        while not job.ended.wait(LOOK):
            if request.cancelled or job.cancelled.is_set():
                return
            now = time.monotonic()
            yield from self._yielded(job)
            pause = next(pause for age, pause in TELL if now - job.started < age)
            if now - looked_at < pause:
                continue
            looked_at = now
            progress = job.progress()
            if progress is not None and (progress != told or now - told_at >= KEEP_ALIVE):
                told, told_at = progress, now
                yield _event("progress", job, seconds=round(now - job.started, 2), **asdict(progress))
        yield from self._yielded(job)

    def _yielded(self, job: Job) -> Iterator[bytes]:
        while not job.yielded.empty():
            yield _event("yielded", job, value=plain(job.yielded.get()))

    def _end(self, job: Job) -> bool:
        """Give its lane back, having cancelled it unless it has ended.  Whether the session is lost."""
        until = time.monotonic() + ENDS_WITHIN
        while not job.ended.wait(0) and time.monotonic() < until:
            job.cancel()
            job.ended.wait(LOOK)
        if job.ended.is_set():
            failed = isinstance(job.outcome, BaseException) and not job.cancelled.is_set()
            return self._lanes.give(job.lane, failed=failed)
        log.error("job %s was cancelled and does not end: its Python code goes on, without Spark", job.id)
        threading.Thread(target=self._outlast, args=(job,), name=f"outlast-{job.id}", daemon=True).start()
        return False

    def _outlast(self, job: Job) -> None:
        """Cancel whatever a job that does not end begins in Spark; its lane is free when it has."""
        while not job.ended.wait(1.0):
            job.cancel()
        self._lanes.give(job.lane)

    def _outcome(self, job: Job, *, lost: bool) -> list[bytes]:
        outcome = job.outcome
        if job.cancelled.is_set():
            log.info("job %s: cancelled after %.1f s", job.id, time.monotonic() - job.started)
            raise RequestCancelled(f"job {job.id} was cancelled")
        if not isinstance(outcome, BaseException):
            self._count("done")
            log.info("job %s: done after %.1f s", job.id, time.monotonic() - job.started)
            return outcome
        self._count("failed")
        log.info("job %s: failed after %.1f s", job.id, time.monotonic() - job.started)
        if lost:
            told = f"Spark was lost during job {job.id} ({reason(outcome)}): ask again"
            raise ServiceError(Code.WORKER_LOST, told[:1000])
        raise failure(outcome)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    # ── in the job's thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _run_query(self, asked: Query, job: Job) -> list[bytes]:
        session = job.lane.session
        session.conf.set(ON_FILES, "false")
        for table in self._catalogue.named_in(asked.sql):
            table.register(session)
        job.lane.count(job.id)
        try:
            # Only a query may stand here; a command would be run as soon as it is read.
            read = session.sql(f"SELECT * FROM (\n{asked.sql}\n)", args=asked.args)  # noqa: S608 - as it is asked
        except Exception as error:  # noqa: BLE001 - whatever else is wrong with it, it says by itself, below
            if any(kind.__name__ == "ParseException" for kind in type(error).__mro__):
                told = _LINE.sub(lambda found: f"line {int(found.group(1)) - 1}", reason(error))
                raise ServiceError(NOT_TAKEN, f"that is no query: {told}; {ONLY_QUERIES}", _detail(error)) from None
        else:
            outward = job.lane.reaches_out(asked.sql, read)
            if outward is not None:
                raise not_taken(f"{outward!r} cannot stand in a query: it may run programs, which is for spark.job")
        return self._results.frames(session.sql(asked.sql, args=asked.args), job.id, asked.format)

    def _run_call(self, asked: Call, job: Job) -> list[bytes]:
        session = job.lane.session
        session.conf.set(ON_FILES, "true")
        for table in self._catalogue.tables.values():
            try:
                table.register(session)
            except Exception as error:  # noqa: BLE001 - the job may do without it
                log.warning("table %s cannot be read: %s", table.name, reason(error))
        job.lane.count(job.id)
        result = asked.function(session, **asked.arguments)
        if isinstance(result, Iterator):
            while True:
                try:
                    value = next(result)
                except StopIteration as end:
                    result = end.value
                    break
                job.tell(value)
        return self._results.frames(result, job.id, asked.format)

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _status(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        del asked
        with self._lock:
            running, counts = list(self._running.values()), dict(self._counts)
        return {
            "kind": "batch",
            "name": self.name,
            "version": __version__,
            "master": self._master,
            "services": self.services,
            "draining": self.drained.is_set(),
            "tables": sorted(self._catalogue.tables),
            "jobs": sorted(self._jobs),
            "running": [job.described() for job in running],
            **counts,
        }

    def _cancel(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            job = self._running.get(str(asked.get("job")))
        if job is None:
            return {"cancelled": False}
        log.info("job %s is cancelled, by mdp-spark cancel", job.id)
        job.cancel()
        return {"cancelled": True}

    def _drain(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        del asked
        log.info("ending, as asked by mdp-spark drain: what runs is finished first")
        self.drained.set()
        return {"running": len(self._running)}


def _event(event: str, job: Job, **more: Any) -> bytes:
    return json.dumps({"event": event, "job": job.id, **more}, ensure_ascii=False, default=str).encode()


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def failure(error: BaseException) -> ServiceError:
    """What the caller is told of an exception: Spark's condition and message, or the job's exception.

    422 for what is wrong with what was asked, 500 for what went wrong; the detail is a JSON object with `condition`,
    `sqlstate` and `message`.
    """
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ZmdpError | SparkError):
        return ServiceError(Code.FAILED, str(error)[:1000])
    if hasattr(error, "java_exception") and not hasattr(error, "getCondition"):  # of an RDD: py4j tells, not PySpark
        log.error("a job failed: %s", reason(error))
        return ServiceError(Code.FAILED, reason(error), _detail(error))
    if not hasattr(error, "getCondition"):
        log.error("a job failed", exc_info=error)
        return ServiceError(Code.FAILED, f"{type(error).__name__}: {reason(error)}"[:1000])
    kind = {each.__name__ for each in type(error).__mro__}
    asked_wrong = {"AnalysisException", "ParseException", "IllegalArgumentException"} & kind
    return ServiceError(NOT_TAKEN if asked_wrong else Code.FAILED, reason(error), _detail(error))


def _detail(error: Any) -> bytes:
    told = reason(error)
    condition = _CONDITION.search(told)
    found = {"condition": condition and condition.group(1), "sqlstate": None, "message": told}
    with suppress(Exception):  # py4j's has neither, and the session may be gone, whom it asks
        found |= {"condition": error.getCondition(), "sqlstate": error.getSqlState()}
    return json.dumps(found, ensure_ascii=False).encode()

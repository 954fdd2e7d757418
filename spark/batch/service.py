"""Spark jobs as services: `spark.sql` runs queries over a catalogue, `spark.job` named Python jobs.

Each request is a job with an id.  Its PARTIALs report events, each as one frame of JSON:

    {"event": "started", "job": id, "driver": name}
    {"event": "waiting"}                                     for a free session, or for Spark to start
    {"event": "progress", "job": id, "seconds": s, "stages": n, "stages_done": n, "tasks": n, …}
    {"event": "yielded", "job": id, "value": …}              from a job that is a generator

Its FINAL is the result (`results.py`).  When a request is cancelled, by its caller, by its deadline or because the
caller disconnects, its Spark jobs are cancelled too.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Final, Self, TypeVar

from ... import __version__
from ...mdp.codes import Code
from ...mdp.errors import RequestCancelled, ServiceError, SettingError, ZmdpError
from ...mdp.keys import ClientKeys
from ...mdp.tracing import REQUEST_ID
from ...workers import Request, Worker
from ..control import control_service
from ..session import reason
from .catalogue import Catalogue
from .failures import detail, failure, gave_up, lost_error, python_traceback
from .fetching import handle
from .history import History
from .jobs import FETCH_PREFIX, ONLY_QUERIES, UNPROCESSABLE, JobCall, Query, parse_call, parse_query, unprocessable
from .progress import Progress, spark_ui
from .results import Results, plain
from .running import POLL_SECONDS, Job, RunningJobs
from .schemas import Schemas
from .sessions import JobSession, SessionPool
from .tables import RequestTables, register_when_named, request_tables

PROGRESS_INTERVALS: Final = ((10.0, 0.25), (600.0, 1.0), (float("inf"), 5.0))
"""(maximum age of the job, interval between progress PARTIALs) in seconds.  PARTIALs become rarer with age, because
Titanic stores them all.
"""
KEEP_ALIVE_SECONDS: Final = 5.0
"""Maximum silence: progress is sent this often even if nothing changed, so callers can use short timeouts."""
CANCEL_GRACE_SECONDS: Final = 10.0
"""How long a cancelled job may take to stop before its worker thread takes another request."""

MAX_LOSSES: Final = 3
"""Times that Spark may be lost during a request, as Titanic repeats it, before the request fails."""

ON_FILES: Final = "spark.sql.runSQLOnFiles"
"""Spark's setting for whether SQL may name files, as in csv.`/etc/passwd`: jobs may, callers' queries may not."""
_LINE: Final = re.compile(r"\bline (\d+)")

Found = TypeVar("Found")

log = logging.getLogger("zmdp.spark")


class Batch:
    """A Spark driver that offers both services while the `with` block lasts.

    Args:
        pool: the sessions; at most one request runs on each.
        broker: endpoint of the broker, or several in order of preference.
        name: the driver's name for `mdp-spark status` and `drain`.
        catalogue: the tables that queries and jobs can read.
        jobs: the named Python jobs.
        load: loads the catalogue and the jobs again, for `reload`; raises `SettingError`.
        results: where large results go.
        concurrency: maximum number of concurrent requests of each service.
        prefix: first part of the services' names.
        master: the Spark master, for `mdp-spark status`.
        heartbeat: interval in seconds.
        liveness: silent heartbeat intervals after which the broker is considered dead.
        keys: the driver's keys, for brokers that require them.
        history: where jobs are recorded; by default in memory.
    """

    def __init__(
        self,
        pool: SessionPool,
        *,
        broker: str | Sequence[str],
        name: str,
        catalogue: Catalogue,
        jobs: Mapping[str, Callable[..., Any]],
        results: Results,
        concurrency: int,
        prefix: str = "spark",
        master: str = "",
        heartbeat: float = 1.0,
        liveness: int = 5,
        keys: ClientKeys | None = None,
        load: Callable[[], tuple[Catalogue, Mapping[str, Callable[..., Any]]]] | None = None,
        history: History | None = None,
    ) -> None:
        self.name = name
        self.draining = threading.Event()
        """Set when the driver should drain."""
        self._pool = pool
        self._catalogue = catalogue
        self._jobs = dict(jobs)
        self._load = load
        self._schemas = Schemas()
        self._results = results
        self._master = master
        self._running = RunningJobs()
        self._suspect = threading.Semaphore()
        """Held by a request during which Spark was lost before: only one of them runs at a time."""
        self._history = History(None, name) if history is None else history
        self._owns_history = history is None
        offered = {f"{prefix}.sql": self.sql, f"{prefix}.job": self.job, FETCH_PREFIX + name: self.fetch}
        self._workers = [
            Worker(service, handler, broker=broker, concurrency=concurrency, heartbeat=heartbeat, liveness=liveness,
                   key=keys)
            for service, handler in offered.items()
        ]  # fmt: skip
        operations = {
            "status": self._status,
            "cancel": self._cancel,
            "reload": self._reload,
            "drain": self._drain,
            "history": self._show_history,
        }
        self._control = control_service(name, operations, broker=broker, keys=keys)

    @property
    def services(self) -> list[str]:
        """Return the names of the services."""
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
        self._control.__exit__(None, None, None)
        if self._owns_history:
            self._history.close()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the running requests after `stop`.  Return whether all have ended."""
        until = time.monotonic() + timeout
        return all(worker.wait(max(0.0, until - time.monotonic())) for worker in self._workers)

    def stop(self) -> None:
        """Take no more requests; running ones continue."""
        self.draining.set()
        for worker in self._workers:
            worker.stop()

    def unfinished(self) -> str:
        """Name the running jobs."""
        return self._running.describe()

    def cancel_all(self) -> None:
        """Cancel all running jobs."""
        self._running.cancel_all()

    def reload(self) -> None:
        """Load the catalogue and the jobs again; requests that are running keep what they began with.

        Raises `SettingError` if the file is invalid, and then nothing changes.
        """
        if self._load is None:
            raise SettingError(f"{self.name} was started without --config, so there is nothing to reload")
        catalogue, jobs = self._load()
        self._pool.configure(catalogue.settings)
        self._catalogue, self._jobs = catalogue, dict(jobs)
        self._schemas.clear()
        counts = {"table": len(catalogue.tables), "catalog": len(catalogue.catalogs), "job": len(jobs)}
        log.info("reloaded: %s", ", ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items()))

    # ── the services ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sql(self, request: Request) -> Iterator[bytes]:
        """Handle a request to `spark.sql`."""
        return self._run(request, parse_query(request))

    def job(self, request: Request) -> Iterator[bytes]:
        """Handle a request to `spark.job`."""
        return self._run(request, parse_call(request, self._jobs))

    def fetch(self, request: Request) -> Iterator[bytes]:
        """Handle a request for a large result."""
        return handle(request, self._history)

    def _run(self, request: Request, spec: Query | JobCall) -> Generator[bytes, None, list[bytes]]:
        """Yield the PARTIALs of a request and return the frames of its FINAL."""
        request_id = request.headers.get(REQUEST_ID, "")
        losses, reported = self._history.losses(request_id, request.user, spec.text)
        if losses >= MAX_LOSSES:
            raise gave_up(losses, reported)
        with ExitStack() as stack:
            if losses:  # so that it costs others no second run, nor they it
                yield from _wait(request, lambda: self._suspect.acquire(timeout=1.0) or None)
                stack.callback(self._suspect.release)
            session = yield from _wait(request, self._acquire_session)
            job = Job(spec, request.user, session, self._work)
            self._running.add(job)
            kind = "sql" if isinstance(spec, Query) else "job"
            self._history.begin(job.id, user=job.owner, service=kind, what=spec.text, request_id=request_id)
            log.info("job %s%s: %s", job.id, f" of {job.owner}" if job.owner else "", job.title)
            job.start()
            try:
                yield _event("started", job, driver=self.name)
                yield from self._watch(request, job)
            finally:
                # Also runs when the caller has gone: the worker then closes this generator.
                gone = self._end(job)
                self._running.remove(job)
                error = self._record(job, lost=gone)
            if gone and request_id and losses + 1 >= MAX_LOSSES and error is not None:
                raise gave_up(losses + 1, str(error))
            if error is not None:
                raise error
            return job.outcome if isinstance(job.outcome, list) else []

    def _acquire_session(self) -> JobSession | None:
        try:
            return self._pool.acquire(1.0)
        except ZmdpError as error:
            log.error("%s", error)
            raise ServiceError(Code.WORKER_LOST, str(error)) from None

    def _watch(self, request: Request, job: Job) -> Iterator[bytes]:
        sent = Progress()
        sent_at = checked_at = time.monotonic()
        while not job.ended.wait(POLL_SECONDS):
            if request.cancelled or job.cancelled.is_set():
                return
            now = time.monotonic()
            yield from self._yielded(job)
            pause = next(pause for age, pause in PROGRESS_INTERVALS if now - job.started < age)
            if now - checked_at < pause:
                continue
            checked_at = now
            progress = job.progress()
            if progress is not None and (progress != sent or now - sent_at >= KEEP_ALIVE_SECONDS):
                sent, sent_at = progress, now
                yield _event("progress", job, seconds=round(now - job.started, 2), **asdict(progress))
        yield from self._yielded(job)

    def _yielded(self, job: Job) -> Iterator[bytes]:
        while not job.yielded.empty():
            yield _event("yielded", job, value=plain(job.yielded.get()))

    def _end(self, job: Job) -> bool:
        """Cancel the job unless it has ended, and release its session.  Return whether Spark was lost."""
        until = time.monotonic() + CANCEL_GRACE_SECONDS
        while not job.ended.wait(0) and time.monotonic() < until:
            job.cancel()
            job.ended.wait(POLL_SECONDS)
        if job.ended.is_set():
            failed = isinstance(job.outcome, BaseException) and not job.cancelled.is_set()
            return self._release(job, failed=failed)
        log.error("job %s was cancelled, but its Python code is still running; its Spark jobs stay cancelled", job.id)
        threading.Thread(target=self._cancel_until_ended, args=(job,), name=f"cancel-{job.id}", daemon=True).start()
        return False

    def _cancel_until_ended(self, job: Job) -> None:
        """Repeatedly cancel everything that a job that does not stop starts in Spark, then release its session."""
        while not job.ended.wait(1.0):
            job.cancel()
        self._release(job)

    def _release(self, job: Job, *, failed: bool = False) -> bool:
        # A query cannot change its session; a job may have set or registered anything.
        return self._pool.release(job.session, failed=failed, changed=isinstance(job.spec, JobCall))

    def _record(self, job: Job, *, lost: bool) -> RequestCancelled | ServiceError | None:
        """Record how the job ended, in the log and the history.  Return the error for its caller, if any."""
        seconds = time.monotonic() - job.started
        ui = spark_ui(job.id)
        outcome = job.outcome
        if job.cancelled.is_set():
            log.info("job %s: cancelled after %.1f s", job.id, seconds)
            self._history.end(job.id, "cancelled", ui=ui)
            return RequestCancelled(f"job {job.id} was cancelled")
        if not isinstance(outcome, BaseException):
            log.info("job %s: done after %.1f s", job.id, seconds)
            described = json.loads(outcome[0])
            result = {name: described.get(name) for name in ("format", "rows", "path")}
            self._history.end(job.id, "done", ui=ui, **result)
            return None
        error = lost_error(job.id, outcome) if lost else failure(outcome)
        trace = None if lost else python_traceback(outcome)
        state = "lost" if lost else "failed"
        at_fault = log.info if error.code == UNPROCESSABLE else log.error
        at_fault("job %s: failed after %.1f s: %s%s", job.id, seconds, error.text, f"\n{trace}" if trace else "")
        self._history.end(job.id, state, ui=ui, code=error.code, error=error.text, traceback=trace)
        return error

    # ── in the job's thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, job: Job) -> list[bytes]:
        """Run a job while the catalogue's tables are offered.  Returns the frames of the FINAL."""
        with request_tables(job.session.spark, self._catalogue, self._schemas) as tables:
            if isinstance(job.spec, Query):
                return self._run_query(job.spec, job, tables)
            return self._run_job(job.spec, job, tables)

    def _run_query(self, spec: Query, job: Job, tables: RequestTables) -> list[bytes]:
        spark = job.session.spark
        spark.conf.set(ON_FILES, "false")
        tables.provide(spec.text, spec.args)
        try:
            # As a subquery, only a query parses: spark.sql() runs a command as soon as it has parsed it.  Callers may
            # send any query, so there is nothing to quote.
            checked = spark.sql(f"SELECT * FROM (\n{spec.text}\n)", args=spec.args)  # noqa: S608
        except Exception as error:  # noqa: BLE001 - any other error is raised again below, with the caller's own text
            if any(kind.__name__ == "ParseException" for kind in type(error).__mro__):
                text = _LINE.sub(lambda found: f"line {int(found.group(1)) - 1}", reason(error))
                raise ServiceError(UNPROCESSABLE, f"not a valid query: {text}; {ONLY_QUERIES}", detail(error)) from None
        else:
            unsafe = job.session.find_unsafe(spec.text, checked)
            if unsafe is not None:
                raise unprocessable(f"{unsafe!r} is not allowed in a query because it can run programs; use spark.job")
            tables.check_catalogs(job.session.tables_read(checked))
        return self._results.frames(spark.sql(spec.text, args=spec.args), job.id, spec.format)

    def _run_job(self, spec: JobCall, job: Job, tables: RequestTables) -> list[bytes]:
        spark = job.session.spark
        register_when_named(spark, tables)
        spark.conf.set(ON_FILES, "true")
        result = spec.function(spark, **spec.arguments)
        if isinstance(result, Iterator):
            while True:
                try:
                    value = next(result)
                except StopIteration as end:
                    result = end.value
                    break
                job.send(value)
        return self._results.frames(result, job.id, spec.format)

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _status(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del arguments
        return {
            "kind": "batch",
            "name": self.name,
            "version": __version__,
            "master": self._master,
            "services": self.services,
            "draining": self.draining.is_set(),
            "tables": sorted(self._catalogue.tables),
            "catalogs": sorted(self._catalogue.catalogs),
            "jobs": sorted(self._jobs),
            "ui": spark_ui(),
            **self._running.status(request),
        }

    def _cancel(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        return {"cancelled": self._running.cancel(str(arguments.get("job")), request)}

    def _reload(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del arguments, request
        try:
            self.reload()
        except SettingError as error:
            log.error("not reloaded: %s", error)
            raise unprocessable(str(error)) from None
        catalogue = self._catalogue
        return {"tables": len(catalogue.tables), "catalogs": len(catalogue.catalogs), "jobs": len(self._jobs)}

    def _show_history(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        job = arguments.get("job")
        return {"jobs": self._history.rows(request, None if job is None else str(job))}

    def _drain(self, arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del arguments, request
        log.info("draining, as asked by mdp-spark drain; running jobs are finished first")
        self.draining.set()
        return {"running": len(self._running)}


def _wait(request: Request, attempt: Callable[[], Found | None]) -> Generator[bytes, None, Found]:
    """Yield PARTIALs until `attempt`, which takes about a second, returns something; return that."""
    sent_at = float("-inf")
    while not request.cancelled:
        found = attempt()
        if found is not None:
            return found
        if time.monotonic() - sent_at >= KEEP_ALIVE_SECONDS:
            sent_at = time.monotonic()
            yield json.dumps({"event": "waiting"}).encode()
    raise RequestCancelled("cancelled before it started")


def _event(event: str, job: Job, **more: Any) -> bytes:
    return json.dumps({"event": event, "job": job.id, **more}, ensure_ascii=False, default=str).encode()

"""Run requests to a batch: each is a job with an id, on a session and in a thread of its own.

The PARTIALs of a request report events, each as one frame of JSON:

    {"event": "started", "job": id, "driver": name}
    {"event": "waiting"}                                     for a free session, or for Spark to start
    {"event": "progress", "job": id, "seconds": s, "stages": n, "stages_done": n, "tasks": n, …}
    {"event": "yielded", "job": id, "value": …}              from a job that is a generator

Its FINAL is the result (`results/sending.py`), in the type that the caller accepts (`results/media.py`).  When a
request is cancelled, by its caller, by its deadline or because the caller disconnects, its Spark jobs are cancelled.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from ...mdp.codes import Code
from ...mdp.errors import RequestCancelled, ServiceError, ZmdpError
from ...mdp.tracing import REQUEST_ID
from ...workers import Request
from .catalogue.offer import Offer
from .execution import execute
from .failures import UNPROCESSABLE, failure, gave_up, lost_error, python_traceback
from .job_history import History
from .parsing import JobCall, Query
from .progress import Progress, spark_ui
from .results.media import MEDIA_TYPES, media_type_of, rendered
from .results.sending import Results
from .running_jobs import POLL_SECONDS, Job, RunningJobs
from .sessions import JobSession, SessionPool

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

Found = TypeVar("Found")
Part: TypeAlias = bytes | list[bytes]
"""The frame, or the frames, of a PARTIAL."""

log = logging.getLogger("zmdp.spark")


class JobRunner:
    """Runs the requests of the batch `name`, and knows which are running."""

    def __init__(self, name: str, pool: SessionPool, results: Results, history: History) -> None:
        self.running = RunningJobs()
        self._name = name
        self._pool = pool
        self._results = results
        self._history = history
        self._suspect = threading.Semaphore()
        """Held by a request during which Spark was lost before: only one of them runs at a time."""

    def run(self, request: Request, spec: Query | JobCall, offer: Offer) -> Generator[Part, None, list[bytes]]:
        """Yield the PARTIALs of a request and return the frames of its FINAL."""
        kind = media_type_of(request)
        if kind is not None:
            spec = replace(spec, format=MEDIA_TYPES[kind])
        request_id = request.headers.get(REQUEST_ID, "")
        losses, reported = self._history.losses(request_id, request.user, spec.text)
        if losses >= MAX_LOSSES:
            raise gave_up(losses, reported)
        with ExitStack() as stack:
            if losses:  # so that it costs others no second run, nor they it
                yield from _wait(request, lambda: self._suspect.acquire(timeout=1.0) or None)
                stack.callback(self._suspect.release)
            acquire = partial(self._acquire_session, spec)
            session: Any = yield from _wait(request, acquire)  # mypy joins both kinds to `object`
            work = partial(execute, offer, self._results, offer.catalogue.role_of(request))
            job = Job(spec, request.user, session, work)
            self.running.add(job)
            service = "sql" if isinstance(spec, Query) else "job"
            self._history.begin(job.id, user=job.owner, service=service, what=spec.text, request_id=request_id)
            log.info("job %s%s: %s", job.id, f" of {job.owner}" if job.owner else "", job.title)
            job.start()
            try:
                yield _event("started", job, driver=self._name)
                yield from self._watch(request, job)
            finally:
                # Also runs when the caller has gone: the worker then closes this generator.
                gone = self._end(job)
                error = self._record(job, lost=gone)
            if gone and request_id and losses + 1 >= MAX_LOSSES and error is not None:
                raise gave_up(losses + 1, str(error))
            if error is not None:
                raise error
            result = job.outcome if isinstance(job.outcome, list) else []
            return rendered(kind, result) if kind is not None and result else result

    def _acquire_session(self, spec: Query | JobCall) -> JobSession | None:
        try:
            return self._pool.acquire(1.0, new=isinstance(spec, JobCall))
        except ZmdpError as error:
            log.error("%s", error)
            raise ServiceError(Code.WORKER_LOST, str(error)) from None

    def _watch(self, request: Request, job: Job) -> Iterator[Part]:
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

    def _yielded(self, job: Job) -> Iterator[Part]:
        while not job.yielded.empty():
            described, frames = job.yielded.get()
            yield [_event("yielded", job, **described), *frames]

    def _end(self, job: Job) -> bool:
        """Cancel the job unless it has ended, and release its session.  Return whether Spark was lost."""
        until = time.monotonic() + CANCEL_GRACE_SECONDS
        while not job.ended.wait(0) and time.monotonic() < until:
            job.cancel()
            job.ended.wait(POLL_SECONDS)
        if job.ended.is_set():
            failed = isinstance(job.outcome, BaseException) and not job.cancelled.is_set()
            return self._release(job, failed=failed)
        log.error(
            "job %s was cancelled, but still runs, and keeps its session: neither Python code nor Spark's planning can "
            "be interrupted; its Spark jobs stay cancelled",
            job.id,
        )
        threading.Thread(target=self._cancel_until_ended, args=(job,), name=f"cancel-{job.id}", daemon=True).start()
        return False

    def _cancel_until_ended(self, job: Job) -> None:
        """Repeatedly cancel everything that a job that does not stop starts in Spark, then release its session."""
        while not job.ended.wait(1.0):
            job.cancel()
        self._release(job)

    def _release(self, job: Job, *, failed: bool = False) -> bool:
        self.running.remove(job)
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
        trace = None if lost else python_traceback(outcome, of_job=isinstance(job.spec, JobCall))
        state = "lost" if lost else "failed"
        at_fault = log.info if error.code == UNPROCESSABLE else log.error
        at_fault("job %s: failed after %.1f s: %s%s", job.id, seconds, error.text, f"\n{trace}" if trace else "")
        self._history.end(job.id, state, ui=ui, code=error.code, error=error.text, traceback=trace)
        return error


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
    text = json.dumps({"event": event, "job": job.id, **more}, ensure_ascii=False)
    return text.encode(errors="replace")  # Python has surrogates in the names of files that are not UTF-8

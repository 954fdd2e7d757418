"""The running jobs of a batch, their owners, and the rights to see and cancel them."""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from ...mdp.cli.console import printable
from ...mdp.errors import RequestCancelled
from ...workers import Request
from .failures import check_owner
from .parsing import JobCall, Query
from .progress import Progress, spark_ui
from .results.sending import JOB_LENGTH
from .sessions import JobSession

POLL_SECONDS: Final = 0.1
"""Interval at which a job's two threads check whether the request was cancelled."""
MAX_YIELDED_AHEAD: Final = 1000
"""Values that a generator may yield before the worker thread has sent them."""
MANY_BYTES: Final = 64 << 10
"""Size of a table before which all others must have been sent."""

log = logging.getLogger("zmdp.spark")


class Job:
    """One running request: its own thread uses Spark, and the worker's thread watches it.

    `owner` is the user who sent the request; it is empty without access control.
    """

    def __init__(
        self, spec: Query | JobCall, owner: str, session: JobSession, work: "Callable[[Job], list[bytes]]"
    ) -> None:
        self.id = secrets.token_hex(JOB_LENGTH // 2)
        self.spec = spec
        self.title = printable(spec.text.strip())[:200]
        self.owner = owner
        self.session = session
        self.started = time.monotonic()
        self.cancelled = threading.Event()
        self.yielded: queue.Queue[tuple[dict[str, Any], list[bytes]]] = queue.Queue(MAX_YIELDED_AHEAD)
        self.ended = threading.Event()
        self.outcome: list[bytes] | BaseException = []
        self._work = work

    def start(self) -> None:
        """Start the job's thread."""
        threading.Thread(target=self._run, name=f"job-{self.id}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.session.begin(self.id)
            self.outcome = self._work(self)
        except BaseException as error:  # noqa: BLE001 - whatever a user's job raises is its outcome
            self.outcome = error
        finally:
            self.ended.set()

    def raise_if_cancelled(self) -> None:
        """Raise `RequestCancelled` if the job was cancelled: between two steps that Spark cannot interrupt."""
        if self.cancelled.is_set():
            raise RequestCancelled("cancelled")

    def send(self, described: dict[str, Any], frames: list[bytes]) -> None:
        """Queue a yielded value for sending, once there is room: fields of the event, and further frames.

        Called in the job's thread; raises `RequestCancelled`.
        """
        large = sum(map(len, frames)) > MANY_BYTES
        while not self.cancelled.is_set():
            if large and not self.yielded.empty():
                time.sleep(POLL_SECONDS)
                continue
            with suppress(queue.Full):
                self.yielded.put((described, frames), timeout=POLL_SECONDS)
                return
        self.raise_if_cancelled()

    def cancel(self) -> None:
        """Cancel the job's current work in Spark.  Call it again for work that the thread starts afterwards."""
        self.cancelled.set()
        with suppress(Exception):  # the session is lost, and the job with it
            self.session.cancel(self.id)

    def progress(self) -> Progress | None:
        """Return the progress, or None if Spark cannot report it now."""
        with suppress(Exception):
            return self.session.progress()
        return None

    def described(self, caller: Request) -> dict[str, Any]:
        """Return the job's row for `mdp-spark status`; only callers who may manage the job see its text."""
        progress = self.progress() or Progress()
        return {
            "job": self.id,
            "user": self.owner,
            "what": self.title if caller.may_manage(self.owner) else None,
            "seconds": round(time.monotonic() - self.started, 1),
            "state": "cancelling" if self.cancelled.is_set() else "running",
            "ui": spark_ui(self.id),
            **asdict(progress),
        }


class RunningJobs:
    """The running jobs by their ids, also those that were given up, and how many have ended.  Safe from any thread."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._ended = {"done": 0, "failed": 0, "cancelled": 0}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Record a job that is about to start."""
        with self._lock:
            self._jobs[job.id] = job

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        ending = "failed" if isinstance(job.outcome, BaseException) else "done"
        ending = "cancelled" if job.cancelled.is_set() else ending
        with self._lock:
            del self._jobs[job.id]
            self._ended[ending] += 1

    def cancel(self, job_id: str, caller: Request) -> bool:
        """Cancel a job for `caller`.  Return whether it was running.

        Raises `ServiceError` 403 if the job belongs to someone else and the caller is not an admin.
        """
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            return False
        check_owner(caller, job_id, job.owner, "cancel it")
        log.info("job %s: cancelled by mdp-spark cancel%s", job_id, f" of {caller.user}" if caller.user else "")
        job.cancel()
        return True

    def describe(self) -> str:
        """Name the running jobs."""
        return ", ".join(f"job {job.id} ({job.title})" for job in self._running())

    def cancel_all(self) -> None:
        """Cancel all jobs."""
        for job in self._running():
            job.cancel()

    def status(self, caller: Request) -> dict[str, Any]:
        """Return the part of a batch's status that is about jobs, as `caller` may see it."""
        return {"running": [job.described(caller) for job in self._running()], **self._ended}

    def _running(self) -> list[Job]:
        with self._lock:
            return list(self._jobs.values())

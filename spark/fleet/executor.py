"""The executor's side of a fleet: serve a service for the length of a lease."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...clients import Client
from ...mdp.errors import SettingError, ZmdpError
from ...mdp.program import logs
from ...mdp.program.arguments import is_async
from ...mdp.program.control_services import SPARK
from ...mdp.program.loading import load
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.reach import check_listening, why_none_reachable
from ...workers import AsyncWorker, Worker
from .settings import FleetSettings
from .slots import Lease

REPORT_SECONDS: Final = 1.0
"""Interval between reports to the driver."""
FIRST_REPORTS_SECONDS: Final = 0.2
"""Interval between reports until the broker knows the worker."""
REPORT_TIMEOUT_SECONDS: Final = 5.0
"""How long the driver may take to answer a report, at most until the lease ends."""
BROKER_TIMEOUT_SECONDS: Final = 5.0
"""How long the broker may take to answer `mdp-spark doctor`."""
STUCK_GRACE_SECONDS: Final = 5.0
"""How long a handler past its timeout may take to return before its process is ended."""

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True)
class LeaseTask:
    """A lease as it is sent to an executor, with the keys: so they are in no file, setting or command."""

    settings: FleetSettings
    run: str
    """A secret that only the driver and its tasks know."""
    reports: str
    """The service that receives the reports; no other driver offers it, though two fleets may have the same name."""
    lease: Lease
    paths: tuple[str, ...] = ()
    """Folders from which the task imports the handler."""


def serve(task: LeaseTask, rows: Iterator[object]) -> Iterator[dict[str, Any]]:
    """Serve until the lease is over or the driver asks the task to drain, then yield one description of how it ended:

        {"host": …, "served": n, "unreachable": why no broker was reached, or None}
        {"host": …, "refused": why}

    A problem with the executor is returned, not raised, so that the driver can distinguish it from a crash.
    """
    for _ in rows:  # Spark reuses the Python process, with its imports, only if the task has read all of its input
        pass
    host, settings = socket.gethostname(), task.settings
    logs.configure(settings.log_level, settings.log_format)
    try:
        worker = _make_worker(task, _load_handler(task))
    except (ZmdpError, ImportError) as error:  # for example, the codec's package is missing
        yield {"host": host, "refused": str(error)}
        return
    # Between reports nothing is outstanding, so the client does not watch the broker's heartbeats.
    with Client(
        settings.addresses, timeout=REPORT_TIMEOUT_SECONDS, retries=0, heartbeat=settings.heartbeat,
        liveness=settings.liveness, key=settings.keys,
    ) as client:  # fmt: skip
        reporter = _Reporter(task, client, host, worker)
        try:
            reporter.report_until_due()
        finally:
            worker.stop()
            reporter.finish_requests()
    reached = reporter.was_answered
    unreachable = None if reached else why_none_reachable(settings.addresses, settings.keys) or "no answer"
    yield {"host": host, "served": worker.served, "unreachable": unreachable}


# ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_handler(task: LeaseTask) -> Callable[[Any], Any]:
    """Import the task's handler.  Raises `SettingError`."""
    for path in task.paths:
        if path not in sys.path and Path(path).is_dir():
            sys.path.insert(0, path)
    name = task.settings.handler
    try:
        found = load(name, "MODULE:FUNCTION, for example zmdp.workers.examples:repeat")
    except SettingError as error:
        raise SettingError(
            f"{error}. Ship your own modules with --py-files, installed packages with --archive (docs/spark/fleet.md)"
        ) from None
    if not callable(found) or isinstance(found, type | Worker | AsyncWorker):
        raise SettingError(f"{name} is of type {type(found).__name__}: a fleet needs a function that takes a request")
    return found


def _make_worker(task: LeaseTask, handler: Callable[[Any], Any]) -> Worker | AsyncWorker:
    """Return the worker for this kind of handler.

    Raises `SettingError` if a setting is invalid, and `ImportError` if the codec's package is missing.
    """
    settings = task.settings
    kind: Callable[..., Worker | AsyncWorker] = AsyncWorker if is_async(handler) else Worker
    return kind(
        settings.service, handler, broker=settings.addresses, concurrency=settings.concurrency, codec=settings.codec,
        heartbeat=settings.heartbeat, liveness=settings.liveness, handler_timeout=settings.handler_timeout,
        name=f"{SPARK}{settings.name} slot {task.lease.slot}", key=settings.keys,
    )  # fmt: skip


def _start(worker: Worker | AsyncWorker) -> Callable[[float], bool]:
    """Start a worker.  Return a function that waits for its end, up to some seconds, and tells whether it has ended."""
    if isinstance(worker, Worker):
        worker.start()
        return worker.wait
    loop = ThreadPoolExecutor(1, "event-loop")
    running = loop.submit(asyncio.run, worker.run())
    loop.shutdown(wait=False)

    def wait(seconds: float) -> bool:
        try:
            running.result(seconds)
        except TimeoutError:
            return False
        return True

    return wait


# ── the lease ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Reporter:
    """Reports to the driver once a second, and learns from the answer whether to drain.

    If the driver does not answer, the task continues until its lease ends.
    """

    def __init__(self, task: LeaseTask, client: Client, host: str, worker: Worker | AsyncWorker) -> None:
        self.was_answered = False
        """Whether the driver ever answered a report."""
        self._task = task
        self._client = client
        self._worker = worker
        self._wait = _start(worker)
        self._until = time.monotonic() + task.lease.seconds
        self._report = {
            "run": task.run, "slot": task.lease.slot, "lease": task.lease.number, "host": host, "pid": os.getpid(),
            "executor": executor_id(), "concurrency": worker.settings.concurrency,
        }  # fmt: skip

    def report_until_due(self) -> None:
        """Report until the lease is over or the driver asks the task to drain."""
        while not self._asks_to_drain() and (left := self._until - time.monotonic()) > 0:
            if self._wait(min(REPORT_SECONDS if self._worker.registered else FIRST_REPORTS_SECONDS, left)):
                return

    def finish_requests(self) -> None:
        """Wait until running requests are done, reporting in the meantime."""
        timeout = self._task.settings.handler_timeout
        limit = None if timeout is None else time.monotonic() + timeout + STUCK_GRACE_SECONDS
        while not self._wait(REPORT_SECONDS):
            self._asks_to_drain()
            if limit is not None and time.monotonic() > limit:
                # The request has gone to another worker.  A thread cannot be killed, but its process can.
                service = self._task.settings.service
                log.error("%s: a handler does not return; ending process %d", service, os.getpid())
                os._exit(1)

    def _asks_to_drain(self) -> bool:
        """Report once.  Return whether the driver asks to drain."""
        report = {**self._report, "served": self._worker.served, "registered": self._worker.registered}
        limit = min(REPORT_TIMEOUT_SECONDS, max(REPORT_SECONDS, self._until - time.monotonic()))
        try:
            answer = json.loads(
                self._client.request(self._task.reports, json.dumps(report).encode(), wait=False, timeout=limit)[0]
            )
        except (ZmdpError, ValueError):
            return False
        self.was_answered = True
        return isinstance(answer, dict) and answer.get("drain") is True


def executor_id() -> str | None:
    """Return the id of this Python's executor: `driver` in local mode, None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()
        command = Path(f"/proc/{daemon[1]}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return command[command.index("--executor-id") + 1] if "--executor-id" in command else "driver"
    return None


def probe(broker: tuple[str, ...], keys: ClientKeys | None, rows: Iterator[object]) -> Iterator[dict[str, Any]]:
    """Yield a report for `mdp-spark doctor`: {"host": …, "python": version, "broker": problem, or None}."""
    for _ in rows:
        pass
    problem = None
    try:
        check_listening(broker, keys)
        with Client(broker, timeout=BROKER_TIMEOUT_SECONDS, retries=0, key=keys) as client:
            client.request("mmi.service", b"any")
    except ZmdpError as error:
        problem = str(error)
    yield {"host": socket.gethostname(), "python": ".".join(map(str, sys.version_info[:3])), "broker": problem}

"""The executor's side of a fleet: serve a service for the length of a lease.

This module imports only the standard library, so that an executor without pyzmq can report that.
"""

import contextlib
import importlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ...clients import Client
    from ...mdp.keys import ClientKeys
    from ...workers import Worker

REPORT_SECONDS: Final = 1.0
"""Interval between reports to the driver, and how long the driver may take to answer."""
BROKER_TIMEOUT_SECONDS: Final = 5.0
"""How long the broker may take to answer `mdp-spark doctor`."""
STUCK_GRACE_SECONDS: Final = 5.0
"""How long a handler past its timeout may take to return before its process is ended."""

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True)
class LeaseTask:
    """A lease as it is sent to an executor."""

    fleet: str
    """Identifies this run of the fleet, because a driver that reuses a name also gets its predecessor's reports."""
    control: str
    """The driver's control service."""
    slot: int
    lease: int
    seconds: float
    service: str
    handler: str
    """MODULE:FUNCTION."""
    broker: tuple[str, ...]
    codec: str | None
    heartbeat: float
    liveness: int
    handler_timeout: float | None
    paths: tuple[str, ...]
    """Folders to import from."""
    log_level: str
    log_format: str
    keys: tuple[bytes, ...] | None = field(default=None, repr=False)
    """The fields of `ClientKeys`.  Spark ships them as part of the task, so they are in no file, setting or command."""

    def client_keys(self) -> "ClientKeys | None":
        """Return the keys for connections to the broker."""
        from ...mdp.keys import ClientKeys  # noqa: PLC0415 - see the module's docstring

        return None if self.keys is None else ClientKeys(*self.keys)


class _CannotServe(Exception):
    """This executor cannot serve; the message says why."""


def serve(task: LeaseTask, rows: Iterator[object]) -> Iterator[dict[str, Any]]:
    """Serve until the lease is over or the driver asks the task to drain, then yield one description of how it ended:

        {"host": …, "served": n, "unreachable": why no broker was reached, or None}
        {"host": …, "refused": why}

    A problem with the executor is returned, not raised, so that the driver can distinguish it from a crash.
    """
    for _ in rows:  # Spark reuses the Python process, with its imports, only if the task has read all of its input
        pass
    host = socket.gethostname()
    from ...mdp import logs  # noqa: PLC0415 - see the module's docstring

    logs.configure(task.log_level, task.log_format)
    try:
        handler = _Counted(_load_handler(task))
        worker = _make_worker(task, handler)
    except _CannotServe as error:
        yield {"host": host, "refused": str(error)}
        return
    from ...clients import Client  # noqa: PLC0415 - see the module's docstring

    # Between reports nothing is outstanding, so the client does not watch the broker's heartbeats.
    with Client(
        task.broker, timeout=REPORT_SECONDS, retries=0, heartbeat=task.heartbeat, liveness=task.liveness,
        key=task.client_keys(),
    ) as client:  # fmt: skip
        reporter = _Reporter(task, client, host, handler)
        with worker:
            reporter.report_until_due()
            worker.stop()
            _finish_requests(task, worker, reporter)
    yield {
        "host": host,
        "served": handler.calls,
        "unreachable": None if reporter.was_answered else _why_unreachable(task),
    }


# ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_handler(task: LeaseTask) -> Callable[[Any], Any]:
    """Import the task's handler.  Raises `_CannotServe`."""
    for path in task.paths:
        if path not in sys.path and Path(path).is_dir():
            sys.path.insert(0, path)
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        import zmq  # noqa: F401, PLC0415
    except ImportError as error:
        raise _CannotServe(
            f"Python {python} at {sys.executable} has no pyzmq ({error}): install it there, or ship an environment "
            "made by `mdp-spark pack` with --archive"
        ) from None
    from ...mdp.errors import SettingError  # noqa: PLC0415
    from ...mdp.loading import load  # noqa: PLC0415
    from ...workers import AsyncWorker, Worker  # noqa: PLC0415
    from ...workers.handling import is_async  # noqa: PLC0415

    try:
        found = load(task.handler, "MODULE:FUNCTION, for example zmdp.workers.echo:echo")
    except SettingError as error:
        raise _CannotServe(
            f"{error}. Ship your own modules with --py-files, and installed packages with --archive "
            "(see `mdp-spark pack --requirement`)"
        ) from None
    if is_async(found):
        raise _CannotServe(f"{task.handler} is asynchronous: a fleet needs a plain function or generator function")
    if not callable(found) or isinstance(found, type | Worker | AsyncWorker):
        raise _CannotServe(
            f"{task.handler} is of type {type(found).__name__}: a fleet needs a function that takes a request"
        )
    return found


def _make_worker(task: LeaseTask, handler: "_Counted") -> "Worker":
    from ...mdp.errors import ZmdpError  # noqa: PLC0415
    from ...workers import Worker  # noqa: PLC0415

    try:
        return Worker(
            task.service, handler, broker=task.broker, codec=task.codec, heartbeat=task.heartbeat,
            liveness=task.liveness, handler_timeout=task.handler_timeout, name=f"{task.control} slot {task.slot}",
            key=task.client_keys(),
        )  # fmt: skip
    except (ZmdpError, ImportError) as error:  # for example, the codec's package is missing
        raise _CannotServe(str(error)) from None


class _Counted:
    """A handler that counts its calls."""

    def __init__(self, handler: Callable[[Any], Any]) -> None:
        self._handler = handler
        self.calls = 0

    def __call__(self, argument: Any) -> Any:
        self.calls += 1
        return self._handler(argument)


# ── the lease ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Reporter:
    """Reports to the driver once a second, and learns from the answer whether to drain.

    If the driver does not answer, the task continues until its lease ends.
    """

    def __init__(self, task: LeaseTask, client: "Client", host: str, handler: _Counted) -> None:
        self.was_answered = False
        """Whether the driver ever answered a report."""
        self._task = task
        self._client = client
        self._handler = handler
        self._until = time.monotonic() + task.seconds
        self._report = {
            "op": "slot", "fleet": task.fleet, "slot": task.slot, "lease": task.lease,
            "host": host, "pid": os.getpid(), "executor": executor_id(),
        }  # fmt: skip

    def report_until_due(self) -> None:
        """Report until the lease is over or the driver asks the task to drain."""
        pause = threading.Event()
        while not self.report() and (left := self._until - time.monotonic()) > 0:
            pause.wait(min(REPORT_SECONDS, left))

    def report(self) -> bool:
        """Report once.  Return whether to drain."""
        from ...mdp.errors import ZmdpError  # noqa: PLC0415

        report = json.dumps({**self._report, "served": self._handler.calls}).encode()
        try:
            answer = json.loads(self._client.request(self._task.control, report, wait=False)[0])
        except (ZmdpError, ValueError):
            return False
        self.was_answered = True
        return isinstance(answer, dict) and answer.get("drain") is True


def _finish_requests(task: LeaseTask, worker: "Worker", reporter: _Reporter) -> None:
    """Wait until running requests are done, reporting in the meantime."""
    limit = None if task.handler_timeout is None else time.monotonic() + task.handler_timeout + STUCK_GRACE_SECONDS
    while not worker.wait(REPORT_SECONDS):
        reporter.report()
        if limit is not None and time.monotonic() > limit:
            # The request has gone to another worker.  A thread cannot be killed, but its process can.
            log.error("%s: a handler does not return; ending process %d", task.service, os.getpid())
            os._exit(1)


def _why_unreachable(task: LeaseTask) -> str:
    from ...mdp.transport.reach import why_none_reachable  # noqa: PLC0415

    return why_none_reachable(task.broker, task.client_keys()) or "no answer"


def executor_id() -> str | None:
    """Return the id of this Python's executor: `driver` in local mode, None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()
        command = Path(f"/proc/{daemon[1]}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return command[command.index("--executor-id") + 1] if "--executor-id" in command else "driver"
    return None


# ── the probe of `mdp-spark doctor` ──────────────────────────────────────────────────────────────────────────────────


def probe(broker: tuple[str, ...], keys: tuple[bytes, ...] | None, rows: Iterator[object]) -> Iterator[dict[str, Any]]:
    """Yield one description of this executor, in which None means that the check passed:

    {"host": …, "executor": …, "python": version, "pyzmq": problem, "zmdp": problem, "broker": problem}
    """
    for _ in rows:
        pass
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "executor": executor_id(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "pyzmq": None,
        "zmdp": None,
        "broker": "not checked",
    }
    for name, module in (("pyzmq", "zmq"), ("zmdp", "zmdp.clients")):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever the import raises is the finding
            found[name] = f"{type(error).__name__}: {error}"
            yield found
            return
    from ...clients import Client  # noqa: PLC0415
    from ...mdp.errors import ZmdpError  # noqa: PLC0415
    from ...mdp.keys import ClientKeys  # noqa: PLC0415
    from ...mdp.transport.reach import check_listening  # noqa: PLC0415

    own = None if keys is None else ClientKeys(*keys)
    try:
        check_listening(broker, own)
        with Client(broker, timeout=BROKER_TIMEOUT_SECONDS, retries=0, key=own) as client:
            client.request("mmi.service", b"any")
        found["broker"] = None
    except ZmdpError as error:
        found["broker"] = str(error)
    yield found

"""What an executor does for a fleet: it serves a service for the time of a lease.

Only the standard library is imported with this module, so that an executor without pyzmq can say so.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ...clients import Client
    from ...workers import Worker

REPORT: Final = 1.0
"""Seconds between two reports to the driver, and how long it has to answer one."""
PATIENCE: Final = 5.0
"""Seconds that the broker has to answer a probe."""
STUCK: Final = 5.0
"""Seconds that a handler which is past its time-out has to return, before its process is ended."""

log = logging.getLogger("zmdp.spark")


@dataclass(frozen=True)
class Task:
    """A lease, as an executor gets it."""

    fleet: str
    """Which run of a fleet it is of: a driver that got its predecessor's name hears its predecessor's tasks."""
    control: str
    """The driver's control service."""
    slot: int
    lease: int
    seconds: float
    service: str
    handler: str
    """MODULE:FUNCTION."""
    broker: str
    codec: str | None
    heartbeat: float
    liveness: int
    handler_timeout: float | None
    paths: tuple[str, ...]
    """Folders to import from."""
    log_level: str


class _Unusable(Exception):
    """This executor cannot serve; says why."""


def serve(task: Task, nothing: Iterator[object]) -> Iterator[dict[str, Any]]:
    """Serve for the time of the lease, or until the driver says that it is enough; yields one description of how it
    ended:

        {"host": …, "served": n, "unreachable": why no broker was reached, or None}
        {"host": …, "refused": why}

    What is wrong with the executor is returned, not raised: the driver has to tell it from a death.
    """
    for _ in nothing:  # a Python that has read all of its input is used again, with what it has imported
        pass
    host = socket.gethostname()
    logging.basicConfig(
        level=task.log_level, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    try:
        handler = _Counted(_handler(task))
        worker = _worker(task, handler)
    except _Unusable as error:
        yield {"host": host, "refused": str(error)}
        return
    from ...clients import Client  # noqa: PLC0415 - see the module's docstring

    # Nothing is outstanding between two reports, and then nobody listens to heartbeats.
    with Client(task.broker, timeout=REPORT, retries=0, heartbeat=task.heartbeat, liveness=task.liveness) as client:
        reporter = _Reporter(task, client, host, handler)
        with worker:
            reporter.until_over()
            worker.stop()
            _finish(task, worker, reporter)
    yield {"host": host, "served": handler.calls, "unreachable": None if reporter.heard else _why(task.broker)}


# ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _handler(task: Task) -> Callable[[Any], Any]:
    """The function that the task names.  Raises `_Unusable`."""
    for path in task.paths:
        if path not in sys.path and Path(path).is_dir():
            sys.path.insert(0, path)
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        import zmq  # noqa: F401, PLC0415
    except ImportError as error:
        raise _Unusable(
            f"Python {python} at {sys.executable} has no pyzmq ({error}): install it there, or ship an environment "
            "that `mdp-spark pack` makes with --archive"
        ) from None
    from ...mdp.errors import SettingError  # noqa: PLC0415
    from ...mdp.loading import load  # noqa: PLC0415
    from ...workers import AsyncWorker, Worker  # noqa: PLC0415
    from ...workers.handling import is_async  # noqa: PLC0415

    try:
        found = load(task.handler, "MODULE:FUNCTION, for example zmdp.workers.echo:echo")
    except SettingError as error:
        raise _Unusable(
            f"{error}. Ship your own modules with --py-files, installed packages with --archive "
            "(`mdp-spark pack --requirement`)"
        ) from None
    if is_async(found):
        raise _Unusable(
            f"{task.handler} is for asyncio: a fleet takes a function, or a generator function, of a request"
        )
    if not callable(found) or isinstance(found, type | Worker | AsyncWorker):
        raise _Unusable(f"{task.handler} is of type {type(found).__name__}: a fleet takes a function of a request")
    return found


def _worker(task: Task, handler: "_Counted") -> "Worker":
    from ...mdp.errors import ZmdpError  # noqa: PLC0415
    from ...workers import Worker  # noqa: PLC0415

    try:
        return Worker(
            task.service, handler, broker=task.broker, codec=task.codec, heartbeat=task.heartbeat,
            liveness=task.liveness, handler_timeout=task.handler_timeout, name=f"{task.control} slot {task.slot}",
        )  # fmt: skip
    except (ZmdpError, ImportError) as error:  # a codec's package is not there
        raise _Unusable(str(error)) from None


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
    """Tells the driver about once a second how the task is doing, and hears whether it is to drain.

    A driver that does not answer does not end the task: the lease does.
    """

    def __init__(self, task: Task, client: "Client", host: str, handler: _Counted) -> None:
        self.heard = False
        """Whether a report was ever answered."""
        self._task = task
        self._client = client
        self._handler = handler
        self._until = time.monotonic() + task.seconds
        self._told = {
            "op": "slot", "fleet": task.fleet, "slot": task.slot, "lease": task.lease,
            "host": host, "pid": os.getpid(), "executor": executor(),
        }  # fmt: skip

    def until_over(self) -> None:
        """Report until the lease is over, or the driver says that it is enough."""
        pause = threading.Event()
        while not self.report() and (left := self._until - time.monotonic()) > 0:
            pause.wait(min(REPORT, left))

    def report(self) -> bool:
        """Report once; whether to drain."""
        from ...mdp.errors import ZmdpError  # noqa: PLC0415

        told = json.dumps({**self._told, "served": self._handler.calls}).encode()
        try:
            answer = json.loads(self._client.request(self._task.control, told, wait=False)[0])
        except (ZmdpError, ValueError):
            return False
        self.heard = True
        return isinstance(answer, dict) and answer.get("drain") is True


def _finish(task: Task, worker: "Worker", reporter: _Reporter) -> None:
    """Wait until the request that is worked on is done, reporting meanwhile."""
    limit = None if task.handler_timeout is None else time.monotonic() + task.handler_timeout + STUCK
    while not worker.wait(REPORT):
        reporter.report()
        if limit is not None and time.monotonic() > limit:
            # Its request has gone to another worker; the thread cannot be ended, but its process can.
            log.error("%s: a handler does not return: process %d ends itself", task.service, os.getpid())
            os._exit(1)


def _why(broker: str) -> str:
    from ...mdp.transport.reach import why_unreachable  # noqa: PLC0415

    return why_unreachable(broker) or "no answer"


def executor() -> str | None:
    """The id of the executor that this Python works for; None where that cannot be told, `driver` in local mode."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()
        command = Path(f"/proc/{daemon[1]}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return command[command.index("--executor-id") + 1] if "--executor-id" in command else "driver"
    return None


# ── what `mdp-spark doctor` asks ─────────────────────────────────────────────────────────────────────────────────────


def probe(broker: str, nothing: Iterator[object]) -> Iterator[dict[str, Any]]:
    """What this executor has, each None if it is well, else what is wrong:

    {"host": …, "executor": …, "python": version, "pyzmq": wrong, "zmdp": wrong, "broker": wrong}
    """
    for _ in nothing:
        pass
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "executor": executor(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "pyzmq": None,
        "zmdp": None,
        "broker": "not asked",
    }
    for name, module in (("pyzmq", "zmq"), ("zmdp", "zmdp.clients")):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever an import raises is what is wrong
            found[name] = f"{type(error).__name__}: {error}"
            yield found
            return
    from ...clients import Client  # noqa: PLC0415
    from ...mdp.errors import ZmdpError  # noqa: PLC0415
    from ...mdp.transport.reach import check_listening  # noqa: PLC0415

    try:
        check_listening([broker])
        with Client(broker, timeout=PATIENCE, retries=0) as client:
            client.request("mmi.service", b"any")
        found["broker"] = None
    except ZmdpError as error:
        found["broker"] = str(error)
    yield found

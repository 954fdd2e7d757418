"""A worker process's side of its supervision: it says when it serves and when it should be replaced."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from .worker_process import ALIVE, READY

STDERR: Final = 2
CHECK_SECONDS: Final = 0.1
REPEAT_SECONDS: Final = 30.0
"""Interval at which a process repeats that it should be replaced: its successor may have failed to start."""


class Supervised(Protocol):
    """The worker of a process."""

    @property
    def registered(self) -> bool:
        """Whether the broker knows all workers."""

    @property
    def served(self) -> int:
        """How many requests have ended."""


class ProcessLimits(NamedTuple):
    """The limits at which a process is replaced."""

    requests: int | None
    memory: int | None
    """Bytes."""

    def exceeded(self, served: int) -> str | None:
        """Return which limit is exceeded, or None."""
        if self.requests is not None and served >= self.requests:
            return f"it has served {served} requests (--max-requests {self.requests})"
        if self.memory is not None and (used := memory_bytes()) > self.memory:
            return f"it uses {used >> 20} MB (--max-memory {self.memory >> 20}M)"
        return None


class SupervisorLink:
    """The link of a process to its supervisor: their process ids, and the descriptors that it has been given."""

    def __init__(self, supervisor: int, reports: int, stderr: int) -> None:
        self.supervisor = supervisor
        self._reports = reports
        self._stderr = stderr
        # SIGHUP is for the supervisor, but a terminal sends it to the whole group.  Not SIG_IGN, which programs that
        # handlers start would inherit.
        signal.signal(signal.SIGHUP, lambda number, frame: None)
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL))
        for descriptor in (reports, stderr):
            os.set_inheritable(descriptor, False)

    def watch(self, worker: Supervised, limits: ProcessLimits, orphaned: Callable[[], object]) -> None:
        """Report in a thread of its own, because handlers may block; call `orphaned` if the supervisor has died."""
        threading.Thread(target=self._watch, args=(worker, limits, orphaned), name="supervisor", daemon=True).start()

    def _watch(self, worker: Supervised, limits: ProcessLimits, orphaned: Callable[[], object]) -> None:
        ready, report_at = False, 0.0
        while os.getppid() == self.supervisor:
            if not ready and worker.registered:
                ready = True
                self._report(READY)
            now = time.monotonic()
            if ready and now >= report_at and (reason := limits.exceeded(worker.served)):
                report_at = now + REPEAT_SECONDS
                self._report(reason.encode())
            time.sleep(CHECK_SECONDS)
        os.dup2(self._stderr, STDERR)  # the supervisor passes on nothing any more
        orphaned()

    def alive(self) -> None:
        """Report a sign of life."""
        self._report(ALIVE)

    def _report(self, text: bytes) -> None:
        with suppress(OSError):  # the supervisor has died
            os.write(self._reports, text + b"\n")


def memory_bytes() -> int:
    """Return how much memory this process uses; where the system does not say, how much it has used at most."""
    import resource  # noqa: PLC0415 - Windows has none, and no supervision

    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""Supervise worker processes: start, restart, replace and stop them."""

import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from ...mdp.backoff import EARLY_DEATH_SECONDS, RESTART_SECONDS, restart_pause
from .worker_process import WorkerProcess

POLL_SECONDS: Final = 0.1
EXIT_USAGE: Final = 2
HELD_UP_SECONDS: Final = 1.0
"""A pause between two looks at the processes that is longer than this was not meant."""
KILL_SECONDS: Final = 1.5
"""How long a process may take after its drain limit, at which it ends itself, before it is killed."""
END_SECONDS: Final = 1.8
"""How long the supervisor may take."""
START_SECONDS: Final = 30.0
"""Time after which a warning says that a successor does not serve yet."""
LOOP_SECONDS: Final = 2 * RESTART_SECONDS[1]
"""Two deaths that are further apart than this are not a crash loop."""

log = logging.getLogger("zmdp.worker")


@dataclass(eq=False)
class _Place:
    """A place for one process after another."""

    process: WorkerProcess | None = None
    start_at: float = 0.0
    """When to start the next one, if there is none."""
    deaths: int = 0
    """Consecutive early deaths."""

    def lose(self, now: float, *, early: bool) -> None:
        """Have the next process started: at once after the first early death, then after pauses."""
        self.process = None
        self.deaths = self.deaths + 1 if early else 1
        self.start_at = now + restart_pause(self.deaths - 1)


class Supervisor:
    """Keeps a number of processes of `mdworker` running until it is stopped.

    Processes are replaced one by one: a new one is started, and when the broker knows it, the old one is told to stop.
    Only when that has ended comes the next.  If the new one ends before, the old one stays, and no other is replaced.

    Args:
        arguments: Those of `mdworker`.
        processes: How many there are.
        drain_timeout: Seconds that a process has for the requests in progress when it is stopped.
        patience: Seconds without a sign of life after which a process that has given some is killed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        processes: int,
        *,
        drain_timeout: float,
        patience: float = math.inf,
    ) -> None:
        self._arguments = list(arguments)
        self._places = [_Place() for _ in range(processes)]
        self._to_replace: dict[_Place, str] = {}
        """Where the process is to be replaced, and why."""
        self._successor: tuple[_Place, WorkerProcess] | None = None
        """The process that takes a place over once it is ready."""
        self._overdue: WorkerProcess | None = None
        """The last successor that was reported to take long to start."""
        self._leaving: list[WorkerProcess] = []
        """Processes that were told to stop, and have no place any more."""
        self._asked: SimpleQueue[str] = SimpleQueue()
        """Why all are to be replaced."""
        self._crashes = _Crashes()
        self._stderr = os.dup(sys.stderr.fileno())
        self._drain_timeout = drain_timeout
        self._patience = patience
        self._turned_at = self._steady_since = time.monotonic()
        """When it looked after its processes last, and since when it has done so without a pause."""
        self._turned = False
        """Whether it has looked after its processes since `turning` was called."""
        self.served = False
        """Whether a process has ever been ready."""
        self._stops = 0
        self._code = 0

    def stop(self) -> None:
        """Send SIGTERM to all processes; called again, SIGKILL.  Thread-safe."""
        self._stops += 1
        for process in list(self._processes()):
            if self._stops == 1:
                self._terminate(process)
            else:
                process.send_signal(signal.SIGKILL)

    def replace_all(self, reason: str) -> None:
        """Replace the processes one by one.  Any thread, or a signal handler, may call it."""
        self._asked.put(reason)

    def turning(self) -> bool:
        """Return whether it has looked after its processes since the last call.  Thread-safe."""
        turned, self._turned = self._turned, False
        return turned

    def unfinished(self) -> str:
        """Return which processes still run."""
        pids = [str(process.pid) for process in list(self._processes())]
        return f"worker processes {', '.join(pids)}" if pids else "waiting for the broker, which does not answer"

    def run(self) -> int:
        """Run until all processes have ended after `stop`.  Return the first exit code that is not 0, or 0.

        If a process exits with 2 (invalid usage) before any has served, all are stopped: a new one would fail in the
        same way.
        """
        while not self._stops or any(self._processes()):
            now = time.monotonic()
            self._note_turn(now)
            if self._stops:
                self._stop_successor()
                for process in self._processes():  # those that `stop` missed, because they were starting
                    self._terminate(process)
            else:
                self._fill_places(now)
            self._read_reports()
            self._reap(now)
            self._kill_overdue(now)
            self._kill_hanging(now)
            if not self._stops:
                self._replace()
            time.sleep(POLL_SECONDS)
        return self._code

    def _processes(self) -> Iterator[WorkerProcess]:
        yield from [process for _, process in self._running()]
        yield from self._leaving.copy()
        if (successor := self._successor) is not None:
            yield successor[1]

    def _running(self) -> list[tuple[_Place, WorkerProcess]]:
        """Return the places that have a process, with it.  Thread-safe."""
        return [(place, process) for place in self._places if (process := place.process) is not None]

    def _fill_places(self, now: float) -> None:
        for place in self._places:
            if place.process is None and now >= place.start_at:
                place.process = self._start(quiet=self._crashes.looping)
                if place.process is None:
                    place.lose(now, early=True)

    def _start(self, *, quiet: bool = False) -> WorkerProcess | None:
        try:
            return WorkerProcess(self._arguments, self._stderr, quiet=quiet)
        except OSError as error:
            log.error("cannot start a worker process: %s", error)
            return None

    def _terminate(self, process: WorkerProcess) -> None:
        process.terminate(self._drain_timeout + KILL_SECONDS)

    def _kill_overdue(self, now: float) -> None:
        for process in self._processes():
            if process.kill_at is not None and now >= process.kill_at and process.exit_code is None:
                self._kill(process, f"did not end within {self._drain_timeout:g} s")

    def _note_turn(self, now: float) -> None:
        self._turned = True
        if now > self._turned_at + HELD_UP_SECONDS:
            self._steady_since = now  # what has held this process up has perhaps held up the others, too
        self._turned_at = now

    def _kill_hanging(self, now: float) -> None:
        for process in self._processes():
            if process.kill_at is not None or process.alive_at is None:
                continue
            if now > max(process.alive_at, self._steady_since) + self._patience:
                self._kill(process, f"has given no sign of life for {self._patience:g} s")

    @staticmethod
    def _kill(process: WorkerProcess, why: str) -> None:
        process.kill_at = math.inf
        log.error("worker process %d %s: killing it; other workers get its requests", process.pid, why)
        process.send_signal(signal.SIGKILL)

    def _read_reports(self) -> None:
        """Learn which processes are ready, and which are to be replaced."""
        for place, process in self._running():
            for reason in process.read_reports():
                self._to_replace.setdefault(place, reason)
            self.served = self.served or process.ready
        if self._successor is not None:
            self._successor[1].read_reports()

    # ── processes that have ended ────────────────────────────────────────────────────────────────────────────────────

    def _reap(self, now: float) -> None:
        for place, process in self._running():
            if process.exit_code is not None:
                place.lose(now, early=now < process.began + EARLY_DEATH_SECONDS)
                self._to_replace.pop(place, None)
                process.close()
                self._lost(process, now)
        for process in self._leaving.copy():
            if process.exit_code is not None:
                self._leaving.remove(process)
                process.close()
                if self._stops:
                    self._count(process)

    def _lost(self, process: WorkerProcess, now: float) -> None:
        if self._stops:
            self._count(process)
        elif process.exit_code == EXIT_USAGE and not self.served:
            self._code = EXIT_USAGE
            self.stop()
        else:
            self._crashes.record(process, now)

    def _count(self, process: WorkerProcess) -> None:
        """Let the exit code of a process that was told to stop count."""
        code = process.exit_code or 0
        if self._stops == 1 and code == -signal.SIGTERM:
            return  # our signal arrived before Python handled it, or when it was already shutting down
        self._code = self._code or (code if code >= 0 else 1)

    # ── replacing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _replace(self) -> None:
        """Go on with replacing processes, one by one."""
        while not self._asked.empty():
            reason = self._asked.get()
            log.info("replacing the worker processes one by one: %s", reason)
            self._to_replace = {place: reason for place, _ in self._running()}
            self._stop_successor()  # what it runs may be outdated too
            for place in self._places:
                place.start_at, place.deaths = 0.0, 0
            self._crashes = _Crashes()
        if self._successor is not None:
            self._succeed(*self._successor)
        elif self._to_replace and not self._leaving:
            place, reason = next(iter(self._to_replace.items()))
            if place.process is not None:
                log.info("replacing worker process %d: %s", place.process.pid, reason)
            if (successor := self._start()) is not None:
                self._successor = (place, successor)
            else:
                self._to_replace.clear()

    def _succeed(self, place: _Place, successor: WorkerProcess) -> None:
        predecessor = place.process
        if predecessor is None or place not in self._to_replace:  # it has ended
            self._stop_successor()
        elif successor.exit_code is not None:
            self._successor = None
            self._to_replace.clear()
            successor.close()
            log.error(
                "worker process %d, which was to replace %d, %s: the processes that run stay%s",
                successor.pid, predecessor.pid, successor.end, _quoted(successor),
            )  # fmt: skip
        elif successor.ready:
            self._successor = None
            del self._to_replace[place]
            place.process = successor
            self._leaving.append(predecessor)
            self._terminate(predecessor)
            log.info("worker process %d has replaced %d", successor.pid, predecessor.pid)
            if not self._to_replace:
                log.info("all worker processes have been replaced")
        elif successor is not self._overdue and time.monotonic() >= successor.began + START_SECONDS:
            self._overdue = successor
            log.warning(
                "worker process %d, which is to replace %d, does not serve after %g s: the processes that run stay",
                successor.pid, predecessor.pid, START_SECONDS,
            )  # fmt: skip

    def _stop_successor(self) -> None:
        """Stop the successor, if there is one."""
        if self._successor is not None:
            _, process = self._successor
            self._successor = None
            self._leaving.append(process)
            self._terminate(process)


class _Crashes:
    """Logs the deaths of processes; those of a crash loop once, with the last lines that the process wrote."""

    def __init__(self) -> None:
        self.looping = False
        """Whether processes die soon after their start, again and again in the same way, and this has been logged."""
        self._last = ("", "")
        """How the last process died, and its last line without numbers."""
        self._last_at = -math.inf

    def record(self, process: WorkerProcess, now: float) -> None:
        """Log that a process has died, which is restarted."""
        early = not process.ready or now < process.began + EARLY_DEATH_SECONDS
        lines = process.last_lines()
        death = (process.end, re.sub(r"\d+", "", lines[-1]) if lines else "")
        again = early and death == self._last and now < self._last_at + LOOP_SECONDS
        if not again:
            unheard = _quoted(process) if self.looping else ""
            log.error("worker process %d %s; restarting it%s", process.pid, process.end, unheard)
        elif not self.looping:
            log.error(
                "worker process %d %s soon after its start, like the one before: a crash loop; restarting with pauses "
                "of up to %g s, and logging the same no more%s",
                process.pid, process.end, RESTART_SECONDS[1], _quoted(process),
            )  # fmt: skip
        self.looping = again
        self._last, self._last_at = death if early else ("", ""), now


def _quoted(process: WorkerProcess) -> str:
    lines = process.last_lines()
    return "; it wrote last:" + "".join(f"\n    {line}" for line in lines) if lines else ""

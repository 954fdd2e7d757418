"""Supervise worker processes: start them, restart those that die, scale with the load, stop them together."""

import logging
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from ..mdp.errors import ZmdpError
from .scaling import Died, Lease, Load, Slots

POLL_SECONDS: Final = 0.1
WATCH_SECONDS: Final = 0.5
"""Interval at which the broker is asked for the load."""
EXIT_USAGE: Final = 2
KILL_SECONDS: Final = 1.5
"""How long a process may take after its drain limit, at which it ends itself, before it is killed."""
END_SECONDS: Final = 1.8
"""How long the supervisor may take."""

log = logging.getLogger("zmdp.worker")


class Supervisor:
    """Keeps as many processes of `command` running as `slots` wants, until it is stopped.

    Args:
        command: The command line of a process.
        slots: Decides how many there should be, and when one that died is restarted.
        watch: Asks the broker for the service's load and for the processes that serve it, in a thread; None if the
            number of processes does not change.
        drain_timeout: Seconds that a process has for the requests in progress when it is stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        slots: Slots,
        watch: Callable[[], tuple[Load, set[int]]] | None = None,
        *,
        drain_timeout: float,
    ) -> None:
        self._command = list(command)
        self._slots = slots
        self._watch = watch
        self._seen: SimpleQueue[tuple[Load | None, set[int]]] = SimpleQueue()
        """What `watch` has returned, with None if the broker did not answer."""
        self._running: dict[Lease, subprocess.Popen[bytes]] = {}
        self._drain_timeout = drain_timeout
        self._kill_at: dict[Lease, float] = {}
        """When to kill the processes that were told to stop."""
        self._ended = threading.Event()
        self._turned = False
        """Whether it has looked after its processes since `turning` was called."""
        self._stops = 0
        self._code = 0

    def stop(self) -> None:
        """Send SIGTERM to all processes; called again, SIGKILL.  Thread-safe."""
        self._stops += 1
        for lease, process in list(self._running.items()):
            if self._stops == 1:
                self._terminate(lease, process)
            else:
                _signal(process, signal.SIGKILL)

    def turning(self) -> bool:
        """Return whether it has looked after its processes since the last call.  Thread-safe."""
        turned, self._turned = self._turned, False
        return turned

    def unfinished(self) -> str:
        """Return which processes still run."""
        pids = [str(process.pid) for process in list(self._running.values())]
        return f"worker processes {', '.join(pids)}" if pids else "waiting for the broker"

    def run(self) -> int:
        """Run until all processes have ended after `stop`.  Return the first exit code that is not 0, or 0.

        If a process exits with 2 (invalid usage), all are stopped: a new one would fail in the same way.
        """
        watcher = threading.Thread(target=self._observe, name="load", daemon=True)
        watcher.start()
        try:
            while not self._slots.finished:
                now = time.monotonic()
                self._turned = True
                if self._stops:
                    self._slots.drain()
                    self._ended.set()
                for lease in self._slots.due(now):
                    self._start(lease)
                for lease, process in list(self._running.items()):
                    if process.poll() is not None:
                        self._reap(lease, process, now)
                    elif now >= self._kill_at.get(lease, math.inf):
                        self._kill_at[lease] = math.inf
                        log.error(
                            "worker process %d did not end within %g s: killing it; other workers get its requests",
                            process.pid, self._drain_timeout,
                        )  # fmt: skip
                        _signal(process, signal.SIGKILL)
                while not self._seen.empty():
                    self._scale(*self._seen.get(), now)
                time.sleep(POLL_SECONDS)
        finally:
            self._ended.set()
            watcher.join()
        return self._code

    def _start(self, lease: Lease) -> None:
        stops = self._stops
        process = self._running[lease] = subprocess.Popen(self._command)  # noqa: S603 - our own command line
        if self._stops != stops:  # `stop` was called while the process was starting
            self._terminate(lease, process)

    def _terminate(self, lease: Lease, process: "subprocess.Popen[bytes]") -> None:
        """Tell a process to stop, and remember when it must have ended."""
        self._kill_at.setdefault(lease, time.monotonic() + self._drain_timeout + KILL_SECONDS)
        _signal(process, signal.SIGTERM)

    def _reap(self, lease: Lease, process: "subprocess.Popen[bytes]", now: float) -> None:
        """Record that a process has ended."""
        code = process.returncode
        del self._running[lease]
        self._kill_at.pop(lease, None)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        restarts = self._slots.ended(lease, Died(how), now)
        if self._stops == 1 and code == -signal.SIGTERM:
            return  # our signal arrived before Python handled it, or when it was already shutting down
        if self._stops or code == EXIT_USAGE:
            self._code = self._code or (code if code >= 0 else 1)
            if not self._stops:
                self.stop()
        elif restarts:
            log.error("worker process %d %s; restarting it", process.pid, how)

    # ── scaling ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _observe(self) -> None:
        """Ask for the load until the supervisor ends."""
        known = ""
        while self._watch is not None and not self._ended.wait(WATCH_SECONDS):
            try:
                self._seen.put(self._watch())
                known = ""
            except (ZmdpError, ValueError, TypeError, LookupError, AttributeError) as error:
                self._seen.put((None, set()))
                if str(error) != known:
                    known = str(error)
                    log.warning("the number of processes does not change: the broker does not tell the load: %s", error)

    def _scale(self, load: Load | None, pids: set[int], now: float) -> None:
        """Adjust the number of processes, given those that serve."""
        slots, before = self._slots, self._slots.wanted
        serving = {lease: process.pid for lease, process in self._running.items() if process.pid in pids}
        drained = {
            lease
            for lease, pid in serving.items()
            if slots.report(lease.slot, lease.number, {"pid": pid, "registered": True}, now)
        }
        slots.observe(load, now)
        if load is not None and slots.wanted != before:
            log.info("scaling from %d to %d processes; %d requests queued", before, slots.wanted, load.queued)
        unwanted = slots.unwanted()
        for lease, process in self._running.items():
            if lease in drained or lease.number in unwanted:
                self._terminate(lease, process)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Send a signal to a process, if it runs."""
    if process.poll() is None:
        process.send_signal(number)


def command(*arguments: str) -> list[str]:
    """Return the command line that runs `mdworker` with `arguments` on this Python interpreter."""
    return [sys.executable, "-m", "zmdp.workers.cli.main", *arguments]

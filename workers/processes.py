"""Supervise several worker processes: start them, restart those that die, stop them together."""

import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

BACKOFF_SECONDS: Final = (1.0, 32.0)
"""Delay before a process that died is restarted, at first and at most; doubled after each short life."""
STABLE_SECONDS: Final = 60.0
"""Lifetime after which the delay is reset."""
POLL_SECONDS: Final = 0.1
EXIT_USAGE: Final = 2

log = logging.getLogger("zmdp.worker")


class Supervisor:
    """Keeps `count` processes of `command` running until it is stopped."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = list(command)
        self._slots = [_Slot() for _ in range(count)]
        self._stops = 0

    def stop(self) -> None:
        """Send SIGTERM to all processes; called again, SIGKILL.  Safe in a signal handler."""
        self._stops += 1
        self._signal(signal.SIGTERM if self._stops == 1 else signal.SIGKILL)

    def run(self) -> int:
        """Run until all processes have ended after `stop`.  Return the first exit code that is not 0, or 0.

        If a process exits with 2 (invalid usage), all are stopped: a new one would fail in the same way.
        """
        worst = 0
        while not (self._stops and all(slot.process is None for slot in self._slots)):
            now = time.monotonic()
            for slot in self._slots:
                if slot.process is None:
                    self._start(slot, now)
                    continue
                code = slot.process.poll()
                if code is None:
                    continue
                slot.ended(code, now, expected=bool(self._stops) or code == EXIT_USAGE)
                if self._stops == 1 and code == -signal.SIGTERM:
                    code = 0  # our signal arrived when Python was already shutting down
                if self._stops or code == EXIT_USAGE:
                    worst = worst or (code if code >= 0 else 1)
                if code == EXIT_USAGE and not self._stops:
                    self.stop()
            time.sleep(POLL_SECONDS)
        return worst

    def _start(self, slot: "_Slot", now: float) -> None:
        stops = self._stops
        if not stops and now >= slot.start_at:
            slot.start(self._command, now)
            if self._stops != stops:  # a signal arrived while the process was starting
                slot.signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for slot in self._slots:
            slot.signal(number)


class _Slot:
    """A process and its successors."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = 0.0
        self._started = 0.0
        self._backoff = BACKOFF_SECONDS[0]

    def start(self, command: list[str], now: float) -> None:
        """Start the process."""
        self._started = now
        self.process = subprocess.Popen(command)  # noqa: S603 - our own command line

    def ended(self, code: int, now: float, *, expected: bool) -> None:
        """Record that the process has ended; unless that was expected, schedule a restart."""
        process, self.process = self.process, None
        if expected or process is None:
            return
        if now - self._started > STABLE_SECONDS:
            self._backoff = BACKOFF_SECONDS[0]
        wait = self._backoff * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not cryptography
        self._backoff = min(2 * self._backoff, BACKOFF_SECONDS[1])
        self.start_at = now + wait
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        log.error("worker process %d %s; restarting it in %.1f s", process.pid, how, wait)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def command(*arguments: str) -> list[str]:
    """Return the command line that runs `mdworker` with `arguments` on this Python interpreter."""
    return [sys.executable, "-m", "zmdp.workers.cli", *arguments]

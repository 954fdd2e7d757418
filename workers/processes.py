"""Several worker processes under one: started, restarted when they die, ended together."""

import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

BACKOFF: Final = (1.0, 32.0)
"""Seconds before a process that died is started again; doubled each time that it did not live long."""
LONG_LIFE: Final = 60.0
"""Seconds after which a process counts as having worked."""
POLL: Final = 0.1
USAGE: Final = 2

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
        """Run until all processes have ended after `stop`; returns the exit code: the first that is not 0, or 0.

        A process that ends with 2 (bad usage) ends all: it would do so again.
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
                slot.ended(code, now, expected=bool(self._stops) or code == USAGE)
                if self._stops == 1 and code == -signal.SIGTERM:
                    code = 0  # our signal, which came when it had ended by itself, but for Python's own last steps
                if self._stops or code == USAGE:
                    worst = worst or (code if code >= 0 else 1)
                if code == USAGE and not self._stops:
                    self.stop()
            time.sleep(POLL)
        return worst

    def _start(self, slot: "_Slot", now: float) -> None:
        stops = self._stops
        if not stops and now >= slot.start_at:
            slot.start(self._command, now)
            if self._stops != stops:  # the signal came while the process was being started
                slot.signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for slot in self._slots:
            slot.signal(number)


class _Slot:
    """One process, and the next in its place."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = 0.0
        self._started = 0.0
        self._backoff = BACKOFF[0]

    def start(self, command: list[str], now: float) -> None:
        """Start the process."""
        self._started = now
        self.process = subprocess.Popen(command)  # noqa: S603 - our own command line

    def ended(self, code: int, now: float, *, expected: bool) -> None:
        """Take note of the process's end; unless expected, it will be started again after a while."""
        process, self.process = self.process, None
        if expected or process is None:
            return
        if now - self._started > LONG_LIFE:
            self._backoff = BACKOFF[0]
        wait = self._backoff * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not cryptography
        self._backoff = min(2 * self._backoff, BACKOFF[1])
        self.start_at = now + wait
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        log.error("worker process %d %s; another starts in %.1f s", process.pid, how, wait)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def command(*arguments: str) -> list[str]:
    """The command line that runs `mdworker` with `arguments` on this very Python."""
    return [sys.executable, "-m", "zmdp.workers.cli", *arguments]

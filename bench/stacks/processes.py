"""Processes of a benchmark: started without output, on free ports, and ended with it in any case."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TIMEOUT_SECONDS = 60.0
"""Maximum number of seconds that a start may take."""
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class FailedError(Exception):
    """A process of a peer failed."""


class Process:
    """A process in its own process group."""

    def __init__(self, command: list[str], env: Mapping[str, str], cwd: Path) -> None:
        # What it says goes into a file: a pipe that nobody reads would hold it up.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **env}, cwd=cwd, start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509
        )  # fmt: skip
        self.pid = self._popen.pid

    def read_line(self, timeout: float = TIMEOUT_SECONDS) -> str:
        """Return the next line of its stdout.  Raises `FailedError` if there is none."""
        late = threading.Event()
        alarm = threading.Timer(timeout, lambda: (late.set(), self._popen.kill()))
        alarm.start()
        try:
            line = self._popen.stdout.readline().strip()
        finally:
            alarm.cancel()
        if not line:
            raise FailedError(f"no output for {timeout:g} s" if late.is_set() else self.said())
        return line

    def eventually(self, condition: Callable[[], bool], timeout: float = TIMEOUT_SECONDS) -> None:
        """Wait until `condition` holds.  Raises `FailedError` if the process ends or takes too long."""
        until = time.monotonic() + timeout
        while not condition():
            if self._popen.poll() is not None or time.monotonic() > until:
                raise FailedError(self.said())
            time.sleep(0.02)

    def succeed(self) -> None:
        """Wait until it has ended.  Raises `FailedError` if it failed."""
        if self._popen.wait(TIMEOUT_SECONDS):
            raise FailedError(self.said())

    def output(self) -> str:
        """Return what it has written to stderr."""
        # Not `read`: the process shares the place in the file, and goes on writing there.
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")

    def said(self) -> str:
        """Return the likely reason of its failure."""
        text = self.output()
        return next((line for line in text.splitlines()[::-1] if "Error" in line), text.strip()[-200:]) or "nothing"

    def end(self) -> None:
        """Kill it, and everything in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._popen.stdout.close()
        self._errors.close()


def _die_with_parent() -> None:
    """On Linux, make child processes end with this process, even if it is killed."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def running(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = BENCH) -> Iterator[Process]:
    """Run a process, and kill it at the end."""
    process = Process([str(each) for each in command], env or {}, cwd)
    try:
        yield process
    finally:
        process.end()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> Callable[[], bool]:
    """Return a condition: whether connections to that port are accepted."""

    def found() -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return found

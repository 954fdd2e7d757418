"""Processes of the benchmarks: brokers and others, which are ended in any case, and the CPU and memory they use.

`FailedError` says why something cannot be measured: a process failed, or something that it needs is missing.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
TIMEOUT_SECONDS = 60.0
"""Maximum number of seconds that a start may take."""
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


PURE = {"ZMDP_PURE": "1"}
"""The environment in which zmdp uses no compiled modules."""


class FailedError(Exception):
    """A process failed, or something that a benchmark needs is missing."""


@dataclass
class Server:
    """A running server: its address and its processes."""

    address: str
    pids: list[int]


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


@contextmanager
def broker(*options: str, pure: bool = False, cwd: Path = BENCH) -> Iterator[Server]:
    """Run `mdp-broker`; `pure`: without its compiled modules."""
    command = (BIN / "mdp-broker", "--bind", "tcp://127.0.0.1:*", "--log-level", "error", *options)
    with running(*command, env=PURE if pure else None, cwd=cwd) as process:
        yield Server(process.read_line(), [process.pid])


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


# ── what they use ────────────────────────────────────────────────────────────────────────────────────────────────────


def cpu_seconds(*pids: int) -> float:
    """Return the CPU time of all threads of these processes."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def descendants(pids: Iterable[int]) -> list[int]:
    """Return these processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
            children.setdefault(parent, []).append(int(each.name))
    found, left = [], list(pids)
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found

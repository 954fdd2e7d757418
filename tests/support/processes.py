"""Runs zmdp's commands as processes, which tests watch and kill."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from zmdp.testing import free_endpoint

BIN = Path(sys.executable).parent
TIMEOUT_SECONDS = 120.0
"""How long tests wait for something that must happen: so long that only a hang takes longer, on any machine."""
TIMEOUT_MS = round(1000 * TIMEOUT_SECONDS)
"""The same, for `poll`."""
SHORT_TIMEOUTS = tuple(0.1 * 3**number for number in range(6))
"""For timeouts that must pass, but not before something else has happened: tests use the first that is long enough."""
POLL_SECONDS = 0.005
"""The pause between two looks: without it, who waits for a process would take the processor that it needs."""


class Process:
    """A running command, whose output is read as it arrives."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None, new_group: bool) -> None:
        self._popen = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **env}, cwd=cwd, start_new_session=new_group,
        )  # fmt: skip
        self.pid = self._popen.pid
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._lines]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        for line in getattr(self._popen, name):
            with self._changed:
                self._lines[name].append(line.rstrip("\n"))
                self._changed.notify_all()

    def line(self, text: str, stream: str = "stderr", count: int = 1, timeout: float = TIMEOUT_SECONDS) -> str:
        """Wait for `count` lines that contain `text`; return the last of them."""

        def found() -> list[str]:
            return [line for line in self._lines[stream] if text in line]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, timeout), (text, self._lines)
            return found()[count - 1]

    @property
    def stderr(self) -> str:
        return "\n".join(self._lines["stderr"])

    def send_signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code; None if the process has not ended within so many seconds."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait until the process has ended; return the exit code."""
        self.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self._popen.wait(TIMEOUT_SECONDS)
        for reader in self._readers:
            reader.join()
        self._popen.stdout.close()  # type: ignore[union-attr]
        self._popen.stderr.close()  # type: ignore[union-attr]
        return code

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self.wait()


@contextmanager
def process(*command: str, cwd: Path | None = None, new_group: bool = False, **env: str) -> Iterator[Process]:
    """Run a command; kill it at the end of the block if it still runs."""
    running = Process(command, env, cwd, new_group)
    try:
        yield running
    finally:
        running.kill()


@contextmanager
def broker(*options: str, bind: str | None = None) -> Iterator[tuple[Process, str]]:
    """Run `mdp-broker`; yield its process and its endpoint once it is ready."""
    with process("mdp-broker", "--bind", bind or free_endpoint(), *options) as running:
        yield running, running.line("://", "stdout")


def run(
    *command: str, stdin: bytes = b"", timeout: float = TIMEOUT_SECONDS, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command and wait until it has ended."""
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        input=stdin, capture_output=True, timeout=timeout, env={**os.environ, **env}, cwd=cwd, check=False,
    )  # fmt: skip


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the processes that the process has started and that run."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
        return [child for child in map(int, text.split()) if alive(child)]
    return []


def eventually(condition: Callable[[], Any], timeout: float = TIMEOUT_SECONDS) -> Any:
    """Call `condition` until it returns something true, and return that."""
    until = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < until, f"the condition was still false after {timeout} s"
        time.sleep(POLL_SECONDS)
    return value


def eventually_raises(error: type[BaseException], match: str, call: Callable[[], Any]) -> Any:
    """Call until the error says `match`, and return it.  Each call must raise such an error.

    For calls that may end before the reason is known, because their timeout is short.
    """

    def raised() -> BaseException | None:
        with pytest.raises(error) as caught:
            call()
        return caught.value if re.search(match, str(caught.value)) else None

    return eventually(raised)

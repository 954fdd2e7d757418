"""A worker process as its supervisor sees it: what it writes and reports, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

TAIL_BYTES: Final = 8192
"""Number of bytes that are kept of the last output of a process."""
TAIL_LINES: Final = 20
READY: Final = b"ready"
"""Reported once the broker knows the process's workers."""
ALIVE: Final = b"alive"
"""A sign of life, for a service manager.  Every other report is a reason to replace the process."""


class WorkerProcess:
    """A process of `mdworker`, whose stderr is passed on.

    Args:
        arguments: Those of `mdworker`.
        stderr: The descriptor to which its stderr is passed on, also by itself if the supervisor has died.
        quiet: Pass on nothing until it is ready: the processes before it have died with the same lines.

    Raises `OSError` if the system has no memory left, or no process or thread.
    """

    def __init__(self, arguments: Sequence[str], stderr: int, *, quiet: bool = False) -> None:
        self.began = time.monotonic()
        self.ready = False
        """Whether the broker knows its workers."""
        self.alive_at: float | None = None
        """When its last sign of life was read."""
        self.kill_at: float | None = None
        """When to kill it, because it was told to stop."""
        self._stderr = stderr
        self._quiet = quiet
        self._tail = b""
        self._lock = threading.Lock()
        self._unread = b""
        self._reports, reports = os.pipe()
        os.set_blocking(self._reports, False)
        supervised = ("--supervised-by", *map(str, (os.getpid(), reports, stderr)))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-m", "zmdp.workers.command.cli", *supervised, *arguments],
                stderr=subprocess.PIPE, pass_fds=(reports, stderr),
            )  # fmt: skip
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(reports)
        self.pid = self._process.pid
        self._copier = threading.Thread(target=self._copy, name=f"stderr of {self.pid}", daemon=True)
        try:
            self._copier.start()
        except RuntimeError as error:
            self._process.kill()
            self._process.communicate()  # closes the pipe
            os.close(self._reports)
            raise OSError(f"{error}, which is to read its stderr") from None

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.poll()

    @property
    def end(self) -> str:
        """How it has ended."""
        code = self._process.returncode
        if code >= 0:
            return f"exited with {code}"
        named = -code in {*signal.Signals}  # most real-time signals have no names
        return f"was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"

    def read_reports(self) -> list[str]:
        """Return why it is to be replaced, as reported since the last call; notice that it is ready, or alive."""
        try:
            self._unread += os.read(self._reports, TAIL_BYTES)
        except BlockingIOError:
            return []
        *lines, self._unread = self._unread.split(b"\n")
        if READY in lines:
            self.ready = True
            self._speak()
        if ALIVE in lines:
            self.alive_at = time.monotonic()
        return [line.decode() for line in lines if line not in {ALIVE, READY}]

    def terminate(self, seconds: float) -> None:
        """Tell it to stop, within so many seconds, unless it was told before."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + seconds
            self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Release the descriptors and the thread of a process that has ended."""
        self._copier.join(0.5)  # not longer: a process that it has started may hold its stderr
        os.close(self._reports)

    def last_lines(self) -> list[str]:
        """Return the last lines that it wrote."""
        return self._tail.decode(errors="replace").splitlines()[-TAIL_LINES:]

    # ── its stderr ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _copy(self) -> None:
        stream = self._process.stderr
        assert stream is not None  # noqa: S101 - for the type checker: it is a pipe
        with stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                with self._lock:
                    self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                    quiet = self._quiet
                if not quiet:
                    self._write(chunk)

    def _speak(self) -> None:
        """Pass on what it has written, and from now on what it writes."""
        with self._lock:
            quiet, self._quiet = self._quiet, False
        if quiet:
            self._write(self._tail)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # nobody reads the log any more
            while data:
                data = data[os.write(self._stderr, data) :]

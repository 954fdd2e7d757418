"""Runs the programs of `zmdp dev`: starts, restarts and ends them, and writes what they say.

Each has a session of its own, so that Ctrl-C reaches only `zmdp dev`, which ends them in their order.  A program says
that it is ready as it would tell systemd (sd_notify(3)).  Its standard input is a pipe at whose end it stops: it does
not outlive `zmdp dev`, however that ends.
"""

import asyncio
import os
import signal
import socket
import tempfile
import time
from asyncio import Event, create_subprocess_exec, wait_for
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final, TextIO

from ..mdp.backoff import doubled
from ..mdp.cli import notify
from ..mdp.cli.console import END_WITH_STDIN, EXIT_FAILED
from .programs import ENVIRONMENT, Program

SELF: Final = "zmdp"
"""The name of `zmdp dev` itself in its log."""
RESTART_SECONDS: Final = (0.5, 30.0)
"""How long to wait before a program is restarted: at first, and at most."""
STEADY_SECONDS: Final = 60.0
"""A program that has run so long is restarted after the first pause again."""
END_SECONDS: Final = 35.0
"""How long a program may take to end; each has a drain limit of its own, a worker's 30 s being the longest."""
REST_SECONDS: Final = 0.5
"""How long what a program has said may take to arrive after it has ended: its children may hold the pipe."""
MAX_LINE_BYTES: Final = 1 << 20
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COLOURS: Final = (36, 32, 35, 33, 34)
"""Of the programs' names on a terminal, as ANSI codes."""


class Log:
    """Writes lines, each behind the name of its program."""

    def __init__(self, names: Sequence[str], stream: TextIO) -> None:
        coloured = stream.isatty() and not os.environ.get("NO_COLOR")
        names = (SELF, *names)
        width = max(map(len, names))
        self._stream = stream
        self._prefixes = {name: f"{name:{width}} |" for name in names}
        if coloured:
            colours = cycle(COLOURS)
            self._prefixes = {name: f"\033[{next(colours)}m{text}\033[0m" for name, text in self._prefixes.items()}

    def say(self, name: str, line: str) -> None:
        """Write a line; whether somebody reads it does not matter to the programs."""
        with suppress(OSError):
            self._stream.write(f"{self._prefixes[name]} {line}\n")
            self._stream.flush()


class _Output(asyncio.Protocol):
    """Writes what a program says to the log, line by line."""

    def __init__(self, name: str, log: Log) -> None:
        self._name, self._log = name, log
        self._rest = b""
        self.ended = Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log.say(self._name, line.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._rest:
            self._log.say(self._name, self._rest.decode(errors="replace"))
        self.ended.set()


class _Readiness(asyncio.DatagramProtocol):
    """Notices when a program says that it is ready."""

    def __init__(self) -> None:
        self.ready = Event()

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr
        if b"READY=1" in data.split(b"\n"):
            self.ready.set()


class _Runner:
    """Keeps a program running."""

    def __init__(self, program: Program, log: Log, folder: str) -> None:
        self.name = program.name
        self._words = program.words
        self._log = log
        self._socket = str(Path(folder, program.name))
        self._readiness = _Readiness()
        self.ready = self._readiness.ready
        """Set once it has ever been ready."""
        self._process: Process | None = None
        self._stopping = Event()

    async def run(self) -> int:
        """Run the program until `end`; restart it if it ends by itself.

        Returns its exit code, also if it has ended before it was ever ready: the next one would fail in the same way.
        """
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self._readiness, family=socket.AF_UNIX, local_addr=self._socket
        )
        restarts = 0
        try:
            while True:
                began = time.monotonic()
                code = await self._run_once()
                if self._stopping.is_set() or not self.ready.is_set():
                    return code
                if time.monotonic() - began > STEADY_SECONDS:
                    restarts = 0
                pause = doubled(*RESTART_SECONDS, restarts)
                restarts += 1
                self._log.say(SELF, f"{self.name} {_shown(code)}; it restarts in {pause:g} s")
                with suppress(TimeoutError):
                    await wait_for(self._stopping.wait(), pause)
                    return code
        finally:
            transport.close()

    async def _run_once(self) -> int:
        """Start the program, and return its exit code when it has ended."""
        output, said = os.pipe()
        stdin, lifeline = os.pipe()
        reader, protocol = await asyncio.get_running_loop().connect_read_pipe(
            lambda: _Output(self.name, self._log), os.fdopen(output, "rb", buffering=0)
        )
        try:
            environment = {**os.environ, **ENVIRONMENT, notify.ADDRESS: self._socket, END_WITH_STDIN: "1"}
            self._process = await create_subprocess_exec(
                *self._words, stdin=stdin, stdout=said, stderr=said, env=environment, start_new_session=True
            )
        except OSError as error:
            self._log.say(SELF, f"cannot start {self._words[0]}: {error.strerror}")
            os.close(lifeline)
            reader.close()
            return EXIT_FAILED
        finally:
            os.close(said)
            os.close(stdin)
        if self._stopping.is_set():
            self._terminate()
        code = await self._process.wait()
        with suppress(TimeoutError):
            await wait_for(protocol.ended.wait(), REST_SECONDS)
        os.close(lifeline)
        reader.close()
        return code

    async def end(self, running: asyncio.Task[int]) -> int:
        """Tell the program to stop, and return its exit code; kill it if it takes too long."""
        self._stopping.set()
        self._terminate()
        try:
            return await wait_for(asyncio.shield(running), END_SECONDS)
        except TimeoutError:
            self.kill()
            return await running

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the program and its children, and do not restart it."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class _Session:
    """Runs all programs until a signal, or until one of them cannot start."""

    def __init__(self, programs: Sequence[Program], log: Log, folder: str) -> None:
        self._runners = [_Runner(program, log, folder) for program in programs]
        self._running: dict[_Runner, asyncio.Task[int]] = {}
        self._log = log
        self._ended = Event()
        self._signals = 0

    async def run(self, hint: str) -> int:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._signal)
        starting = asyncio.create_task(self._start(hint))
        await self._ended.wait()
        starting.cancel()
        code = 0
        failed = [(runner, task) for runner, task in self._running.items() if task.done() and not self._signals]
        for runner, task in reversed(self._running.items()):
            ended = await runner.end(task)
            if ended and not code and not failed:
                code = EXIT_FAILED
                self._log.say(SELF, f"{runner.name} {_shown(ended)}: it was not finished")
        for runner, task in failed:  # last, where it is seen
            code = task.result() or EXIT_FAILED
            self._log.say(SELF, f"{runner.name} could not start: it {_shown(code)}, and its lines say why")
        return code

    async def _start(self, hint: str) -> None:
        """Start the first program, and when it is ready, the others."""
        began = time.monotonic()
        for batch in (self._runners[:1], self._runners[1:]):
            for runner in batch:
                task = self._running[runner] = asyncio.create_task(runner.run())
                task.add_done_callback(lambda _: self._ended.set())
            for runner in batch:
                await runner.ready.wait()
        self._log.say(SELF, f"all are ready after {time.monotonic() - began:.1f} s; {hint}")

    def _signal(self) -> None:
        self._signals += 1
        self._ended.set()
        if self._signals == 1:
            self._log.say(SELF, "stopping once the requests in progress are finished; interrupt again to kill all")
        else:
            for runner in self._runners:
                runner.kill()


async def run(programs: Sequence[Program], log: Log, hint: str) -> int:
    """Run the programs until a signal, or until one cannot start.  Return the exit code.

    The first one, the broker, is ready before the others start.  They end in the opposite order: first what lets
    callers in, then those that call, then those that serve, and last the broker.

    Args:
        programs: In the order in which they start.
        log: Where they write.
        hint: What is added to the line that says that all are ready.
    """
    with tempfile.TemporaryDirectory(prefix="zmdp-dev-") as folder:
        return await _Session(programs, log, folder).run(hint)


def _shown(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    named = -code in {*signal.Signals}
    return f"was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"

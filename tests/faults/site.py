"""What all runs have in common: programs that are started again whenever they have ended, and faults."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from support.processes import children, eventually

from .fault import GRACE_SECONDS, Fault
from .programs import HERE, Database, Program
from .referee import Referee

READY: Final = {
    "broker": ("ready on",), "titanic": ("serving titanic.",), "workers": ("serving at", "moved to"),
    "gateway": ("http://",),
}  # fmt: skip
"""What programs log or print once they have started: one of these.  Workers that do not reach the first broker move to
the other one at once."""
EXIT_SECONDS: Final = 60.0
"""How long a program may take to end after SIGTERM."""
WAIT_SECONDS: Final = 600.0
"""How long a replacement, or the end of the outstanding calls, may take."""
TICK_SECONDS: Final = 0.05
GRACEFUL_EXITS: Final = {0, -signal.SIGTERM}
"""The latter: it had not come so far as to handle the signal."""


class Site:
    """Starts programs and callers, injects faults, and starts again what has ended."""

    def __init__(self, folder: Path, rng: random.Random, db: Database | None = None) -> None:
        self.db = db
        self.faults: list[Fault] = []
        self.broken: list[str] = []
        """What programs did that they must not."""
        self.programs: list[Program] = []
        self.callers: list[Program] = []
        self.ledger = folder / "ledger"
        self.ledger.mkdir()
        self.referee = Referee(self.ledger)
        self._folder = folder
        self._rng = rng
        self._pending: list[tuple[Callable[[], bool], Fault]] = []
        """Faults that still affect something, and what tells when they no longer do; it is called until it is true."""

    def run(self, role: str, name: str, *command: str, **env: str) -> Program:
        """Start a program, or with the role `caller` a caller of the kind and with the arguments that `command` has."""
        env = {"FAULTS_LEDGER": str(self.ledger), "PYTHONPATH": str(HERE), **env}
        if role == "caller":
            command = ("python", "-m", "faults.callers", *command)
        program = Program(role, name, command, self._folder, env)
        (self.callers if role == "caller" else self.programs).append(program)
        return program

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Start again what has ended, and note which faults are over."""
        now = time.monotonic()
        for each in self.programs:
            code = each.ended()
            if code is not None:
                self._judge(each, code)
                each.start()
            elif each.must_end_by is not None and now > each.must_end_by:
                self.broken.append(f"{each.name} has not ended {EXIT_SECONDS:g} s after SIGTERM")
                each.kill()
        for each in self.callers:
            if each.ended() is not None:
                self.broken.append(f"{each.name} ended by itself, with {each.ended()}")
                each.start()
        for is_over, fault in self._pending[:]:
            if is_over():
                fault.until = time.monotonic()
                self._pending.remove((is_over, fault))

    def _judge(self, program: Program, code: int) -> None:
        since = time.monotonic() if program.must_end_by is None else program.must_end_by - EXIT_SECONDS
        disturbed = any(fault.until > since - GRACE_SECONDS for fault in self.faults if fault.hard)
        if program.must_end_by is not None:
            allowed = GRACEFUL_EXITS | ({1} if disturbed else set())  # 1: not finished in time, for another fault
        else:
            at_start = not is_ready(program)
            allowed = {-signal.SIGKILL, *({1, 6} if at_start and disturbed else set())}
        if code not in allowed:
            self.broken.append(f"{program.name} ended with {code}: see its log")
        program.note(f"ended with {code}")

    def _until_ready(self, program: Program) -> Callable[[], bool]:
        return lambda: program.ended() is None and is_ready(program)

    def _fault(self, what: str, is_over: Callable[[], bool], *, hard: bool = True) -> None:
        fault = Fault(time.monotonic(), what, hard=hard)
        self.faults.append(fault)
        self._pending.append((is_over, fault))

    @property
    def undisturbed(self) -> bool:
        """Whether no fault still affects anything."""
        return not self._pending

    def recover(self, look: Callable[[], None]) -> None:
        """Wait until no fault affects anything any more; call `look` meanwhile."""
        try:
            wait_until(lambda: self.undisturbed, look)
        except AssertionError:
            self.broken += [f"nothing recovers from this: {fault.what}" for _, fault in self._pending]
            self._pending.clear()

    def wait(self, seconds: float) -> None:
        """Look for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(TICK_SECONDS)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def disturb(self, faults: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Inject one of these faults, chosen by their weights."""
        weights, found = zip(*faults, strict=True)
        self._rng.choices(found, weights)[0]()

    def victim(self, programs: Sequence[Program]) -> Program | None:
        """Choose a program to disturb, usually one that has started: on a slow machine, none ever would otherwise."""
        found = [each for each in programs if each.is_undisturbed()]
        if self._rng.random() < 0.75:
            found = [each for each in found if is_ready(each)]
        return self._rng.choice(found) if found else None

    def kill(self, program: Program | None, *, away: float = 0.0) -> None:
        """Kill a program, and start it again after so many seconds."""
        if program is not None:
            self._fault(f"kill -9 {program.role}", self._until_ready(program))
            program.kill()
            time.sleep(away)
            program.start()

    def kill_child(self, program: Program) -> None:
        """Kill one of the processes that a program has started."""
        if found := children(program.pid):
            self._fault(f"kill -9 a process of {program.name}", lambda: True)
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(found), signal.SIGKILL)

    def terminate(self, program: Program | None) -> None:
        """Send SIGTERM; `look` starts the program again."""
        if program is not None:
            pid = program.pid
            ready = self._until_ready(program)
            self._fault(f"SIGTERM {program.role}", lambda: program.pid != pid and ready(), hard=False)
            program.must_end_by = time.monotonic() + EXIT_SECONDS
            program.signal(signal.SIGTERM)

    def freeze(self, program: Program | None, seconds: float) -> None:
        """Stop a program and its processes for so long."""
        if program is not None:
            program.thaw_at = time.monotonic() + seconds
            frozen = children(program.pid)

            def signal_all(number: signal.Signals) -> None:
                program.signal(number)
                for child in frozen:
                    with suppress(ProcessLookupError):
                        os.kill(child, number)

            def thawed() -> bool:
                if program.thaw_at is None or time.monotonic() < program.thaw_at:
                    return False
                program.thaw_at = None
                signal_all(signal.SIGCONT)
                return True

            self._fault(f"SIGSTOP {program.role}", thawed)
            signal_all(signal.SIGSTOP)

    def cut_database(self) -> None:
        """End all connections to the database."""
        assert self.db is not None
        with suppress(sa.exc.DBAPIError):
            self._fault("cut all database connections", lambda: True)
            self.db.cut()

    def restart_database(self) -> None:
        """Restart the database's server."""
        assert self.db is not None
        self._fault("restart PostgreSQL", lambda: True)
        self.db.restart()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End the programs, those that depend on others first."""
        for each in sorted(self.programs, key=lambda each: each.role, reverse=True):
            if (code := each.close()) not in GRACEFUL_EXITS:
                self.broken.append(f"{each.name} ended with {code} at the end of the run")

    def end_callers(self, look: Callable[[], None]) -> list[str]:
        """End the callers, which wait for their outstanding calls; return what is to be said of those that do not."""
        callers, self.callers = self.callers, []
        for each in callers:
            each.signal(signal.SIGTERM)
        try:
            wait_until(lambda: all(each.ended() is not None for each in callers), look)
        except AssertionError:
            return [f"{each.name} does not end: calls are outstanding" for each in callers if each.ended() is None]
        finally:
            for each in callers:
                each.close()
        return []

    def kill_all(self) -> None:
        """End everything at once, after an error of the soak itself."""
        for each in (*self.callers, *self.programs):
            for child in children(each.pid):
                os.kill(child, signal.SIGKILL)
            each.kill()


def is_ready(program: Program) -> bool:
    """Return whether a program has said that it has started."""
    return any(program.has_said(each) for each in READY[program.role])


def wait_until(condition: Callable[[], bool], look: Callable[[], None]) -> None:
    """Call `look` until the condition is true."""

    def looked() -> bool:
        look()
        return condition()

    eventually(looked, WAIT_SECONDS)

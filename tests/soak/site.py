"""All processes of a soak, and the faults that are injected into them.

Everything exists twice, on the sides `left` and `right`: broker, Titanic, `mdworker` with two processes, HTTP gateway.
The brokers are linked and admit only known keys; the Titanics share a PostgreSQL.  All connections to brokers go
through proxies.  Faults hit one side at a time, so that the other one can go on, as is promised.
"""

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from crash import Database, Program
from support.processes import children, eventually

from zmdp import Client
from zmdp.clients import RequestError
from zmdp.mdp.keys import create_keys
from zmdp.testing import free_endpoint

from .callers import KINDS
from .faults import GRACE_SECONDS, Fault
from .proxy import Network

HERE: Final = Path(__file__).parent
SIDES: Final = ("left", "right")
ACCESS: Final = """
secret_key = "broker.key_secret"
[roles.brokers]
keys = ["broker.key"]
link = true
offer = ["*"]
[roles.callers]
keys = ["callers.key"]
call = ["*"]
[roles.workers]
keys = ["workers.key"]
offer = ["soak.*"]
[roles.titanic]
keys = ["titanic.key"]
call = ["*"]
offer = ["titanic.*"]
mmi = "all"
on_behalf = true
[roles.gateways]
keys = ["gateways.key"]
call = ["*"]
[roles.operator]
keys = ["operator.key"]
call = ["*"]
mmi = "all"
admin = true
"""
SERVICES: Final = ("soak.work", "soak.parts", "titanic.request", "titanic.reply", "titanic.close")
READY: Final = {
    "broker": ("ready on",), "titanic": ("serving titanic.",), "workers": ("serving at", "moved to"),
    "gateway": ("http://",),
}  # fmt: skip
"""What programs log or print once they have started: one of these.  Workers that do not reach the first broker move to
the other one at once."""
STEP_SECONDS: Final = (-3600, -60, 60, 3600)
FREEZE_SECONDS: Final = (6.0, 12.0)
"""Longer than heartbeat × liveness; sometimes longer than a lease."""
STALL_SECONDS: Final = (0.5, 8.0)
EXIT_SECONDS: Final = 60.0
"""How long a program may take to end after SIGTERM."""
WAIT_SECONDS: Final = 600.0
"""How long a replacement, or the end of the outstanding calls, may take."""
GRACEFUL_EXITS: Final = {0, -signal.SIGTERM}
"""The latter: it had not come so far as to handle the signal."""


class Site:
    """Starts everything, injects faults, and starts again what has ended."""

    def __init__(self, db: Database, folder: Path, rng: random.Random) -> None:
        self.db = db
        self.faults: list[Fault] = []
        self.broken: list[str] = []
        """What programs did that they must not."""
        self.network = Network()
        self._folder = folder
        self._rng = rng
        self._pending: list[tuple[Callable[[], bool], Fault]] = []
        """Faults that still affect something, and what tells when they no longer do; it is called until it is true."""
        self._keys = folder / "keys"
        self.ledger = folder / "ledger"
        for each in (self._keys, self.ledger):
            each.mkdir()
        for role in ("broker", "callers", "workers", "titanic", "gateways", "operator"):
            create_keys(role, self._keys)
        (self._keys / "access.toml").write_text(ACCESS)
        self.brokers = dict(zip(SIDES, (free_endpoint(), free_endpoint()), strict=True))
        gateways = [free_endpoint().removeprefix("tcp://") for _ in SIDES]
        self._gateways = dict(zip(SIDES, gateways, strict=True))
        self._clocks = {side: folder / f"clock-{side}" for side in SIDES}
        for clock in self._clocks.values():
            clock.write_text("0")
        self.sides: dict[str, dict[str, Program]] = {side: {} for side in SIDES}
        """The programs by side and role."""
        self.callers: list[Program] = []

    def start(self) -> None:
        """Start the programs, and when all services are available, the callers."""
        for side in SIDES:
            for role, command in self._commands(side).items():
                self.sides[side][role] = Program(role, f"{role}-{side}", command, self._folder, self._env(side, role))
        self._await_services()
        urls = ",".join(f"http://{each}" for each in self._gateways.values())
        for kind in KINDS:
            env = {**self._identity("callers"), "MDP_BROKER": self._endpoints("callers"), "SOAK_GATEWAYS": urls}
            self.callers.append(
                Program("caller", f"caller-{kind}", ("python", "-m", "soak.callers", kind), self._folder, env)
            )

    # ── what is started ──────────────────────────────────────────────────────────────────────────────────────────────

    def _identity(self, role: str) -> dict[str, str]:
        return {
            "MDP_KEY": str(self._keys / f"{role}.key_secret"), "MDP_BROKER_KEY": str(self._keys / "broker.key"),
            "SOAK_LEDGER": str(self.ledger), "PYTHONPATH": str(HERE.parent),
        }  # fmt: skip

    def _env(self, side: str, role: str) -> dict[str, str]:
        key = {"workers": "workers", "titanic": "titanic", "gateway": "gateways"}.get(role)
        path = os.pathsep.join(str(each) for each in (HERE.parent, HERE / "clock"))
        return {**(self._identity(key) if key else {}), "PYTHONPATH": path, "SOAK_CLOCK": str(self._clocks[side])}

    def _endpoints(self, who: str, first: str = "left") -> str:
        """Return both brokers' endpoints as `who` sees them, each behind a proxy of its own."""
        order = sorted(SIDES, reverse=first == "right")
        return ",".join(
            self.network.add(f"{who} → {side}", int(self.brokers[side].rpartition(":")[2])) for side in order
        )

    def _commands(self, side: str) -> dict[str, tuple[str, ...]]:
        other = SIDES[side == "left"]
        peer = self.network.add(f"{side} → {other}", int(self.brokers[other].rpartition(":")[2]))
        broker = (
            "mdp-broker", "--bind", self.brokers[side], "--name", side, "--access", str(self._keys / "access.toml"),
            "--peer", f"{peer}={self._keys / 'broker.key'}",
        )  # fmt: skip
        workers = ("mdworker", "soak.services:services", "--processes", "2", "--concurrency", "32")
        return {
            "broker": broker,
            "workers": (*workers, "--broker", self._endpoints(f"workers {side}", side)),
            "titanic": ("titanic", "serve", "--db", self.db.url, "--broker", self._endpoints(f"titanic {side}", side)),
            "gateway": ("mdp-gateway", "http", "--bind", self._gateways[side], "--broker",
                        self._endpoints(f"gateway {side}", side)),
        }  # fmt: skip

    def _client(self, side: str) -> Client:
        key, broker_key = self._keys / "operator.key_secret", self._keys / "broker.key"
        return Client(self.brokers[side], timeout=5.0, key=key, broker_key=broker_key)

    def _await_services(self) -> None:
        for side in SIDES:
            with self._client(side) as client:
                for each in SERVICES:
                    eventually(partial(client.available, each))
                eventually(partial(self._links_up, client))

    @staticmethod
    def _links_up(client: Client) -> bool:
        with suppress(RequestError):
            return bool(json.loads(client.request("mmi.brokers")[0])["brokers"])
        return False

    @property
    def programs(self) -> list[Program]:
        """All programs but the callers."""
        return [program for side in self.sides.values() for program in side.values()]

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
            at_start = not _is_ready(program)
            allowed = {-signal.SIGKILL, *({1, 6} if at_start and disturbed else set())}
        if code not in allowed:
            self.broken.append(f"{program.name} ended with {code}: see its log")
        program.note(f"ended with {code}")

    def _until_ready(self, program: Program) -> Callable[[], bool]:
        return lambda: program.ended() is None and _is_ready(program)

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
            _wait(lambda: self.undisturbed, look)
        except AssertionError:
            self.broken += [f"nothing recovers from this: {fault.what}" for _, fault in self._pending]
            self._pending.clear()

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def disturb(self, side: str) -> None:
        """Inject a fault, into this side or the network."""
        weights, faults = zip(*self._possible(), strict=True)
        self._rng.choices(faults, weights)[0](side)

    def _possible(self) -> list[tuple[float, Callable[[str], None]]]:
        return [
            (4.0, self._kill), (2.0, self._kill_child), (1.5, self._terminate), (1.0, self._replace_workers),
            (1.5, self._freeze), (2.0, self._cut), (1.5, self._stall), (0.5, self._cut_database),
            (0.25, self._restart_database), (1.0, self._step_clock),
        ]  # fmt: skip

    def _victim(self, side: str) -> Program | None:
        programs = [each for each in self.sides[side].values() if each.is_undisturbed()]
        return self._rng.choice(programs) if programs else None

    def _kill(self, side: str) -> None:
        if (program := self._victim(side)) is not None:
            self._fault(f"kill -9 {program.name}", self._until_ready(program))
            program.kill()
            program.start()

    def _kill_child(self, side: str) -> None:
        workers = self.sides[side]["workers"]
        if found := children(workers.pid):
            self._fault(f"kill -9 a process of {workers.name}", lambda: True)
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(found), signal.SIGKILL)

    def _terminate(self, side: str) -> None:
        if (program := self._victim(side)) is not None:
            self.terminate(program)

    def terminate(self, program: Program) -> None:
        """Send SIGTERM; `look` starts the program again."""
        pid = program.pid
        ready = self._until_ready(program)
        self._fault(f"SIGTERM {program.name}", lambda: program.pid != pid and ready(), hard=False)
        program.must_end_by = time.monotonic() + EXIT_SECONDS
        program.signal(signal.SIGTERM)

    def _replace_workers(self, side: str) -> None:
        workers = self.sides[side]["workers"]
        if workers.is_undisturbed() and _is_ready(workers):
            self._fault(f"SIGHUP {workers.name}", lambda: True, hard=False)
            workers.signal(signal.SIGHUP)

    def _freeze(self, side: str) -> None:
        if (program := self._victim(side)) is not None:
            program.thaw_at = time.monotonic() + self._rng.uniform(*FREEZE_SECONDS)
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

            self._fault(f"SIGSTOP {program.name}", thawed)
            signal_all(signal.SIGSTOP)

    def _cut(self, side: str) -> None:
        proxy = self._rng.choice(self.network.proxies)
        self._fault(f"cut {proxy.name}", lambda: True)
        self.network.do(proxy.cut())

    def _stall(self, side: str) -> None:
        proxy = self._rng.choice(self.network.proxies)
        until = time.monotonic() + self._rng.uniform(*STALL_SECONDS)

        def resumed() -> bool:
            if time.monotonic() < until:
                return False
            self.network.do(proxy.resume())
            return True

        self._fault(f"stall {proxy.name}", resumed)
        self.network.do(proxy.stall())

    def _cut_database(self, side: str) -> None:
        with suppress(sa.exc.DBAPIError):
            self._fault("cut all database connections", lambda: True)
            self.db.cut()

    def _restart_database(self, side: str) -> None:
        self._fault("restart PostgreSQL", lambda: True)
        self.db.restart()

    def _step_clock(self, side: str) -> None:
        step = self._rng.choice(STEP_SECONDS)
        self._fault(f"step the clock of {side} to {step:+d} s", lambda: True)
        self._clocks[side].write_text(f"{step:+d}")

    # ── graceful replacement ─────────────────────────────────────────────────────────────────────────────────────────

    def replace_all(self, look: Callable[[], None]) -> None:
        """Replace one program after the other, as docs/how-to/deploy.md says; call `look` meanwhile."""
        for side, role in itertools.product(SIDES, ("workers", "titanic", "gateway", "broker")):
            self.terminate(self.sides[side][role])
            _wait(lambda: self.undisturbed, look)
            self._await_services()

    def close(self) -> None:
        """End the programs, those that depend on others first."""
        for each in sorted(self.programs, key=lambda each: each.role, reverse=True):
            if (code := each.close()) not in GRACEFUL_EXITS:
                self.broken.append(f"{each.name} ended with {code} at the end of the run")
        self.network.close()

    def end_callers(self, look: Callable[[], None]) -> list[str]:
        """End the callers, which wait for their outstanding calls; return what is to be said of those that do not."""
        callers, self.callers = self.callers, []
        for each in callers:
            each.signal(signal.SIGTERM)
        try:
            _wait(lambda: all(each.ended() is not None for each in callers), look)
        except AssertionError:
            return [f"{each.name} does not end: calls are outstanding" for each in callers if each.ended() is None]
        finally:
            for each in callers:
                each.close()
        return []

    def kill(self) -> None:
        """End everything at once, after an error of the soak itself."""
        for each in (*self.callers, *self.programs):
            for child in children(each.pid):
                os.kill(child, signal.SIGKILL)
            each.kill()


def _is_ready(program: Program) -> bool:
    return any(program.has_said(each) for each in READY[program.role])


def _wait(condition: Callable[[], bool], look: Callable[[], None]) -> None:
    """Call `look` until the condition is true."""

    def looked() -> bool:
        look()
        return condition()

    eventually(looked, WAIT_SECONDS)

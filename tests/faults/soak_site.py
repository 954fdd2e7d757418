"""All processes of a soak, and which faults are injected into them.

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

from support.processes import eventually

from zmdp import Client
from zmdp.clients import RequestError
from zmdp.mdp.security.keys import create_keys
from zmdp.testing import free_endpoint

from .callers import SOAKED as KINDS
from .programs import HERE, Database, Program
from .proxy import Network
from .site import Site, is_ready, wait_until

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
offer = ["faults.*"]
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
SERVICES: Final = ("faults.work", "faults.parts", "titanic.request", "titanic.reply", "titanic.close")
STEP_SECONDS: Final = (-3600, -60, 60, 3600)
FREEZE_SECONDS: Final = (6.0, 12.0)
"""Longer than heartbeat × liveness; sometimes longer than a lease."""
STALL_SECONDS: Final = (0.5, 8.0)


class SoakSite(Site):
    """Everything twice."""

    db: Database

    def __init__(self, db: Database, folder: Path, rng: random.Random) -> None:
        super().__init__(folder, rng, db)
        self.network = Network()
        self._keys = folder / "keys"
        self._keys.mkdir()
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

    def start(self) -> None:
        """Start the programs, and when all services are available, the callers."""
        for side in SIDES:
            for role, command in self._commands(side).items():
                self.sides[side][role] = self.run(role, f"{role}-{side}", *command, **self._env(side, role))
        self._await_services()
        urls = ",".join(f"http://{each}" for each in self._gateways.values())
        for kind in KINDS:
            env = {**self._identity("callers"), "MDP_BROKER": self._endpoints("callers"), "FAULTS_GATEWAYS": urls}
            self.run("caller", f"caller-{kind}", kind, **env)

    # ── what is started ──────────────────────────────────────────────────────────────────────────────────────────────

    def _identity(self, role: str) -> dict[str, str]:
        return {
            "MDP_KEY": str(self._keys / f"{role}.key_secret"), "MDP_BROKER_KEY": str(self._keys / "broker.key"),
        }  # fmt: skip

    def _env(self, side: str, role: str) -> dict[str, str]:
        key = {"workers": "workers", "titanic": "titanic", "gateway": "gateways"}.get(role)
        path = os.pathsep.join(str(each) for each in (HERE, HERE / "faults" / "clock"))
        return {**(self._identity(key) if key else {}), "PYTHONPATH": path, "FAULTS_CLOCK": str(self._clocks[side])}

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
        workers = ("mdworker", "faults.services:services", "--processes", "2", "--concurrency", "32")
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

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def disturb_side(self, side: str) -> None:
        """Inject a fault, into this side or the network."""
        programs = list(self.sides[side].values())
        workers = self.sides[side]["workers"]
        self.disturb([
            (4.0, lambda: self.kill(self.victim(programs))), (2.0, lambda: self.kill_child(workers)),
            (1.5, lambda: self.terminate(self.victim(programs))), (1.0, lambda: self._replace_workers(workers)),
            (1.5, lambda: self.freeze(self.victim(programs), self._rng.uniform(*FREEZE_SECONDS))),
            (2.0, self._cut), (1.5, self._stall), (0.5, self.cut_database), (0.25, self.restart_database),
            (1.0, lambda: self._step_clock(side)),
        ])  # fmt: skip

    def _replace_workers(self, workers: Program) -> None:
        if workers.is_undisturbed() and is_ready(workers):
            self._fault(f"SIGHUP {workers.name}", lambda: True, hard=False)
            workers.signal(signal.SIGHUP)

    def _cut(self) -> None:
        proxy = self._rng.choice(self.network.proxies)
        self._fault(f"cut {proxy.name}", lambda: True)
        self.network.do(proxy.cut())

    def _stall(self) -> None:
        proxy = self._rng.choice(self.network.proxies)
        until = time.monotonic() + self._rng.uniform(*STALL_SECONDS)

        def resumed() -> bool:
            if time.monotonic() < until:
                return False
            self.network.do(proxy.resume())
            return True

        self._fault(f"stall {proxy.name}", resumed)
        self.network.do(proxy.stall())

    def _step_clock(self, side: str) -> None:
        step = self._rng.choice(STEP_SECONDS)
        self._fault(f"step the clock of {side} to {step:+d} s", lambda: True)
        self._clocks[side].write_text(f"{step:+d}")

    # ── graceful replacement ─────────────────────────────────────────────────────────────────────────────────────────

    def replace_all(self, look: Callable[[], None]) -> None:
        """Replace one program after the other, as docs/how-to/deploy.md says; call `look` meanwhile."""
        for side, role in itertools.product(SIDES, ("workers", "titanic", "gateway", "broker")):
            self.terminate(self.sides[side][role])
            wait_until(lambda: self.undisturbed, look)
            self._await_services()

    def close(self) -> None:
        """End the programs and the network."""
        super().close()
        self.network.close()

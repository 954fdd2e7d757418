"""A broker under attack, and what must hold: the broker lives, a canary's calls succeed, memory stays within bounds.

The broker is a real `mdp-broker` with small limits.  The *canary* is a client and a worker of its own, which calls the
whole time through the public API.  The attacker is a process of its own, with bounded memory and time.

What holds for the gateway and the dashboard is in `web_site.py`.
"""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from support.processes import BIN, TIMEOUT_SECONDS, Process, eventually, process

from zmdp import Client, Worker
from zmdp.mdp.security.keys import create_keys

from .suite import Attack

LIMITS: Final = {
    "max-request-bytes": 32 << 20,
    "max-outbox-bytes": 32 << 20,
    "max-message": 4 << 20,
    "max-services": 1000,
    "max-workers": 5000,
    "drain-timeout": 1,
    "liveness": 50,
}
"""The broker's limits: small, so that a short attack exceeds them."""
CHARGED: Final = ("max_request_bytes", "max_outbox_bytes")
"""Those that bound the broker's memory."""
TOLERANCE: Final = 1.3
"""How much more memory than these limits the broker may use, beside what it uses when idle and for connections."""
CONNECTION: Final = 40_000
"""Bytes that libzmq takes for a connection (measured: 31 kB).  Their number is limited otherwise."""
PAUSE: Final = 0.002
"""Seconds between two calls of the canary."""
CANARY_ROLE: Final = """
[roles.canary]
keys = ["canary.key"]
call = ["canary", "newcomer-*"]
offer = ["canary", "newcomer-*"]
mmi = "all"
"""
_names = count(1)


def digest(frames: Sequence[bytes]) -> bytes:
    """Return the right answer to a request."""
    return hashlib.sha256(b"".join(frames)).digest()


@dataclass
class Outcome:
    """What became of one attack."""

    attack: str
    messages: int = 0
    connections: int = 0
    """Those that it kept open."""
    seconds: float = 0.0
    """Until the broker was at rest again."""
    peak_mb: float = 0.0
    bound_mb: float = 0.0
    calls: int = 0
    worst_ms: float = 0.0
    """The canary's worst latency."""
    exit_seconds: float | None = None
    """From SIGTERM to the broker's end."""
    cut_short: str | None = None
    """How the broker put an end to the attack."""
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return asdict(self)


class Canary:
    """Calls the whole time; every call must succeed with the right answer."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.worst = 0.0
        self._begun = 0
        self._answered = 0
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._call_on, name="canary", daemon=True)

    @property
    def calls(self) -> int:
        return self._answered

    def call(self, number: int) -> str | None:
        """Make a call; return what was wrong with the answer, or None."""
        raise NotImplementedError

    def _call_on(self) -> None:
        while not self._stopping.wait(PAUSE):
            self._begun += 1
            started = time.monotonic()
            try:
                failure = self.call(self._begun)
            except Exception as error:  # noqa: BLE001 - whatever it is, the call failed
                failure = f"{type(error).__name__}: {error}"
            with self._changed:
                if self._stopping.is_set():
                    return  # the broker has ended
                if failure is not None:
                    self.failures.append(failure)
                self._answered += 1
                self.worst = max(self.worst, time.monotonic() - started)
                self._changed.notify_all()

    def prove(self, broker: Process) -> None:
        """Wait until a call that begins now has been answered, or the broker has ended."""
        with self._changed:
            wanted = self._begun + 1
            while self._answered < wanted and is_running(broker):
                self._changed.wait(0.1)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping.set()
        self.interrupt()
        self._thread.join()

    def interrupt(self) -> None:
        """End a call that waits: the broker may have ended."""


class ServiceCanary(Canary):
    """A client that calls a worker through the broker."""

    def __init__(self, endpoint: str, keys: Mapping[str, Any]) -> None:
        super().__init__()
        self._worker = Worker("canary", digest, broker=endpoint, liveness=50, **keys)
        self._client = Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0, **keys)

    def call(self, number: int) -> str | None:
        body = b"%d" % number
        reply = self._client.request("canary", body)
        return None if reply == [digest([body])] else f"wrong answer to {body!r}: {reply!r:.100}"

    def __enter__(self) -> Self:
        self._worker.start()
        return super().__enter__()

    def interrupt(self) -> None:
        self._client.close()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._worker.close()
        self._worker.wait()


class Site:
    """What is attacked, running, with its canary."""

    broker: Process
    """The program that is attacked."""
    pid: int
    """The process whose memory counts."""
    endpoint: str
    canary: Canary
    bound: float
    folder: Path | None = None
    """The keys of all roles, if there is access control."""
    descriptors = sys.maxsize
    """How many it may have open."""

    def set_bound(self, limit: int) -> None:
        """Let it use so much memory in addition to what it uses now, within the tolerance."""
        self.bound = self._memory("VmRSS") + TOLERANCE * limit

    def greet_newcomer(self) -> None:
        """Raise unless somebody new is served."""
        raise NotImplementedError

    def check(self, outcome: Outcome, when: str) -> None:
        """Note whether the broker lives, newcomers are served, and the canary's calls succeed."""
        # An abort ends the connections before the process.
        if self.broker.poll(1.0 if outcome.cut_short else 0.0) is None:
            try:
                self.greet_newcomer()
            except Exception as error:  # noqa: BLE001 - whatever it is, the newcomer was not served
                outcome.failures.append(f"newcomer {when}: {type(error).__name__}: {error}")
        self.canary.prove(self.broker)

    def _memory(self, name: str) -> int:
        """Return a figure of the broker's memory in bytes: VmRSS now, VmHWM its peak; 0 if it has ended."""
        if not is_running(self.broker):
            return 0
        status = Path(f"/proc/{self.pid}/status").read_text()
        # An ended process that nobody has waited for yet has no memory.
        return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))

    def end(self, outcome: Outcome) -> None:
        """Note what is known at the end."""
        outcome.calls, outcome.worst_ms = self.canary.calls, round(1000 * self.canary.worst, 1)
        if failures := self.canary.failures:
            outcome.failures.append(f"{len(failures)} calls of the canary failed, the first with {failures[0]}")
        if not is_running(self.broker):
            outcome.failures.append(f"the broker has ended: {self.broker.stderr[-2000:]}")
        self._judge_memory(outcome, self._memory("VmHWM"))

    def _judge_memory(self, outcome: Outcome, peak: int) -> None:
        bound = self.bound + CONNECTION * min(outcome.connections, self.descriptors)
        outcome.peak_mb, outcome.bound_mb = round(peak / 1e6, 1), round(bound / 1e6, 1)
        if peak > bound:
            outcome.failures.append(f"memory: {peak / 1e6:.0f} MB, over the bound of {bound / 1e6:.0f} MB")

    def time_exit(self, outcome: Outcome) -> None:
        """Send SIGTERM and note how long the broker takes to end, and its memory until then."""
        started, peak = time.monotonic(), 0
        self.broker.send_signal(signal.SIGTERM)
        while is_running(self.broker) and time.monotonic() < started + TIMEOUT_SECONDS:
            peak = max(peak, self._memory("VmHWM"))
            self.broker.poll(0.05)
        outcome.exit_seconds = round(time.monotonic() - started, 2)
        self._judge_memory(outcome, peak)
        if is_running(self.broker):
            outcome.failures.append(f"the broker has not ended {TIMEOUT_SECONDS:g} s after SIGTERM")


class BrokerSite(Site):
    """A running broker; `options` are more options of `mdp-broker`."""

    def __init__(self, stack: ExitStack, attack: Attack, options: Sequence[str]) -> None:
        keys: Mapping[str, Any] = {}
        if attack.roles:
            self.folder = Path(stack.enter_context(TemporaryDirectory(prefix="zmdp-attack-")))
            options = [*options, "--access", str(write_access(self.folder, attack.roles))]
            keys = {"key": self.folder / "canary.key_secret", "broker_key": self.folder / "broker.key"}
        limits = [each for name, value in LIMITS.items() for each in (f"--{name}", str(value))]
        command = [str(BIN / "mdp-broker"), "--bind", "tcp://127.0.0.1:*", *limits, *options, *attack.broker]
        descriptors = str(attack.descriptors or "$(ulimit -n)")
        self.broker = stack.enter_context(
            process("/bin/sh", "-c", f'ulimit -n {descriptors}; exec "$0" "$@"', *command)
        )
        self.pid = self.broker.pid
        self.endpoint = self.broker.line("://", "stdout")
        self._keys = keys
        self.descriptors = attack.descriptors or sys.maxsize
        self.canary = stack.enter_context(ServiceCanary(self.endpoint, keys))
        self.canary.prove(self.broker)
        self.greet_newcomer()
        self.canary.worst = 0.0
        with Client(self.endpoint, timeout=TIMEOUT_SECONDS, **keys) as client:
            limits = json.loads(client.request("mmi.broker")[0])["limits"]
        self.set_bound(sum(limits[each] for each in CHARGED))

    def greet_newcomer(self) -> None:
        """Register a worker for a new service and call it, and ask the broker whether it has seen a bug."""
        service = f"newcomer-{next(_names)}"
        with Client(self.endpoint, timeout=TIMEOUT_SECONDS, retries=0, **self._keys) as client:
            with Worker(service, digest, broker=self.endpoint, **self._keys):
                eventually(lambda: client.available(service))
                assert client.request(service, b"hello") == [digest([b"hello"])]
            errors = json.loads(client.request("mmi.stats")[0])["internal_errors"]
            assert errors == 0, f"{errors} internal errors: {self.broker.stderr[-5000:]}"


def write_access(folder: Path, roles: str) -> Path:
    """Write an access file with these roles and the canary's, and a key for each; return its path."""
    text = f'secret_key = "broker.key_secret"\n{CANARY_ROLE}{roles}'
    for name in ("broker", *tomllib.loads(text)["roles"]):
        create_keys(name, folder)
    path = folder / "access.toml"
    path.write_text(text)
    return path


def is_running(broker: Process) -> bool:
    """Return whether the process has not ended."""
    return broker.poll() is None


@contextmanager
def _attacker(attack: Attack, site: Site, amount: int, seed: int) -> Iterator["subprocess.Popen[str]"]:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "attacks.attacker", attack.name, site.endpoint, str(amount), str(seed)]
    if site.folder is not None:
        command.append(str(site.folder))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def _web_site() -> type[Site]:
    from .web_site import WebSite  # it needs the extra `web`

    return WebSite


def _carry_out(running: "subprocess.Popen[str]", outcome: Outcome, seconds: float) -> None:
    """Wait until the attack has done what it does."""
    assert running.stdout is not None
    if not select.select([running.stdout], [], [], seconds)[0]:
        outcome.failures.append(f"the attacker was not done after {seconds:g} s")
        return
    line = running.stdout.readline()
    if not line:
        outcome.failures.append(f"the attacker ended with exit code {running.wait()}")
        return
    report = json.loads(line)
    outcome.messages, outcome.connections = report["messages"], report["connections"]
    outcome.cut_short = report["cut_short"]
    if report["failure"] is not None:
        outcome.failures.append(report["failure"])


def carry_out(attack: Attack, amount: int, seed: int = 1, options: Sequence[str] = ()) -> Outcome:
    """Carry out an attack on a broker of its own, with these options, and return what became of it."""
    outcome = Outcome(attack.name)
    with ExitStack() as stack:
        site = (BrokerSite if attack.target == "broker" else _web_site())(stack, attack, options)
        started = time.monotonic()
        with _attacker(attack, site, amount, seed) as running:
            _carry_out(running, outcome, 2 * TIMEOUT_SECONDS + amount / 50)
            if attack.drained:
                site.canary.prove(site.broker)
                site.end(outcome)
                site.time_exit(outcome)
            elif attack.shuts_out:
                site.canary.prove(site.broker)
            else:
                site.check(outcome, "during the attack")
        if not attack.drained:
            site.check(outcome, "after the attack")
            site.end(outcome)
        outcome.seconds = round(time.monotonic() - started, 1)
    return outcome

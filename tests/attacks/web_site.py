"""The gateway or the dashboard under attack, beside a broker, and a canary that calls and probes over HTTP."""

import http.client
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from support.processes import TIMEOUT_SECONDS, Process, eventually, process

from zmdp import Worker

from .harness import Canary, Outcome, Site, digest
from .suite import Attack
from .web import LARGE_REPLY

MAX_METRICS_BYTES: Final = 1 << 20
"""No attack may make what the broker exposes at /metrics larger."""


def ask(url: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return the status and the body of the answer to a request over a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class HttpCanary(Canary):
    """Calls a service, or looks at a page, and probes, the whole time."""

    def __init__(self, url: str, *, gateway: bool) -> None:
        super().__init__()
        self._url = url
        self._gateway = gateway

    def call(self, number: int) -> str | None:
        if self._gateway:
            body = b"%d" % number
            answer = ask(self._url, "POST", "/services/canary", body)
            if answer != (200, digest([body])):
                return f"wrong answer to {body!r}: {answer!r:.200}"
        else:
            status, text = ask(self._url, "GET", "/")
            if status != 200:
                return f"the first page has status {status}: {text!r:.200}"
        status, text = ask(self._url, "GET", "/livez")
        return None if status == 200 else f"/livez has status {status}: {text!r:.200}"


class WebSite(Site):
    """A broker with its dashboard, and a gateway; the attack's `target` is one of these."""

    def __init__(self, stack: ExitStack, attack: Attack, options: Sequence[str]) -> None:
        broker = stack.enter_context(
            process("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0", *attack.broker, *options)
        )
        self._broker_endpoint = broker.line("tcp://", "stdout")
        self._dashboard = broker.line("http://", "stdout").strip().rstrip("/")
        workers = [Worker("canary", digest, broker=self._broker_endpoint)]
        workers.append(Worker("large", lambda _: bytes(LARGE_REPLY), broker=self._broker_endpoint))
        for worker in workers:
            stack.enter_context(worker)
        if attack.target == "gateway":
            victim = stack.enter_context(
                process(
                    "mdp-gateway", "http", "--bind", "127.0.0.1:0", "--broker", self._broker_endpoint, *attack.options
                )
            )
            self._start(stack, attack, victim, victim.pid, victim.line("http://", "stdout").strip())
        else:
            self._start(stack, attack, broker, _web_process(broker.pid), self._dashboard)

    def _start(self, stack: ExitStack, attack: Attack, victim: Process, pid: int, url: str) -> None:
        self.broker = victim
        self.pid = pid
        self.endpoint = url
        eventually(lambda: ask(url, "GET", "/readyz")[0] == 200)
        self.canary = stack.enter_context(HttpCanary(url, gateway=attack.target == "gateway"))
        self.canary.prove(victim)
        self.canary.worst = 0.0
        self.set_bound(attack.memory)

    def greet_newcomer(self) -> None:
        assert ask(self.endpoint, "GET", "/readyz")[0] == 200

    def end(self, outcome: Outcome) -> None:
        super().end(outcome)
        size = len(ask(self._dashboard, "GET", "/metrics")[1])
        if size > MAX_METRICS_BYTES:
            outcome.failures.append(f"/metrics has {size} bytes")


def _web_process(broker: int) -> int:
    """Return the id of the process that serves a broker's dashboard."""

    def children() -> list[int]:
        found = []
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                try:
                    stat = (each / "stat").read_text()
                except OSError:
                    continue
                if int(stat.rpartition(")")[2].split()[1]) == broker:
                    found.append(int(each.name))
        return found

    (child,) = eventually(children)
    return int(child)

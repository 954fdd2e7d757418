"""What the demos share: printing, starting processes that end with their block, waiting."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from pydoc_data.topics import topics

from zmdp.clients import Client
from zmdp.testing import free_endpoint

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
HEARTBEAT = "0.5"
"""Seconds, for the command line."""
PATIENCE = 20.0
"""Seconds after which the demo gives up waiting for something."""
END_SECONDS = 35.0
"""Seconds that a process may take to end: --drain-timeout is at most 30."""


def say(text: str = "") -> None:
    """Print a line immediately, even to a pipe."""
    print(text, flush=True)


def scene(number: int, title: str) -> None:
    """Print the heading of a scene."""
    say(f"\n── {number}. {title} {'─' * (90 - len(title))}")


@contextmanager
def process(*command: str, patience: float = END_SECONDS) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the background and end it with the block; kill it if it takes longer than `patience` seconds."""
    running = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(patience)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            say(f"    killed {Path(command[0]).name}, pid {running.pid}: it did not end within {patience:g} s")
        if running.stdout:
            running.stdout.close()


def start_broker(stack: ExitStack, bind: str | None = None) -> tuple[subprocess.Popen[str], str]:
    """Start a broker, by default on a free port.  Return its process and its endpoint."""
    quiet = ("--heartbeat", HEARTBEAT, "--log-level", "error")
    broker = stack.enter_context(process(str(BIN / "mdp-broker"), "--bind", bind or free_endpoint(), *quiet))
    endpoint = broker.stdout.readline().strip() if broker.stdout else ""
    if not endpoint:
        raise SystemExit("demo: the broker did not start; see its message above")
    say(f"$ mdp-broker                             pid {broker.pid}, listening on {endpoint}")
    return broker, endpoint


def worker(target: str, endpoint: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run `mdworker` for a block."""
    quiet = ("--heartbeat", HEARTBEAT, "--log-level", "error")
    return process(str(BIN / "mdworker"), target, "--broker", endpoint, *quiet)


def wait_for(client: Client, service: str, workers: int = 1, patience: float = PATIENCE) -> None:
    """Wait until at least `workers` workers offer the service."""
    wait_until(lambda: len(rows(client, service)) >= workers, f"{workers} worker(s) for {service}", patience)


def rows(client: Client, service: str) -> list[dict[str, object]]:
    """Return the broker's rows about a service's workers (`mmi.workers`)."""
    found: list[dict[str, object]] = json.loads(client.request("mmi.workers", service.encode())[0])["workers"]
    return found


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait until `condition` is true.  End the demo if that takes longer than `patience` seconds."""
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"demo: gave up after waiting {patience:g} s for {what}")
        time.sleep(0.02)


def a_text() -> bytes:
    """Return a few hundred kB of text that every Python has: the chapters of its language reference, as in help()."""
    return "".join(f"# {title}\n{text}\n" for title, text in sorted(topics.items())).encode()

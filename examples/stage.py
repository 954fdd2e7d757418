"""What the scenes of the demo share: lines of the story, processes that end with their block, waiting."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pydoc_data.topics import topics

from zmdp.clients import Client

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
HEARTBEAT = "0.5"
PATIENCE = 20.0


def say(text: str = "") -> None:
    """Print a line of the story."""
    print(text, flush=True)


def scene(number: int, title: str) -> None:
    """Print a heading."""
    say(f"\n── {number}. {title} {'─' * (90 - len(title))}")


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the background and end it with the block."""
    running = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()
        if running.stdout:
            running.stdout.close()


def worker(target: str, endpoint: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A worker process for the demo's broker."""
    quiet = ("--heartbeat", HEARTBEAT, "--log-level", "error")
    return process(str(BIN / "mdworker"), target, "--broker", endpoint, *quiet)


def wait_for(client: Client, service: str, workers: int = 1, patience: float = PATIENCE) -> None:
    """Wait until so many workers offer the service."""
    wait_until(lambda: len(rows(client, service)) >= workers, f"{workers} worker(s) for {service}", patience)


def rows(client: Client, service: str) -> list[dict[str, object]]:
    """Return the broker's rows about a service's workers (`mmi.workers`)."""
    found: list[dict[str, object]] = json.loads(client.request("mmi.workers", service.encode())[0])["workers"]
    return found


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for something to become true; the demo fails if it does not."""
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"demo: waited {patience:g} s in vain for {what}")
        time.sleep(0.02)


def a_text() -> bytes:
    """A few hundred kB of real text that every Python has: the chapters of its language reference, as help() shows."""
    return "".join(f"# {title}\n{text}\n" for title, text in sorted(topics.items())).encode()

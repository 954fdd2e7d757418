"""Death of a worker: from its kill -9 until its request runs in another worker, and until the broker knows.

    python bench/suite.py --parts death

Real processes: `mdp-broker` and `mdworker` with default settings.  Each kill hits a new process.

- Busy: the worker is in a handler.  The time ends when the handler of another worker, which was idle, begins with the
  same request; both processes read the same clock.
- Idle: the worker is the only one of its service.  The time ends when `mmi.service` answers 404; it is asked every
  millisecond, so one round trip is included.

Both include the time that the system takes to end the process, which is also shown: on a busy machine it is most of the
total.
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import processes
from stacks import running

from zmdp.clients import Client

PART = "death"
TITLE = "Death of a worker"
FIGURE = "time from a worker's kill -9"
BUSY, IDLE, ENDED = "until its request runs in another worker", "until mmi.service knows", "until the process has ended"
KILLS = 25
SPARE = 3
"""Workers that are running while one of them is killed."""
TIMEOUT_SECONDS = 60.0
PAUSE = 0.001


def run(options: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the records of this part."""
    del options  # fewer kills say nothing about the longest time
    note = f"{KILLS} kills each; the range is that of all kills"
    yield {"part": PART, "figure": FIGURE, "unit": "ms", "note": note}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        server = opened.enter_context(processes.broker())
        client = opened.enter_context(Client(server.address, timeout=TIMEOUT_SECONDS))
        tell(f"{PART}: {KILLS} busy workers")
        for ended, noticed in kill_busy(opened, client, server.address, folder):
            yield from _records("busy", {ENDED: ended, BUSY: noticed})
        tell(f"{PART}: {KILLS} idle workers")
        for ended, noticed in kill_idle(opened, client, server.address):
            yield from _records("idle", {ENDED: ended, IDLE: noticed})


def _records(killed: str, times: dict[str, float]) -> Iterator[dict[str, Any]]:
    for name, seconds in times.items():
        yield running.record(PART, (FIGURE, "ms"), "zmdp", {"killed": killed, "time": name}, 1e3 * seconds)


def kill_busy(opened: ExitStack, client: Client, address: str, folder: Path) -> Iterator[tuple[float, float]]:
    """Repeatedly kill the worker that holds a request; yield the seconds until it has ended, and until its request
    runs."""
    for _ in range(SPARE - 1):
        start(opened, address, "hold")
    for number in range(KILLS):
        start(opened, address, "hold")
        wait_for(lambda: ready_workers(client, "hold") >= SPARE)
        begun = folder / str(number)
        begun.mkdir()
        asked = client.submit("hold", str(begun).encode())
        wait_for(lambda begun=begun: any(begun.iterdir()))
        pid = int(next(begun.iterdir()).name)
        with Killed(pid) as killed:
            began = float(asked.result()[0])
        yield killed.ended - killed.at, began - killed.at


def kill_idle(opened: ExitStack, client: Client, address: str) -> Iterator[tuple[float, float]]:
    """Repeatedly kill the only worker of a service; yield the seconds until it has ended, and until the broker
    knows."""
    for number in range(KILLS):
        service = f"idle-{number}"
        process = start(opened, address, service)
        wait_for(lambda service=service: client.available(service))
        with Killed(process.pid) as killed:
            while client.available(service):
                time.sleep(PAUSE)
            known = time.monotonic()
        yield killed.ended - killed.at, known - killed.at


class Killed:
    """Kill a child process on entry, and wait for its end on exit."""

    def __init__(self, pid: int) -> None:
        self.at = self.ended = 0.0
        self._pid = pid
        self._thread = threading.Thread(target=self._wait)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        self.ended = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        self.at = time.monotonic()
        os.kill(self._pid, signal.SIGKILL)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def start(opened: ExitStack, address: str, service: str) -> processes.Process:
    """Start an `mdworker` process with default settings."""
    target = ("services:hold",) if service == "hold" else ("services:echo", "--service", service)
    command = (processes.BIN / "mdworker", *target, "--broker", address, "--log-level", "error")
    return opened.enter_context(processes.running(*command))


def ready_workers(client: Client, service: str) -> int:
    """Return how many workers of a service are registered and idle."""
    found = json.loads(client.request("mmi.workers", service.encode())[0])["workers"]
    return sum(not each["busy"] for each in found)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds.  Raises `FailedError` if it takes too long."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise processes.FailedError(f"nothing happened for {TIMEOUT_SECONDS:g} s")
        time.sleep(0.005)

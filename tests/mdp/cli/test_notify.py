"""What the commands tell systemd, at a real socket in its place."""

import os
import signal
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, process

from zmdp.mdp.cli import notify
from zmdp.testing import free_endpoint

LOOSE = "60000000"
"""Microseconds of a watchdog that no test outlasts."""


class Manager:
    """Receives what a service manager is told."""

    def __init__(self, path: Path | str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.address = str(path).replace("\0", "@")
        self.wait()

    def wait(self) -> None:
        """Let `next` wait for a message."""
        self._socket.settimeout(TIMEOUT_SECONDS)

    def environment(self, watchdog: str = LOOSE) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": watchdog}

    def next(self, but: str = "WATCHDOG=1") -> str:
        """Return the next message, and ignore those of one kind."""
        while (message := self._socket.recv(4096).decode()) == but:
            pass
        return message

    def rest(self) -> list[str]:
        """Return what has been said since, but for signs of life."""
        self._socket.setblocking(False)
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self.next())
        return found

    def is_silent(self, seconds: float) -> bool:
        """Read what was said; return True as soon as nothing is said for so long."""
        self._socket.settimeout(seconds)
        try:
            while True:
                self._socket.recv(4096)
        except TimeoutError:
            return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path):
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@pytest.fixture
def broker(manager):
    del manager
    with process("mdp-broker", "--bind", free_endpoint()) as running:
        yield running.line("tcp://", "stdout")


BLOCKING = """
import time
from zmdp.workers import AsyncWorker
worker = AsyncWorker("block")
@worker
async def block(request):
    print("blocked", flush=True)
    time.sleep(3600)
"""


def commands(endpoint, tmp_path):
    (tmp_path / "blocking.py").write_text(BLOCKING)
    return {
        "titanic": ("titanic", "serve", "--broker", endpoint, "--db", f"sqlite:///{tmp_path}/titanic.db"),
        "http": ("mdp-gateway", "http", "--broker", endpoint, "--bind", "127.0.0.1:0"),
        "flux": ("mdp-gateway", "flux", "--broker", endpoint, "--socket", str(tmp_path / "flux")),
        "threads": ("mdworker", "zmdp.workers.examples:echo", "--broker", endpoint),
        "asyncio": ("mdworker", "blocking:worker", "--broker", endpoint, "--drain-timeout", "0"),
        "processes": ("mdworker", "zmdp.workers.examples:echo", "--broker", endpoint, "--processes", "2"),
    }


def test_a_broker_says_when_it_serves_reloads_and_stops(manager, tmp_path):
    access = Folder(tmp_path)
    words = ("mdp-broker", "--bind", free_endpoint(), "--access", str(access.access))
    with process(*words, **manager.environment()) as running:
        assert manager.next() == "READY=1"
        assert manager.next(but="") == "WATCHDOG=1"
        running.send_signal(signal.SIGHUP)
        reloading, since = manager.next().split("\n")
        assert reloading == "RELOADING=1"
        assert since.startswith("MONOTONIC_USEC=")
        assert manager.next() == "READY=1"
        running.send_signal(signal.SIGTERM)
        assert manager.next() == "STOPPING=1"
        assert running.wait() == 0


@pytest.mark.parametrize("kind", ["titanic", "http", "flux", "threads", "asyncio"])
def test_a_command_says_when_it_serves_and_stops(kind, broker, manager, tmp_path):
    with process(*commands(broker, tmp_path)[kind], cwd=tmp_path, **manager.environment()) as running:
        assert manager.next() == "READY=1"
        assert manager.next(but="") == "WATCHDOG=1"
        running.send_signal(signal.SIGTERM)
        assert manager.next() == "STOPPING=1"
        assert running.wait() == 0


def test_a_supervisor_says_when_one_of_its_processes_serves_and_when_they_stop(broker, manager, tmp_path):
    with process(*commands(broker, tmp_path)["processes"], **manager.environment()) as running:
        assert manager.next() == "READY=1"
        assert manager.next(but="") == "WATCHDOG=1"
        running.send_signal(signal.SIGTERM)
        assert manager.next() == "STOPPING=1"
        assert running.wait() == 0
    assert manager.rest() == []


def test_a_worker_is_not_ready_before_its_broker_is(manager):
    endpoint = free_endpoint()
    with process("mdworker", "zmdp.workers.examples:echo", "--broker", endpoint, **manager.environment()) as worker:
        worker.line("offering echo")
        assert manager.rest() == []
        manager.wait()
        with process("mdp-broker", "--bind", endpoint):
            assert manager.next() == "READY=1"


@pytest.mark.parametrize("kind", ["broker", "threads", "asyncio", "titanic", "processes"])
def test_a_loop_that_turns_gives_signs_of_life(kind, broker, manager, tmp_path):
    found = {**commands(broker, tmp_path), "broker": ("mdp-broker", "--bind", free_endpoint())}
    with process(*found[kind], cwd=tmp_path, **manager.environment(watchdog="400000")):
        counts: Counter[str] = Counter()
        while counts["WATCHDOG=1"] < 5:
            counts[manager.next(but="")] += 1


def test_a_loop_that_does_not_turn_gives_none(broker, manager, tmp_path):
    words = commands(broker, tmp_path)["asyncio"]
    with process(*words, cwd=tmp_path, **manager.environment(watchdog="400000")) as worker:
        manager.next()
        with process("mdclient", "call", "block", "--broker", broker, "--wait"):
            worker.line("blocked", "stdout")
            assert manager.is_silent(seconds=1.0)


def test_a_supervisor_restarts_a_process_whose_loop_does_not_turn(broker, manager, tmp_path):
    words = (*commands(broker, tmp_path)["asyncio"], "--processes", "1")
    with process(*words, cwd=tmp_path, **manager.environment(watchdog="3000000")) as supervisor:
        with process("mdclient", "call", "block", "--broker", broker, "--wait"):
            supervisor.line("blocked", "stdout")
            supervisor.line("has given no sign of life for 3 s: killing it")
            supervisor.line("blocked", "stdout", count=2)


def test_abstract_sockets(monkeypatch):
    manager = Manager(f"\0zmdp-test-{os.getpid()}")
    notify.notify("READY=1", manager.address)
    assert manager.next() == "READY=1"
    manager.close()


def test_nothing_is_said_to_nobody(monkeypatch, tmp_path):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.notify("READY=1")
    notify.notify("READY=1", str(tmp_path / "nobody"))


def test_a_watchdog_of_another_process_is_not_ours(monkeypatch):
    for pid, seconds in ((os.getpid(), 2.0), (os.getppid(), 0.0)):
        monkeypatch.setenv("WATCHDOG_PID", str(pid))
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        assert notify.watchdog_seconds() == seconds
    monkeypatch.delenv("WATCHDOG_PID")
    monkeypatch.delenv("WATCHDOG_USEC")
    assert notify.watchdog_seconds() == 0.0

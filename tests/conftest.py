"""Fixtures for all tests."""

import io
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from subprocess import CompletedProcess

import hypothesis
import pytest
import zmq
from support.processes import TIMEOUT_SECONDS

pytest_plugins = ["support.results"]

# There are no deadlines: on a busy machine, the time of an example says nothing.
hypothesis.settings.register_profile("zmdp", deadline=None, max_examples=25)
hypothesis.settings.register_profile(
    "covered", deadline=None, max_examples=25, derandomize=True
)  # so that coverage is the same each time
hypothesis.settings.register_profile("long", deadline=None)
hypothesis.settings.load_profile("zmdp")

# Shells start background jobs with SIGINT ignored, and the processes that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Listener(logging.Handler):
    """Keeps log lines, and wakes the threads that wait for one."""

    def __init__(self):
        super().__init__()
        self._changed = threading.Condition()
        self.lines = []

    def emit(self, record):
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, text, timeout=TIMEOUT_SECONDS):
        """Wait for a line that contains `text`; return whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: any(text in line for line in self.lines), timeout)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def pool():
    """Threads for calls that block."""
    with ThreadPoolExecutor(40) as pool:
        yield pool


@pytest.fixture
def logged():
    """`logged(text)` waits until zmdp has logged a line that contains `text`."""
    logger = logging.getLogger("zmdp")
    listener = _Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    yield listener.wait
    logger.removeHandler(listener)
    logger.setLevel(level)


@pytest.fixture
def in_this_process(monkeypatch, capsysbinary):
    """`in_this_process(command, *arguments, **env)` runs an installed command without the cost of a new process."""

    def call(command, *arguments, stdin=b"", **env):
        (entry_point,) = entry_points(group="console_scripts", name=command)
        main = entry_point.load()
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [command, *map(os.fsdecode, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsysbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return CompletedProcess([command, *arguments], ended.value.code, *capsysbinary.readouterr())

    return call

"""Fixtures for all tests."""

import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest

hypothesis.settings.register_profile("zmdp", deadline=None)  # on a busy machine, the time of an example says nothing
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

    def wait(self, text, timeout=10.0):
        """Wait for a line that contains `text`; return whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: any(text in line for line in self.lines), timeout)


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

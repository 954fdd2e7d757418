"""The supervisor of worker processes, where processes cannot be started, or take long."""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

from support.processes import eventually, free_endpoint

from zmdp.testing import running_broker
from zmdp.workers.processes import supervisor as processes
from zmdp.workers.processes.supervisor import Supervisor

SLOW = """
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from zmdp import Services

@contextmanager
def lifespan():
    while Path("held").exists():
        sleep(0.01)
    yield

services = Services(lifespan=lifespan)
services.service("now")(lambda: 0)
"""

NONE = "waiting for the broker, which does not answer"
"""What a supervisor without processes says that it waits for."""


@contextmanager
def supervising(*arguments):
    """Run a supervisor of one process in a thread; yield it, and a list for its exit code."""
    codes = []
    supervisor = Supervisor(arguments, 1, drain_timeout=10.0)
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()))
    thread.start()
    try:
        yield supervisor, codes
    finally:
        supervisor.stop()
        thread.join()


def test_a_process_that_cannot_be_started_is_tried_again_later(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    failed = "cannot start a worker process: [Errno 2] No such file or directory"
    with supervising() as (supervisor, codes):
        eventually(lambda: caplog.text.count(failed) >= 2)
        supervisor.replace_all("SIGHUP")
        eventually(lambda: caplog.text.count(failed) >= 3)
        supervisor.stop()
        eventually(lambda: codes == [0])


def test_a_process_for_which_there_is_no_thread_is_tried_again_later(monkeypatch, caplog):
    start = threading.Thread.start

    def limited(self):
        if self.name.startswith("stderr of"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with supervising("zmdp.workers.examples:echo", "--broker", free_endpoint()) as (supervisor, codes):
        eventually(lambda: caplog.text.count("cannot start a worker process: can't start new thread") >= 2 or codes)
        assert supervisor.unfinished() == NONE
        supervisor.stop()
        eventually(lambda: codes == [0])


def test_a_process_hangs_only_while_the_supervisor_does_not():
    """Whatever stopped the supervisor for a while, such as a debugger or a frozen machine, stopped the process too."""
    supervisor = Supervisor((), 1, drain_timeout=10.0, patience=3.0)
    start, killed = supervisor._turned_at, []
    process = SimpleNamespace(pid=1, kill_at=None, alive_at=start, send_signal=killed.append)
    supervisor._places[0].process = process
    for now in (0.5, 10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0):
        supervisor._note_turn(start + now)
        supervisor._kill_hanging(start + now)
        assert not killed
    supervisor._note_turn(start + 13.5)
    supervisor._kill_hanging(start + 13.5)
    assert killed == [signal.SIGKILL]


def test_a_process_that_cannot_be_started_replaces_no_other(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SLOW)
    with running_broker() as server, supervising("own:services", "--broker", server.endpoints[0]) as (supervisor, *_):
        eventually(lambda: supervisor.served)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
        supervisor.replace_all("SIGHUP")
        eventually(lambda: "cannot start a worker process" in caplog.text)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        supervisor.replace_all("SIGHUP")
        eventually(lambda: "all worker processes have been replaced" in caplog.text)


def test_a_process_that_takes_long_to_start_is_told_and_replaces_the_old_one_at_last(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "START_SECONDS", 0.0)
    (tmp_path / "own.py").write_text(SLOW)
    with running_broker() as server, supervising("own:services", "--broker", server.endpoints[0]) as (supervisor, *_):
        eventually(lambda: supervisor.served)
        (tmp_path / "held").touch()
        supervisor.replace_all("SIGHUP")
        eventually(lambda: "does not serve after 0 s: the processes that run stay" in caplog.text)
        (tmp_path / "held").unlink()
        eventually(lambda: "all worker processes have been replaced" in caplog.text)
    assert caplog.text.count("does not serve after") == 1


def test_a_process_that_a_signal_without_a_name_kills_is_restarted(caplog):
    with running_broker() as server:
        arguments = ("zmdp.workers.examples:echo", "--broker", server.endpoints[0])
        with supervising(*arguments) as (supervisor, codes):
            eventually(lambda: supervisor.served)
            running = supervisor.unfinished()
            killed = int(running.removeprefix("worker processes "))
            os.kill(killed, signal.SIGRTMIN + 6)
            eventually(lambda: supervisor.unfinished() not in {running, NONE})
            assert f"worker process {killed} was killed by signal {signal.SIGRTMIN + 6}" in caplog.text
            supervisor.stop()
            eventually(lambda: codes == [0])

"""Worker processes that are replaced while they serve: no call fails, and there is always a worker."""

import json
import os
import signal
import subprocess
import sys
from textwrap import dedent
from threading import Event

import pytest
from support.processes import BIN, TIMEOUT_SECONDS, alive, broker, eventually, process

from zmdp.clients import Client

CODE = """
import os, sys, time
from pathlib import Path
from zmdp import Services, Worker
{extra}
services = Services()
worker = Worker("pid of a worker", lambda request: str(os.getpid()).encode())

@services.service("version")
def version(given: int) -> list[int]:
    return [{version}, os.getpid(), given]

@services.service("pid")
async def pid() -> int:
    return os.getpid()

@services.service("hold")
def hold(path: str) -> int:
    Path(path).write_text(str(os.getpid()))
    while Path(path).exists():
        time.sleep(0.01)
    return os.getpid()
"""
QUICK = ("--heartbeat", "0.1", "--liveness", "600")


def write(folder, version, extra=""):
    """Write the module; each version has a size of its own, because Python tells code that is compiled by that."""
    (folder / "own.py").write_text(CODE.format(version=version, extra=extra) + "#" * version)


@pytest.fixture
def calls(tmp_path):
    """A broker, a client, and what runs `mdworker` there."""
    write(tmp_path, 1)
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:

        def run(*options):
            return process("mdworker", "own:services", "--broker", endpoint, *QUICK, *options, cwd=tmp_path)

        yield client, run


def processes_of(client, wanted):
    """Wait until so many processes serve; return their pids."""

    def pids():
        workers = json.loads(client.request("mmi.workers", b"version")[0])["workers"]
        return {each["pid"] for each in workers} if len(workers) == wanted else None

    return eventually(pids)


class Load:
    """Calls from several threads, of which none may fail or wait for a worker, until the block ends."""

    def __init__(self, client, pool, threads=4):
        self._client = client
        self._end = Event()
        self.calls = 0
        self.versions = set()
        self._results = [pool.submit(self._run) for _ in range(threads)]

    def _run(self):
        number = 0
        while not self._end.is_set():
            version, _, given = self._client.call("version", number, wait=False)
            assert given == number
            self.versions.add(version)
            number += 1
        return number

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._end.set()
        self.calls = sum(each.result() for each in self._results)


def test_sighup_replaces_all_processes_under_load_with_new_code(calls, pool, tmp_path):
    client, run = calls
    with run("--processes", "2") as parent:
        first = processes_of(client, 2)
        with Load(client, pool) as load:
            for version in (2, 3):
                write(tmp_path, version)
                parent.send_signal(signal.SIGHUP)
                parent.line("all worker processes have been replaced", count=version - 1)
            eventually(lambda: 3 in load.versions)
        assert load.versions == {1, 2, 3}
        assert load.calls > 100
        assert not processes_of(client, 2) & first
        eventually(lambda: not any(map(alive, first)))
        assert parent.end() == 0


def pid_of(client):
    return int(client.request("pid of a worker")[0])


def test_a_worker_that_speaks_another_protocol(calls, tmp_path):
    client, _ = calls
    command = (
        "mdworker", "own:worker", "--broker", client.endpoint, *QUICK, "--processes", "1", "--protocol", "0.2"
    )  # fmt: skip
    with process(*command, cwd=tmp_path) as parent:
        old = pid_of(client)
        parent.send_signal(signal.SIGHUP)
        parent.line(f"has replaced {old}")
        eventually(lambda: not alive(old))
        assert pid_of(client) != old
        assert parent.end() == 0


def test_a_process_finishes_its_requests_when_it_is_replaced(calls, tmp_path):
    client, run = calls
    held = tmp_path / "held"
    with run("--processes", "1") as parent:
        (old,) = processes_of(client, 1)
        reply = client.submit("hold", f'"{held}"'.encode())
        eventually(held.exists)
        parent.send_signal(signal.SIGHUP)
        parent.line(f"has replaced {old}")
        (new,) = processes_of(client, 1)
        assert new != old
        assert alive(old)
        held.unlink()
        assert reply.result() == [b"%d" % old]
        eventually(lambda: not alive(old))
        assert parent.end() == 0


def test_code_that_cannot_be_loaded_leaves_the_old_process_serving(calls, tmp_path):
    client, run = calls
    with run("--processes", "1") as parent:
        (old,) = processes_of(client, 1)
        write(tmp_path, 2, extra="raise OSError('the disk is full')")
        parent.send_signal(signal.SIGHUP)
        parent.line(f"which was to replace {old}, exited with 2: the processes that run stay; it wrote last:")
        parent.line("    mdworker: cannot use own:services: OSError: the disk is full")
        assert client.call("version", 1) == [1, old, 1]
        write(tmp_path, 3)
        parent.send_signal(signal.SIGHUP)
        parent.line(f"has replaced {old}")
        eventually(lambda: client.call("version", 1)[0] == 3)
        assert parent.end() == 0


def test_a_process_that_is_killed_while_its_successor_starts(calls, tmp_path):
    """Its slot gets a new process, and the successor is not needed."""
    client, run = calls
    with run("--processes", "1") as parent:
        (old,) = processes_of(client, 1)
        parent.send_signal(signal.SIGHUP)
        parent.line(f"replacing worker process {old}")
        os.kill(old, signal.SIGKILL)
        parent.line(f"worker process {old} was killed by SIGKILL; restarting it")
        processes_of(client, 1)
        assert parent.end() == 0


def test_all_processes_end_while_one_is_replaced(calls, tmp_path):
    client, run = calls
    with run("--processes", "2") as parent:
        first = processes_of(client, 2)
        parent.send_signal(signal.SIGHUP)
        parent.line("replacing worker process")
        assert parent.end() == 0
        assert not any(map(alive, first))


@pytest.mark.parametrize("option", ["--max-requests", "--max-memory"])
def test_a_process_that_exceeds_a_limit_is_replaced(calls, option, pool):
    client, run = calls
    limit = "200" if option == "--max-requests" else "1M"
    with run(option, limit) as parent:
        (old,) = processes_of(client, 1)
        with Load(client, pool):
            parent.line(f"replacing worker process {old}: it ")
            parent.line(f"has replaced {old}")
            eventually(lambda: not alive(old))
        assert parent.end() == 0


def test_changed_code_is_loaded(calls, tmp_path):
    client, run = calls
    with run("--reload") as parent:
        assert eventually(lambda: client.call("version", 1)[0]) == 1
        for version in (2, 3):
            write(tmp_path, version)
            parent.line("own.py changed", count=version - 1)
            eventually(lambda version=version: client.call("version", 1)[0] == version)
        assert parent.end() == 0


def test_a_crash_loop_is_told_once_with_the_last_lines(calls, tmp_path):
    client, run = calls
    with run("--processes", "2") as parent:
        processes = processes_of(client, 2)
        crashes = tmp_path / "crashes"
        extra = f"""
            with open({str(crashes)!r}, 'a') as file:
                file.write("x")
            print("the disk is full", file=sys.stderr, flush=True)
            os.abort()
        """
        write(tmp_path, 2, extra=dedent(extra))
        for each in processes:
            os.kill(each, signal.SIGKILL)
        eventually(lambda: crashes.exists() and len(crashes.read_text()) >= 7)
        parent.line("was killed by SIGABRT soon after its start, like the one before: a crash loop")
        parent.line("    the disk is full")
        assert parent.stderr.count("was killed by SIGABRT") == 2
        write(tmp_path, 3)
        parent.send_signal(signal.SIGHUP)  # it does not wait for the end of a pause
        assert client.call("version", 1)[0] == 3
        processes_of(client, 2)  # one that crashes while they are stopped would count
        assert parent.end() == 0


def test_all_processes_end_when_their_terminal_is_closed(tmp_path):
    """That sends SIGHUP too, but nobody is left who could stop them."""
    write(tmp_path, 1)
    terminal, theirs = os.openpty()
    own_terminal = "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        command = [BIN / "mdworker", "own:services", "--broker", endpoint, *QUICK, "--processes", "2"]
        parent = subprocess.Popen(
            [sys.executable, "-c", f"import fcntl, os, sys, termios; {own_terminal}", *command],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        pids = processes_of(client, 2)
        os.close(terminal)
        parent.wait(TIMEOUT_SECONDS)
        eventually(lambda: not any(map(alive, pids)))

"""Brokers, workers and clients in real processes, some of which are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes import TIMEOUT_SECONDS, alive, broker, eventually, process

from zmdp.clients import AsyncClient, Client, WorkerLost
from zmdp.workers import Worker

HERE = Path(__file__).parent
QUICK = ("--heartbeat", "0.1", "--liveness", "600")
SLOW = ("--heartbeat", "600")
"""For brokers: no heartbeat is due during a test, so the broker notices an end immediately or never."""
PATIENT = ("--heartbeat", "0.2", "--liveness", "3000")
"""For the workers of such a broker."""


def worker(target, endpoint, *options):
    return process("mdworker", target, "--broker", endpoint, *QUICK, *options, cwd=HERE)


def gated(endpoint):
    """Run a worker process whose handlers await, with the default credit of 64."""
    return process("mdworker", "services:gated", "--service", "gated", "--broker", endpoint, *PATIENT, cwd=HERE)


def workers_of(client, service):
    return json.loads(client.request("mmi.workers", service)[0])["workers"]


def pids_of(client, service):
    return {each["pid"] for each in workers_of(client, service)}


def stats(client):
    return json.loads(client.request("mmi.stats")[0])


class Gate:
    """Requests for `gated` that run until the gate is opened."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        self.file = folder / "closed"
        self.file.touch()
        self.replies = []

    def send(self, client, *more):
        """Send one more request to this gate; return the future of its reply."""
        begun = self.folder / str(len(self.replies))
        self.replies.append(client.submit("gated", str(self.file).encode(), str(begun).encode(), *more))
        return self.replies[-1]

    def await_all(self):
        """Wait until all requests run; return the pids of the processes in which they do.

        It is not enough that the broker has dispatched them: a slow worker releases requests that have not begun.
        """
        files = [self.folder / str(number) for number in range(len(self.replies))]
        return set(map(int, eventually(lambda: all(pids := [f.exists() and f.read_text() for f in files]) and pids)))

    def open(self):
        """Let the requests finish."""
        self.file.unlink()


def test_a_poisonous_request_fails_alone(tmp_path):
    """It kills three workers, each of which holds other requests, and those complete elsewhere."""
    with ExitStack() as ends:
        server, endpoint = ends.enter_context(broker(*SLOW))
        client = ends.enter_context(Client(endpoint, timeout=TIMEOUT_SECONDS))
        first = ends.enter_context(gated(endpoint))
        fuse, gate, later = (Gate(tmp_path / name) for name in ("fuse", "gate", "later"))
        for number in range(63):
            if number == 20:
                poisonous = fuse.send(client, b"poison")
            gate.send(client)
        assert gate.await_all() | fuse.await_all() == {first.pid}
        others = [ends.enter_context(gated(endpoint)) for _ in range(3)]
        eventually(lambda: len(workers_of(client, b"gated")) == 4)
        for _ in range(60):
            later.send(client)
        assert later.await_all() == {other.pid for other in others}
        fuse.open()
        server.line("of service gated is gone: unreachable")
        gate.open()
        server.line("of service gated is gone: unreachable", count=2)
        later.open()
        with pytest.raises(WorkerLost, match=r"this was attempt 3 of 3 \(max_attempts\)"):
            poisonous.result()
        served_by = {int(reply.result()[0]) for reply in (*gate.replies, *later.replies)}
        assert served_by <= {other.pid for other in others}
        counts = stats(client)
        assert (counts["lost"]["unreachable"], counts["dropped"]) == (3, {"workers-lost": 1})


def test_a_frozen_broker_reads_waiting_heartbeats_before_it_gives_workers_up():
    patience = 4.0
    with (
        broker("--heartbeat", "0.1", "--liveness", "40") as (frozen, endpoint),
        Client(endpoint, timeout=TIMEOUT_SECONDS) as client,
    ):
        with ExitStack() as ends:
            for _ in range(20):
                ends.enter_context(Worker("echo", list, broker=endpoint, heartbeat=0.1, liveness=1000))
            eventually(lambda: len(workers_of(client, b"echo")) == 20)
            frozen.send_signal(signal.SIGSTOP)
            since = time.monotonic()
            eventually(lambda: time.monotonic() > since + 1.5 * patience)  # the test is about this time
            frozen.send_signal(signal.SIGCONT)
            assert client.request("echo", b"x") == [b"x"]
            assert "is gone: silent" not in frozen.stderr


def test_a_second_signal_stops_the_broker_immediately(tmp_path, pool):
    held = tmp_path / "held"
    with broker(*QUICK, "--drain-timeout", "600") as (server, endpoint), worker("services:slow", endpoint):
        with (
            Client(endpoint, timeout=TIMEOUT_SECONDS) as asker,
            Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client,
        ):
            eventually(lambda: workers_of(asker, b"slow"))
            client.send("slow", str(held).encode())
            eventually(held.exists)
            server.send_signal(signal.SIGINT)
            server.line("draining")
            assert server.end(signal.SIGINT) == 1
            held.unlink()


def test_ctrl_c_in_a_terminal_stops_all_processes_gracefully(tmp_path, pool):
    held = tmp_path / "held"
    command = ("mdworker", "services:slow", "--processes", "2", *QUICK)
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:
        with process(*command, "--broker", endpoint, cwd=HERE, new_group=True) as parent:
            eventually(lambda: len(workers_of(client, b"slow")) == 2)
            reply = pool.submit(client.request, "slow", str(held).encode())
            eventually(held.exists)
            os.killpg(parent.pid, signal.SIGINT)  # as Ctrl-C does
            parent.line("interrupt again to exit immediately", count=2)
            held.unlink()
            assert len(reply.result()) == 1
            assert parent.wait() == 0


def test_a_large_reply_is_not_lost_when_its_worker_ends(pool):
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:
        with worker("services:large", endpoint, "--service", "large") as ending:
            eventually(lambda: workers_of(client, b"large"))
            reply = pool.submit(client.request, "large")
            assert len(reply.result()[0]) == 20_000_000  # it sent itself SIGTERM before it replied
            assert ending.wait() == 0


def test_a_supervisor_restarts_killed_processes_and_stops_all():
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        with worker("services:pid", endpoint, "--service", "pid", "--processes", "2") as parent:
            eventually(lambda: len(workers_of(client, b"pid")) == 2)
            victim = pids_of(client, b"pid").pop()
            os.kill(victim, signal.SIGKILL)
            parent.line(f"worker process {victim} was killed by SIGKILL")
            now = eventually(lambda: len(pids := pids_of(client, b"pid") - {victim}) == 2 and pids)
            assert int(client.request("pid")[0]) in now
            assert parent.end() == 0
            assert not any(map(alive, now))
        assert client.request("mmi.service", b"pid") == [b"404"]


def test_a_frozen_broker_is_left_for_the_next():
    async def scenario(first, endpoints):
        async with AsyncClient(endpoints, timeout=TIMEOUT_SECONDS, heartbeat=0.1, liveness=30) as client:
            assert await client.request("echo", b"1") == [b"1"]
            first.send_signal(signal.SIGSTOP)
            assert await client.request("echo", b"2") == [b"2"]
            first.send_signal(signal.SIGCONT)

    with broker(*QUICK) as (first, one), broker(*QUICK) as (_, other):
        with worker("zmdp.workers.examples:echo", one), worker("zmdp.workers.examples:echo", other):
            asyncio.run(scenario(first, [one, other]))


SCRIPT = """
import sys, time
from zmdp.workers import Worker

def work(request):
    print("working", flush=True)
    time.sleep(0.5)
    return b"done"

Worker("work", work, broker=sys.argv[1]).run()
"""


def test_ctrl_c_on_a_script_finishes_the_running_request():
    def interruptible():
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        reply = client.submit("work")
        script = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, endpoint],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=interruptible,  # noqa: PLW1509 - it only sets a signal
        )
        with script:
            try:
                assert script.stdout.readline() == "working\n"
                script.send_signal(signal.SIGINT)
                assert reply.result(TIMEOUT_SECONDS) == [b"done"]
                assert script.wait(TIMEOUT_SECONDS) == 0
            finally:
                script.kill()


SIGNALS_ITSELF = """
import signal, sys, threading
from zmdp.workers import Worker

def work(request):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # which interrupts nothing in the main thread
    return b"done"

signal.signal(signal.SIGINT, signal.default_int_handler)
Worker("work", work, broker=sys.argv[1]).run()
"""


def test_ctrl_c_is_noticed_although_it_did_not_interrupt_the_main_thread():
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        script = subprocess.Popen([sys.executable, "-c", SIGNALS_ITSELF, endpoint])
        try:
            assert client.request("work") == [b"done"]
            assert script.wait(TIMEOUT_SECONDS) == 0
        finally:
            script.kill()
            script.wait()


ABANDONED = """
import asyncio, gc, sys
from zmdp.clients import AsyncClient
from zmdp.workers import AsyncWorker

async def echo(request):
    return request

async def main():
    client = AsyncClient(sys.argv[1])
    AsyncWorker("echo", echo, broker=sys.argv[1]).start()
    assert await client.request("echo", b"x") == [b"x"]

asyncio.run(main())
gc.collect()
print("alive")
"""


def test_an_unclosed_asyncio_client_does_not_keep_the_process_alive():
    with broker(*QUICK) as (_, endpoint):
        done = subprocess.run(
            [sys.executable, "-c", ABANDONED, endpoint],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
        assert done.stdout == "alive\n"


def test_the_connections_of_a_killed_process_count_as_one_attempt():
    options = ("--concurrency", "5", "--protocol", "0.2")  # before X1 a connection holds one request
    with broker(*QUICK) as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        with worker("zmdp.workers.examples:sleep", endpoint, *options) as first:
            eventually(lambda: len(json.loads(client.request("mmi.workers")[0])["workers"]) == 5)
            reply = client.submit("sleep", b"3000")
            eventually(lambda: any(each["busy"] for each in json.loads(client.request("mmi.workers")[0])["workers"]))
            first.kill()
            with worker("zmdp.workers.examples:sleep", endpoint):
                assert reply.result(TIMEOUT_SECONDS) == [b"3000"]

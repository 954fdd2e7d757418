"""X1 clients when brokers and workers are killed."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from support.processes import TIMEOUT_SECONDS, broker, eventually, process

from zmdp.clients import AsyncClient, Client

HERE = Path(__file__).parent
QUICK = ("--heartbeat", "0.1", "--liveness", "600")


def worker(target, endpoint, *options):
    return process("mdworker", target, "--broker", endpoint, *QUICK, *options, cwd=HERE)


def test_a_frozen_broker_is_left_for_the_next():
    async def scenario(first, endpoints):
        async with AsyncClient(endpoints, timeout=TIMEOUT_SECONDS, heartbeat=0.1, liveness=30) as client:
            assert await client.request("echo", b"1") == [b"1"]
            first.send_signal(signal.SIGSTOP)
            assert await client.request("echo", b"2") == [b"2"]
            first.send_signal(signal.SIGCONT)

    with broker(*QUICK) as (first, one), broker(*QUICK) as (_, other):
        with worker("zmdp.workers.echo:worker", one), worker("zmdp.workers.echo:worker", other):
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
        with worker("zmdp.workers.sleep:worker", endpoint, *options) as first:
            eventually(lambda: len(json.loads(client.request("mmi.workers")[0])["workers"]) == 5)
            reply = client.submit("sleep", b"3000")
            eventually(lambda: any(each["busy"] for each in json.loads(client.request("mmi.workers")[0])["workers"]))
            first.kill()
            with worker("zmdp.workers.sleep:worker", endpoint):
                assert reply.result(TIMEOUT_SECONDS) == [b"3000"]

"""X1 clients when brokers and workers are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes import TIMEOUT_SECONDS, broker, eventually, process

from zmdp.clients import AsyncClient, Client, RetryLater, StreamInterrupted

HERE = Path(__file__).parent
QUICK = ("--heartbeat", "0.1", "--liveness", "600")


def worker(target, endpoint, *options):
    return process("mdworker", target, "--broker", endpoint, *QUICK, *options, cwd=HERE)


def test_500_outstanding_requests_outlive_the_broker(tmp_path):
    """Each is answered once: the first fifty before the broker is killed, the others after a gate was opened."""
    gate, none, begun = tmp_path / "closed", tmp_path / "none", tmp_path / "begun"
    gate.touch()

    async def scenario(first, endpoint, ends):
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            answered = Counter()

            async def ask(number):
                await client.request("gated", os.fsencode(none if number < 50 else gate), os.fsencode(begun))
                answered[number] += 1

            asking = [asyncio.create_task(ask(number)) for number in range(500)]
            await asyncio.gather(*asking[:50])
            first.kill()
            assert answered == Counter(range(50))
            second, _ = ends.enter_context(broker(*QUICK, bind=endpoint))
            gate.unlink()
            await asyncio.gather(*asking)
            assert answered == Counter(range(500))
            second.line("offers gated")

    with ExitStack() as ends:
        first, endpoint = ends.enter_context(broker(*QUICK))
        for _ in range(4):
            ends.enter_context(worker("services:gated", endpoint, "--service", "gated"))
        asyncio.run(scenario(first, endpoint, ends))


def test_a_stream_that_has_begun_is_not_repeated():
    with broker(*QUICK) as (first, endpoint), worker("services:endless", endpoint, "--service", "endless"):
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            parts = client.stream("endless")
            assert next(parts) == [b"0"]
            first.kill()
            with broker(*QUICK, bind=endpoint), pytest.raises(StreamInterrupted, match="was lost"):
                for _ in parts:
                    pass


def test_the_next_broker_is_used_when_one_dies():
    async def scenario(first, endpoints):
        async with AsyncClient(endpoints, timeout=TIMEOUT_SECONDS) as client:
            assert await client.request("echo", b"1") == [b"1"]
            first.kill()
            assert await client.request("echo", b"2") == [b"2"]

    with broker(*QUICK) as (first, one), broker(*QUICK) as (_, other):
        with worker("zmdp.workers.echo:worker", one), worker("zmdp.workers.echo:worker", other):
            asyncio.run(scenario(first, [one, other]))


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


def test_requests_are_refused_while_the_broker_drains_and_when_it_ends(tmp_path):
    held = tmp_path / "held"
    with broker(*QUICK, "--drain-timeout", "600") as (server, endpoint), worker("services:slow", endpoint):
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            running = client.submit("slow", str(held).encode())
            eventually(held.exists)
            server.send_signal(signal.SIGTERM)
            server.line("draining")
            with pytest.raises(RetryLater, match="draining") as refused:
                client.request("slow", b"x")
            assert refused.value.code == 503
            server.send_signal(signal.SIGTERM)
            with pytest.raises(RetryLater, match="shut down before") as ended:
                running.result(TIMEOUT_SECONDS)
            assert ended.value.code == 503
            held.unlink()


def test_a_killed_asyncio_worker_loses_nothing():
    async def scenario(endpoint, first, second):
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, codec="json") as client:
            asking = [asyncio.create_task(client.call("double", number)) for number in range(300)]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            os.kill(first.pid, signal.SIGKILL)
            assert await asyncio.gather(*asking) == [2 * number for number in range(300)]

    options = ("--service", "double", "--codec", "json", "--concurrency", "4")
    with broker(*QUICK) as (_, endpoint):
        with (
            worker("services:double", endpoint, *options) as first,
            worker("services:double", endpoint, *options) as second,
        ):
            first.line("double: serving at ")
            second.line("double: serving at ")
            asyncio.run(scenario(endpoint, first, second))
            assert second.end() == 0


def test_a_request_is_cancelled_at_a_worker_in_another_process():
    with broker(*QUICK) as (_, endpoint), worker("zmdp.workers.sleep:worker", endpoint) as sleeper:
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            future = client.submit("sleep", b"600000")
            eventually(lambda: any(each["busy"] for each in json.loads(client.request("mmi.workers")[0])["workers"]))
            assert future.cancel()
            assert client.request("sleep", b"0") == [b"0"]  # the one worker is free again, long before its time
            sleeper.line("sleep: serving at ")


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

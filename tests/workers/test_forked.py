"""Handlers that fork, in processes of `mdworker`."""

import pytest
from support.processes import TIMEOUT_SECONDS, broker, process

from zmdp.clients import Client

SERVICES = """
import asyncio, multiprocessing, os, sys
from zmdp import Services

services = Services()

def end(how):
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("no good")
    return -1

def forked(how):
    child = os.fork()
    return end(how) if not child else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

@services.service("plain")
def plain(how: str) -> int:
    return forked(how)

@services.service("coroutine")
async def coroutine(how: str) -> int:
    return forked(how)

@services.service("pool")
def pool(count: int) -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, range(count))

@services.service("terminated")
def terminated() -> list[int]:
    codes = []
    for _ in range(20):
        child = multiprocessing.get_context("fork").Process(target=asyncio.run, args=(asyncio.sleep(3600),))
        child.start()
        child.terminate()
        child.join()
        codes.append(child.exitcode)
    return codes
"""


@pytest.fixture
def client(tmp_path):
    (tmp_path / "forks.py").write_text(SERVICES)
    with broker() as (_, endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        with process("mdworker", "forks:services", "--broker", endpoint, cwd=tmp_path) as worker:
            client.worker = worker
            yield client
            assert worker.end() == 0


@pytest.mark.parametrize("service", ["plain", "coroutine"])
def test_a_handler_that_returns_in_a_child_ends_it(client, service):
    assert client.call(service, "exit") == 3
    assert client.call(service, "raise") == 1
    client.worker.line(f"{service}: the handler failed in a process that it has forked, which ends")
    client.worker.line("ValueError: no good")
    assert client.call(service, "return") == 1
    client.worker.line(f"{service}: the handler has returned in a process that it has forked, which ends")


def test_a_handler_that_uses_multiprocessing_neither_hangs_nor_stops_its_worker(client):
    for _ in range(5):
        assert client.call("terminated") == [-15] * 20
        assert client.call("pool", 3) == [0, 1, 2]
    assert "stopping" not in client.worker.stderr

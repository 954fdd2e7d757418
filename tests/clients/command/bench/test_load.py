"""The load generators, against a real broker."""

import asyncio
import json
import threading
from collections import Counter

import pytest
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import AsyncClient, Client
from zmdp.clients.command.bench.load import Result, mixed, one_by_one, pipelined
from zmdp.testing import running_broker
from zmdp.workers import Worker
from zmdp.workers.examples import pause

SECONDS = 0.3


@pytest.fixture(scope="module")
def endpoint():
    def fail(request):
        raise ValueError("no good")

    with running_broker(drain_timeout=0.1) as server:
        at = server.endpoints[0]
        with (
            Worker("echo", list, broker=at),
            Worker("fail", fail, broker=at),
            Worker("sleep", pause, broker=at, concurrency=4),
            Client(at, timeout=TIMEOUT_SECONDS) as client,
        ):
            eventually(lambda: all(map(client.available, ("echo", "fail", "sleep"))))
            yield at


def with_client(endpoint, load, *arguments, **settings):
    async def run():
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            return await load(client, *arguments, **settings)

    return asyncio.run(run())


def test_one_after_the_other(endpoint):
    told = []
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        result = one_by_one(client, "echo", [b"x"], seconds=SECONDS, progress=told.append)
    assert list(result.latencies) == ["all"]
    assert result.replies == result.latencies["all"].count > 0
    assert (result.errors, result.seconds >= SECONDS) == (Counter(), True)
    assert told
    assert all(part >= 0 for part in told)


def test_outstanding_requests_at_a_time(endpoint):
    guard, active, most, three = threading.Lock(), [0], [0], threading.Event()

    def work(request):
        with guard:
            active[0] += 1
            most[0] = max(most[0], active[0])
            if active[0] == 3:
                three.set()
        assert request[0] == b"first" or three.wait(TIMEOUT_SECONDS)
        with guard:
            active[0] -= 1
        return request

    told = []
    with Worker("work", work, broker=endpoint, concurrency=8), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.request("work", b"first")  # it is there
        result = with_client(endpoint, pipelined, "work", [b"x"], outstanding=3, seconds=SECONDS, progress=told.append)
    assert most[0] == 3
    assert (result.replies >= 3, result.errors) == (True, Counter())
    assert told[-1] == 1.0


def test_at_random_moments(endpoint):
    told = []
    settings = {"share": 0.3, "rate": 300, "seconds": SECONDS, "progress": told.append}
    results = [with_client(endpoint, mixed, "sleep", [b"0"], [b"20"], **settings) for _ in range(2)]
    for result in results:
        assert set(result.latencies) == {"short", "slow"}
        assert result.latencies["slow"].percentile(50) >= 0.019
        assert result.errors == Counter()
    assert results[0].replies == results[1].replies  # the same load each time
    assert told[-1] == 1.0


@pytest.mark.parametrize(("service", "name"), [("fail", "ServiceError"), ("nobody", "ServiceNotFound")])
def test_errors_are_counted_by_type(endpoint, service, name):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        results = [one_by_one(client, service, [b"x"], seconds=SECONDS, progress=lambda part: None)]
    ignore = {"seconds": SECONDS, "progress": lambda part: None}
    results.append(with_client(endpoint, pipelined, service, [b"x"], outstanding=4, **ignore))
    results.append(with_client(endpoint, mixed, service, [b"x"], [b"y"], share=0.5, rate=200, **ignore))
    for result in results:
        assert list(result.errors) == [name]
        assert result.errors[name] > 0
        assert result.replies == 0


def test_the_figures():
    result = Result(seconds=2.0)
    for milliseconds in (1, 1, 2, 4):
        result.record("short", milliseconds / 1000)
    result.record("slow", 0.1)
    result.errors["RequestTimeout"] += 1
    figures = result.as_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert (figures["replies"], figures["replies_per_second"], figures["seconds"]) == (5, 2.5, 2.0)
    assert figures["errors"] == {"RequestTimeout": 1}
    assert figures["latency_ms"]["short"]["count"] == 4
    assert figures["latency_ms"]["short"]["mean"] == 2.0
    assert figures["latency_ms"]["slow"]["max"] == 100.0
    assert Result().as_dict()["replies_per_second"] == 0.0

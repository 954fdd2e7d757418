"""Peers behind a ROUTER–DEALER proxy (C36): to the broker's socket they are one, told apart by their envelopes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, OldClient, OldWorker, Worker, X1Client, X1Worker
from support.processes import TIMEOUT_SECONDS
from support.router import proxied

from zmdp.clients import AsyncClient, Client
from zmdp.workers import AsyncWorker, Request
from zmdp.workers import Worker as ZmdpWorker


class EnvelopedWorker(Worker):
    """An MDP/0.2 worker that puts an empty frame in front of what it says."""

    head = (b"", b"MDPW02")


WORKERS = [OldWorker, EnvelopedWorker, X1Worker]


def registered(bench: Bench, kind: Callable[..., Any], proxy: str) -> Any:
    worker = bench.connect(kind, endpoint=proxy)
    worker.ready(b"echo")
    worker.sync()
    return worker


@pytest.mark.parametrize("client_kind", [OldClient, X1Client])
@pytest.mark.parametrize("worker_kind", WORKERS)
def test_any_client_reaches_any_worker(
    bench: Bench, proxy: str, client_kind: Callable[..., Any], worker_kind: Callable[..., Any]
) -> None:
    # C36, C22
    clients = [bench.connect(client_kind, endpoint=proxy) for _ in range(3)]
    clients += [bench.connect(client_kind)]
    worker = registered(bench, worker_kind, proxy)
    for number in range(2):
        for at, client in enumerate(clients):
            client.request(b"echo", b"%d from %d" % (number, at))
            client.sync()
    for number in range(2):
        for at, client in enumerate(clients):
            address = worker.work(b"%d from %d" % (number, at))
            if worker_kind is not OldWorker and client_kind is not OldClient:
                worker.partial(address, b"half")
                client.partial(b"echo", b"half", number=number + 1)
            worker.final(address, b"%d to %d" % (number, at))
            told = {} if client_kind is OldClient else {"number": number + 1}
            client.final(b"echo", b"%d to %d" % (number, at), **told)
    for client in clients:
        client.nothing()
    worker.nothing()


def test_all_workers_behind_a_proxy_are_lost_with_it(bench: Bench) -> None:
    # C36, C17: at once, without a heartbeat
    direct = bench.x1_client()
    with proxied(bench.endpoint) as proxy:
        client = bench.x1_client(endpoint=proxy)
        workers = [bench.x1_worker(b"echo", credit=2, endpoint=proxy) for _ in range(2)]
        old = bench.old_worker(b"echo", endpoint=proxy)
        for number in range(1, 6):
            direct.request(b"echo", b"%d" % number)
        direct.sync()
        client.request(b"echo", b"waits")
        client.request(b"nobody", b"waits")
        client.sync()
        assert bench.stats()["running"] == 5
        for peer in (*workers, old, client):
            peer.close()
    bench.until(lambda: bool(bench.stats()["workers"] == 0))
    bench.until(lambda: bool(bench.stats()["dropped"] == {"client-gone": 2}))
    other = bench.x1_worker(b"echo", credit=1)
    for _ in range(5):
        address, _, attempt, _, (body,) = other.told()
        assert attempt == 2
        other.final(address, b"done")
        direct.final(b"echo", b"done", number=int(body))
    other.nothing()


# ── our own clients and workers ──────────────────────────────────────────────────────────────────────────────────────

OURS = [{}, {"protocol": "0.1"}]


def own_client(proxy: str, settings: dict[str, Any]) -> None:
    with Client(proxy, timeout=TIMEOUT_SECONDS, **settings) as client:
        for number in range(5):
            assert client.request("echo", b"%d" % number) == [b"%d" % number]


async def own_async_client(proxy: str, settings: dict[str, Any]) -> None:
    async with AsyncClient(proxy, timeout=TIMEOUT_SECONDS, **settings) as client:
        replies = await asyncio.gather(*[client.request("echo", b"%d" % number) for number in range(50)])
        assert replies == [[b"%d" % number] for number in range(50)]


@pytest.mark.parametrize("worker_settings", OURS, ids=str)
@pytest.mark.parametrize("client_settings", [*OURS, {"protocol": "0.2", "envelope": True}], ids=str)
def test_zmdps_threaded_client_and_worker_behind_a_proxy(
    bench: Bench, proxy: str, worker_settings: dict[str, Any], client_settings: dict[str, Any]
) -> None:
    # C36
    with ZmdpWorker("echo", list, broker=proxy, concurrency=3, **worker_settings):
        own_client(proxy, client_settings)
        own_client(bench.endpoint, {})
    bench.until(lambda: bool(bench.stats()["workers"] == 0))  # each has left, over the proxy's connection


@pytest.mark.parametrize("worker_settings", OURS, ids=str)
@pytest.mark.parametrize("client_settings", [*OURS, {"protocol": "0.2", "envelope": True}], ids=str)
def test_zmdps_asyncio_client_and_worker_behind_a_proxy(
    bench: Bench, proxy: str, worker_settings: dict[str, Any], client_settings: dict[str, Any]
) -> None:
    # C36
    async def echo(request: Request) -> list[bytes]:
        return list(request)

    async def run() -> None:
        worker = AsyncWorker("echo", echo, broker=proxy, concurrency=20, **worker_settings)
        async with worker:
            await own_async_client(proxy, client_settings)

    asyncio.run(run())
    bench.until(lambda: bool(bench.stats()["workers"] == 0))

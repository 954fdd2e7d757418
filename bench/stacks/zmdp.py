"""zmdp: mdp-broker with this package's clients and workers."""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import processes

from zmdp import Service, Services
from zmdp.clients import AsyncClient, Client
from zmdp.workers import AsyncWorker

from .load import Ask, Caller, WrongReplyError, body
from .peer import Peer, Work

WORKERS = 4


async def registered(client: AsyncClient) -> None:
    """Wait until all workers are registered."""
    while json.loads((await client.request("mmi.stats"))[0])["workers"] < WORKERS:
        await asyncio.sleep(0.02)


@dataclass
class Zmdp(Peer):
    """`AsyncClient`, and `mdworker` processes with default settings: one thread, or coroutines if handlers await."""

    name: str = "zmdp"
    needs: ClassVar[dict[str, str]] = {str(processes.BIN / "mdp-broker"): "pip install and the path of this checkout"}

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        with processes.broker(cwd=folder) as server:
            yield server

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        ready()  # the client waits until the workers are registered
        program = str(processes.BIN / "mdworker")
        target = f"services:{work.__name__}"
        os.execv(program, [program, target, "--service", "bench", "--broker", address, "--log-level", "error"])

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        async with AsyncClient(address, timeout=60) as client:
            await registered(client)

            async def ask(mine: bytes) -> bytes:
                return (await client.request("bench", mine))[0]

            yield ask


@dataclass
class ZmdpAsync(Zmdp):
    """`AsyncClient` and `AsyncWorker`, which handles up to 64 requests at a time, as it does by default."""

    name: str = "zmdp, asyncio"
    concurrency: int = 64

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        async def handle(request: list[bytes]) -> bytes:
            return work(request[0])

        async def serve() -> None:
            worker = AsyncWorker("bench", handle, broker=address, concurrency=self.concurrency)
            worker.start()
            ready()
            await worker.wait()

        asyncio.run(serve())


@dataclass
class Text:
    """The value of zmdp's service."""

    text: str


@dataclass
class ZmdpTyped(Zmdp):
    """`AsyncClient.call` of a `Service`, and `Services` with a coroutine function."""

    name: str = "zmdp, types"

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        services = Services()

        @services.service("bench")
        async def bench(value: Text) -> Text:
            return Text(work(value.text.encode()).decode())

        async def serve() -> None:
            worker = services.worker(broker=address)
            await worker.start()
            ready()
            await worker.wait()

        asyncio.run(serve())

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        bench = Service("bench", Text, Text)
        async with AsyncClient(address, timeout=60) as client:
            await registered(client)

            async def ask(mine: bytes) -> bytes:
                return (await client.call(bench, Text(mine.decode()))).text.encode()

            yield ask


@dataclass
class ZmdpThreads(Zmdp):
    """Synchronous on both sides.

    The client is `Client.request`, or `Client.submit` if more than one request should be outstanding; the workers are
    `mdworker` processes with default settings, one thread for the handler.
    """

    name: str = "zmdp, threads"
    synchronous: ClassVar[bool] = True

    @contextmanager
    def caller(self, address: str, outstanding: int) -> Iterator[Caller]:
        with Client(address, timeout=60) as client:
            while json.loads(client.request("mmi.stats")[0])["workers"] < WORKERS:
                time.sleep(0.02)
            yield _OneByOne(client) if outstanding == 1 else _Submitting(client)


class _OneByOne:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._key = 0

    def send(self, key: int) -> None:
        self._key = key

    def receive(self) -> Iterator[tuple[int, float]]:
        mine = body(self._key)
        if self._client.request("bench", mine)[0] != mine:
            raise WrongReplyError(mine)
        yield self._key, time.perf_counter()


class _Submitting:
    """Futures: wait for the oldest one, then take all that are done."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._futures: deque[tuple[int, bytes, Future]] = deque()

    def send(self, key: int) -> None:
        mine = body(key)
        self._futures.append((key, mine, self._client.submit("bench", mine)))

    def receive(self) -> Iterator[tuple[int, float]]:
        self._futures[0][2].result()
        for _ in range(len(self._futures)):
            if not self._futures[0][2].done():
                break
            key, mine, future = self._futures.popleft()
            if future.result()[0] != mine:
                raise WrongReplyError(mine)
            yield key, time.perf_counter()

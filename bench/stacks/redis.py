"""Redis lists: redis-server and redis-py; requests are pushed to one list, replies to the client's own list.

A request is a number, the reply list's name and the body.  The client is asyncio, with one reply list; a worker sends
the LPUSH of its reply and the BRPOP of its next request in one write, in a pipeline.  Without persistence.

Batched (by the application, not by Redis): the client pushes all collected requests with one LPUSH and takes all
available replies with one BLMPOP; a worker takes up to 16 requests at a time.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import processes

from .load import Ask
from .peer import Peer, Work

REQUESTS = "bench"
MOST = 500
"""Maximum number of replies taken at a time, if batched."""
BATCH = 16
"""Maximum number of requests that a worker takes at a time, if batched."""
CONNECTIONS = 8
SETTINGS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")


@dataclass
class RedisLists(Peer):
    """Redis as a queue."""

    name: str = "Redis lists"
    batched: bool = False
    needs: ClassVar[dict[str, str]] = {
        "redis-server": "Debian: apt-get install redis-server",
        "redis": "pip install redis[hiredis]",
    }

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        with start(folder) as server:
            yield server

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        import redis

        connection = redis.Redis.from_url(address)
        connection.ping()
        ready()
        most = BATCH if self.batched else 1
        taken = connection.blmpop(0, 1, REQUESTS, direction="RIGHT", count=most)
        while True:
            replies: dict[bytes, list[bytes]] = {}
            for request in taken[1]:
                number, name, body = request.split(b" ", 2)
                replies.setdefault(name, []).append(b"%b %b" % (number, work(body)))
            pipeline = connection.pipeline(transaction=False)
            for name, values in replies.items():
                pipeline.lpush(name, *values)
            pipeline.blmpop(0, 1, REQUESTS, direction="RIGHT", count=most)
            taken = pipeline.execute()[-1]

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        import redis.asyncio

        # Each push takes a connection of the pool for itself; more of them cost more than they bring.
        pool = redis.asyncio.BlockingConnectionPool.from_url(address, max_connections=CONNECTIONS, timeout=None)
        pusher = redis.asyncio.Redis.from_pool(pool)
        taker = redis.asyncio.Redis.from_url(address)
        mine = b"replies:%d" % os.getpid()
        waiting: dict[bytes, asyncio.Future[bytes]] = {}
        numbers = itertools.count()
        loop = asyncio.get_running_loop()
        gathered: list[bytes] = []
        some = asyncio.Event()

        async def push() -> None:
            while True:
                await some.wait()
                some.clear()
                values = gathered[:]
                gathered.clear()
                await pusher.lpush(REQUESTS, *values)

        async def take() -> None:
            while True:
                taken = await taker.blmpop(0, 1, mine, direction="RIGHT", count=MOST if self.batched else 1)
                for reply in taken[1]:
                    number, _, body = reply.partition(b" ")
                    waiting.pop(number).set_result(body)

        async def ask(body: bytes) -> bytes:
            number = b"%d" % next(numbers)
            future = waiting[number] = loop.create_future()
            request = b"%b %b %b" % (number, mine, body)
            if self.batched:
                gathered.append(request)
                some.set()
            else:
                await pusher.lpush(REQUESTS, request)
            return await future

        tasks = [asyncio.create_task(push()), asyncio.create_task(take())]
        try:
            yield ask
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pusher.aclose()
            await taker.aclose()


@contextmanager
def start(folder: Path) -> Iterator[processes.Server]:
    """Run a server without persistence."""
    port = processes.free_port()
    with processes.running("redis-server", "--port", str(port), *SETTINGS, cwd=folder) as process:
        process.eventually(processes.listening(port))
        yield processes.Server(f"redis://127.0.0.1:{port}/0", [process.pid])

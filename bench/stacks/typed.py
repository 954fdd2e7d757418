"""Typed handlers: zmdp's Services, FastStream on NATS, and Taskiq on Redis, each with a value of a declared type.

Every peer validates the value at the worker, and the client gets an object of a type back: with FastStream and Taskiq a
Pydantic model, as their documentation has it.  Taskiq's result backend is asked again and again, every 10 ms instead of
its default of 200.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zmdp import AsyncClient, Service, Services

from . import redis
from .load import Ask
from .nats import NATS
from .peer import Peer, Server, Work
from .zmdp import WORKERS, Zmdp

if TYPE_CHECKING:
    from taskiq import AsyncBroker

CHECK_SECONDS = 0.01


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
            while json.loads((await client.request("mmi.stats"))[0])["workers"] < WORKERS:
                await asyncio.sleep(0.02)

            async def ask(mine: bytes) -> bytes:
                return (await client.call(bench, Text(mine.decode()))).text.encode()

            yield ask


@dataclass
class FastStream(NATS):
    """FastStream on NATS: a subscriber of a queue group, and `request`."""

    name: str = "FastStream on NATS, types"
    needs: ClassVar[dict[str, str]] = {**NATS.needs, "faststream": "pip install faststream[nats]"}

    async def _serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        from faststream.nats import NatsBroker
        from pydantic import BaseModel

        class Value(BaseModel):
            text: str

        broker = NatsBroker(address, logger=None)

        @broker.subscriber("bench", queue="workers")
        async def bench(value: Value) -> Value:
            return Value(text=work(value.text.encode()).decode())

        await broker.start()
        ready()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        from faststream.nats import NatsBroker
        from pydantic import BaseModel

        class Value(BaseModel):
            text: str

        broker = NatsBroker(address, logger=None)
        await broker.connect()

        async def ask(mine: bytes) -> bytes:
            reply = await broker.request(Value(text=mine.decode()), "bench", timeout=60)
            return Value.model_validate(await reply.decode()).text.encode()

        try:
            yield ask
        finally:
            await broker.stop()


@dataclass
class Taskiq(Peer):
    """Taskiq on Redis, which is also its result backend."""

    name: str = "Taskiq on Redis, types"
    needs: ClassVar[dict[str, str]] = {**redis.RedisLists.needs, "taskiq_redis": "pip install taskiq taskiq-redis"}

    @contextmanager
    def server(self, folder: Path) -> Iterator[Server]:
        with redis.start(folder) as server:
            yield server

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        asyncio.run(self._serve(address, work, ready))

    async def _serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        from taskiq.api import run_receiver_task

        broker, _ = _taskiq(address, work)
        broker.is_worker_process = True
        ready()
        await run_receiver_task(broker, max_async_tasks=64, run_startup=True)

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        broker, task = _taskiq(address, None)
        await broker.startup()

        async def ask(mine: bytes) -> bytes:
            sent = await task.kiq({"text": mine.decode()})
            result = await sent.wait_result(check_interval=CHECK_SECONDS, timeout=60)
            return result.return_value["text"].encode()

        try:
            yield ask
        finally:
            await broker.shutdown()


def _taskiq(address: str, work: Work | None) -> "tuple[AsyncBroker, Any]":
    from pydantic import BaseModel
    from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

    class Value(BaseModel):
        text: str

    broker = ListQueueBroker(address).with_result_backend(RedisAsyncResultBackend(address, result_ex_time=60))

    async def bench(value: Value) -> dict[str, str]:
        return {"text": work(value.text.encode()).decode()}

    bench.__annotations__["value"] = Value
    return broker, broker.task(task_name="bench")(bench)

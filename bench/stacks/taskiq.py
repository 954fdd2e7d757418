"""Taskiq on Redis, which is also its result backend, with a Pydantic model as its documentation has it.

The worker validates the value, and the client gets an object back, as with zmdp's `Services` (zmdp.py).  The result
backend is asked again and again, every 10 ms instead of its default of 200.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import processes

from . import redis
from .load import Ask
from .peer import Peer, Work

if TYPE_CHECKING:
    from taskiq import AsyncBroker

CHECK_SECONDS = 0.01


@dataclass
class Taskiq(Peer):
    """Taskiq on Redis, which is also its result backend."""

    name: str = "Taskiq on Redis, types"
    needs: ClassVar[dict[str, str]] = {**redis.RedisLists.needs, "taskiq_redis": "pip install taskiq taskiq-redis"}

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
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

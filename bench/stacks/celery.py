"""Celery on Redis, which is also its result backend: `apply_async`, and `get` of the oldest result.

Configured as its documentation recommends for many short tasks: events, gossip, mingle and heartbeats off; each worker
prefetches.  A worker is a separate process that executes one task at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import processes

from . import redis
from .load import Caller, WrongReplyError, body
from .peer import Peer, Work

if TYPE_CHECKING:
    import celery

TASK = "bench"


@dataclass
class Celery(Peer):
    """Each worker process executes its tasks itself."""

    name: str = "Celery"
    synchronous: ClassVar[bool] = True
    needs: ClassVar[dict[str, str]] = {**redis.RedisLists.needs, "celery": "pip install celery[redis]"}

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        with redis.start(folder) as server:
            yield server

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        from celery.signals import worker_ready

        app = _app(address)

        @app.task(name=TASK)
        def bench(text: str) -> str:
            return work(text.encode()).decode()

        worker_ready.connect(lambda **_: ready(), weak=False)
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "ERROR"]
        app.worker_main(["--quiet", "worker", "--concurrency", "1", "--pool", "solo", *quiet])

    @contextmanager
    def caller(self, address: str, outstanding: int) -> Iterator[Caller]:
        del outstanding
        app = _app(address)
        with closing(app):
            yield _Submitting(app.signature(TASK))


def _app(address: str) -> "celery.Celery":
    import celery

    app = celery.Celery("bench", broker=address, backend=address, set_as_current=True)
    app.conf.update(
        worker_prefetch_multiplier=64, worker_redirect_stdouts=False, worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True, task_default_delivery_mode="transient",
    )  # fmt: skip
    return app


class _Submitting:
    """Results are awaited in the order of their tasks, so a result that overtakes another is counted when the other
    arrives."""

    def __init__(self, task: "celery.canvas.Signature") -> None:
        self._task = task
        self._results: deque[tuple[int, Any]] = deque()

    def send(self, key: int) -> None:
        self._results.append((key, self._task.apply_async((body(key).decode(),))))

    def receive(self) -> Iterator[tuple[int, float]]:
        key, result = self._results.popleft()
        reply = result.get(timeout=60)
        if reply.encode() != body(key):
            raise WrongReplyError(reply)
        yield key, time.perf_counter()

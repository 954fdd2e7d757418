"""Services with types, offered from a thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.http_gateways import await_services

from zmdp import Services


@contextmanager
def offered(services: Services, endpoint: str, **settings: Any) -> Iterator[None]:
    """Offer services until the block ends.  `settings` are those of the worker and of a client that waits for it."""
    loop = asyncio.new_event_loop()
    worker = services.worker(broker=endpoint, **settings)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(worker.run())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        await_services(endpoint, *(each.name for each in services), **settings)
        yield
    finally:
        worker.stop()
        thread.join()

"""Fixtures for the tests of programs that use zmdp; pytest finds them by itself once zmdp is installed.

    def test_double(worker, mdp_client):
        worker("double", lambda number: 2 * number, codec="json")
        assert mdp_client.call("double", 21) == 42

`mdp_broker` is a real broker on a free loopback port, `mdp_client` a `Client` of it, `worker(service, handler, …)`
starts a `Worker`, or for a coroutine or an async generator function an `AsyncWorker` in a thread of its own, and
returns it once the broker knows it.  Override `mdp_limits` for other settings of the broker.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ...clients import Client
    from ...workers import AsyncWorker, Worker
    from ..broker.server import Server
    from ..limits import Limits

PATIENCE = 10.0
"""Seconds that a worker may take to register."""

# What is imported here is imported in every run of pytest on this machine: the rest waits until a test asks for it.


@pytest.fixture
def mdp_limits() -> Limits | None:
    """The settings of `mdp_broker`; None for the defaults."""
    return None


@pytest.fixture
def mdp_broker(mdp_limits: Limits | None) -> Iterator[Server]:
    """A running broker; `mdp_broker.endpoints[0]` is where."""
    from .broker import running_broker

    with running_broker(limits=mdp_limits) as server:
        yield server


@pytest.fixture
def mdp_client(mdp_broker: Server) -> Iterator[Client]:
    """A client of `mdp_broker`."""
    from ...clients import Client

    with Client(mdp_broker.endpoints[0]) as client:
        yield client


@pytest.fixture
def worker(mdp_broker: Server, mdp_client: Client) -> Iterator[Callable[..., Worker | AsyncWorker]]:
    """`worker(service, handler, **settings)` offers a service at `mdp_broker` until the test ends."""
    from ...workers import AsyncWorker, Worker
    from ...workers.handling import is_async

    with ExitStack() as stack:

        def offer(service: str, handler: Callable[[Any], Any], **settings: Any) -> Worker | AsyncWorker:
            made: Worker | AsyncWorker
            if is_async(handler):
                made = AsyncWorker(service, handler, broker=mdp_broker.endpoints[0], **settings)
                thread = threading.Thread(target=asyncio.run, args=(made.run(),), name=f"{service}-loop", daemon=True)
                thread.start()
                stack.callback(thread.join)
                stack.callback(made.stop)
            else:
                made = stack.enter_context(Worker(service, handler, broker=mdp_broker.endpoints[0], **settings))
            until = time.monotonic() + PATIENCE
            while not mdp_client.available(service):
                if time.monotonic() > until:
                    pytest.fail(f"the worker for {service!r} has not registered within {PATIENCE:g} s: see the log")
                time.sleep(0.005)
            return made

        yield offer

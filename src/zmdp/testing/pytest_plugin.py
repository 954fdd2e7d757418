"""Fixtures for testing programs that use zmdp; pytest finds them once zmdp is installed.

    def test_double(worker, mdp_client):
        worker("double", lambda number: 2 * number, codec="json")
        assert mdp_client.call("double", 21) == 42

    def test_my_worker(worker, mdp_client):
        worker(myservices.resize)  # a Worker or AsyncWorker: a copy of it serves here
        assert mdp_client.request("resize", b"image") == [b"smaller"]

    def test_my_services(worker, mdp_client):
        worker(images.services)  # a Services: all of them serve here
        assert mdp_client.call(images.resize, Resize("a.png", 80)) == Size(80, 60)

`mdp_broker` is a broker on a free loopback port, `mdp_client` a `Client` connected to it, `mdp_async_client` makes
`AsyncClient`s, and `worker` starts workers.  `mdp_titanic` is a `Titanic` that keeps its requests in a temporary SQLite
file.  All of them are real: nothing is mocked.  Override `mdp_limits` to change the broker's settings.

To test a handler by itself, without a broker, use `zmdp.testing.request`:

    def test_handler():
        assert resize(request(b"image", headers={"user": "ann"})) == b"smaller"
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from ..clients import AsyncClient, Client
    from ..mdp.broker.io.loop import Server
    from ..mdp.limits import Limits
    from ..titanic import Titanic
    from ..workers import AsyncWorker, Worker
    from ..workers.services import Services, ServicesWorker

REGISTRATION_SECONDS = 60.0
"""Time after which a worker will not register any more, also on a machine that is busy."""

# Every pytest run on this machine imports this module, so fixtures import what they need themselves.


@pytest.fixture
def mdp_limits() -> Limits | None:
    """The settings of `mdp_broker`; None for the defaults."""
    return None


@pytest.fixture
def mdp_broker(mdp_limits: Limits | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running broker; its endpoint is `mdp_broker.endpoints[0]`, and that of a `Client()` without arguments."""
    from ..mdp.transport.endpoints import BROKER_KEY_VARIABLE, BROKER_VARIABLE, KEY_VARIABLE
    from .broker import running_broker

    with running_broker(limits=mdp_limits) as server:
        monkeypatch.setenv(BROKER_VARIABLE, server.endpoints[0])
        for variable in (KEY_VARIABLE, BROKER_KEY_VARIABLE):  # this broker needs none
            monkeypatch.delenv(variable, raising=False)
        yield server


@pytest.fixture
def mdp_client(mdp_broker: Server) -> Iterator[Client]:
    """A `Client` of `mdp_broker`."""
    from ..clients import Client

    with Client(mdp_broker.endpoints[0]) as client:
        yield client


@pytest.fixture
def mdp_async_client(mdp_broker: Server) -> Callable[..., AsyncClient]:
    """Make an `AsyncClient` of `mdp_broker`: `async with mdp_async_client(**settings) as client:`.

    This works with any event loop: that of `asyncio.run`, pytest-asyncio or anyio.
    """
    from ..clients import AsyncClient

    def make(**settings: Any) -> AsyncClient:
        return AsyncClient(mdp_broker.endpoints[0], **settings)

    return make


@pytest.fixture
def mdp_titanic(mdp_broker: Server, mdp_client: Client, tmp_path: Path) -> Iterator[Titanic]:
    """A `Titanic`, served at `mdp_broker` from a temporary SQLite file."""
    from ..titanic import Titanic
    from .titanic import running_titanic

    with running_titanic(mdp_broker.endpoints[0], str(tmp_path / "titanic.db")):
        for service in ("titanic.request", "titanic.reply", "titanic.close", "titanic.schedule"):
            _await_worker(mdp_client, service)
        yield Titanic(mdp_client)


@pytest.fixture
def worker(mdp_broker: Server, mdp_client: Client) -> Iterator[Callable[..., Worker | AsyncWorker | ServicesWorker]]:
    """Start a worker at `mdp_broker`, until the test ends, and return it once the broker knows it.

    `worker(service, handler, **settings)` makes a `Worker`, or an `AsyncWorker` if the handler is a coroutine function
    or an async generator function.  `worker(my_worker)` starts a copy of an existing one, which stays as it is, so any
    number of tests can use it.  `worker(my_services)` offers all services of a `Services`.
    """
    from ..mdp.program.arguments import is_async
    from ..workers import AsyncWorker, Worker
    from ..workers.services import Services, ServicesWorker

    endpoint = mdp_broker.endpoints[0]
    with ExitStack() as stack:

        def start(
            service: str | Worker | AsyncWorker | Services,
            handler: Callable[[Any], Any] | None = None,
            **settings: Any,
        ) -> Worker | AsyncWorker | ServicesWorker:
            made: Worker | AsyncWorker | ServicesWorker
            if not isinstance(service, str) and (handler is not None or settings):
                raise TypeError("worker(my_worker) takes no handler and no settings: it has its own")
            if isinstance(service, Services):
                made = service.worker(broker=endpoint)
            elif not isinstance(service, str):
                made = service.copy(broker=endpoint)
                made.settings = replace(made.settings, keys=None)  # this broker needs none
            elif handler is None:
                raise TypeError(f"worker({service!r}) needs a handler: worker({service!r}, handler)")
            elif is_async(handler):
                made = AsyncWorker(service, handler, broker=endpoint, **settings)
            else:
                made = Worker(service, handler, broker=endpoint, **settings)
            workers = made.workers if isinstance(made, ServicesWorker) else [made]
            names = [each.service.decode() for each in workers]
            if isinstance(made, Worker):
                stack.enter_context(made)
            else:
                thread = threading.Thread(target=asyncio.run, args=(made.run(),), name=f"{names[0]}-loop", daemon=True)
                thread.start()
                stack.callback(thread.join)
                stack.callback(made.stop)
            for name in names:
                _await_worker(mdp_client, name)
            return made

        yield start


def _await_worker(client: Client, service: str) -> None:
    until = time.monotonic() + REGISTRATION_SECONDS
    while not client.available(service):
        if time.monotonic() > until:
            pytest.fail(f"no worker for {service!r} has registered within {REGISTRATION_SECONDS:g} s: see the log")
        time.sleep(0.005)

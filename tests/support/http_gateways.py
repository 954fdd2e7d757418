"""Runs HTTP gateways in threads of this process."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import Client
from zmdp.clients.gateways.http.access import Access
from zmdp.clients.gateways.http.gateway import Gateway
from zmdp.clients.gateways.http.server import Server, listen
from zmdp.clients.gateways.http.settings import Settings
from zmdp.clients.gateways.upstream import Upstream
from zmdp.mdp.keys import ClientKeys


class Running:
    """A gateway that runs."""

    gateway: Gateway
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def websocket(self) -> str:
        return self.url.replace("http", "ws", 1) + "/ws"

    @property
    def connections(self) -> list[Any]:
        """The connections of clients."""
        return list(self.server._state.connections)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)


TITANIC = ("titanic.request", "titanic.reply", "titanic.close")


def await_services(broker: str, *services: str, **settings: Any) -> None:
    """Wait until each service has a worker.  `settings` are those of a `Client`."""
    with Client(broker, timeout=TIMEOUT_SECONDS, **settings) as client:
        for each in services:
            eventually(partial(client.available, each))


@contextmanager
def http_gateway(
    broker: str, *, access: Access | None = None, keys: ClientKeys | None = None, **settings: Any
) -> Iterator[Running]:
    """Run a gateway at a free port.  Its event loop must report no errors; afterwards nothing may be outstanding."""
    running = Running()
    started = threading.Event()
    complaints: list[dict[str, Any]] = []

    async def serve() -> None:
        running.loop = asyncio.get_running_loop()
        running.loop.set_exception_handler(lambda loop, context: complaints.append(context))
        async with Upstream(broker, keys=keys, timeout=TIMEOUT_SECONDS) as upstream:
            limits = Settings(**{"drain_timeout": 1.0, **settings})
            running.gateway = Gateway(upstream, limits, access, on_behalf=keys is not None)
            running.server = Server(running.gateway, listen("127.0.0.1", 0))
            started.set()
            await running.server.run()

    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(lambda: asyncio.run(serve()))
        serving.add_done_callback(lambda done: started.set())
        try:
            assert started.wait(TIMEOUT_SECONDS)
            yield running
        finally:
            if not serving.done():
                running.stop()
            serving.result()
    assert complaints == []
    assert (running.gateway.outstanding, running.gateway.memory) == (0, 0)

"""Gateways and workers in threads of this process, for tests with real sockets."""

import asyncio
import json
import threading
from contextlib import contextmanager

from support.flux_client import FluxClient
from support.http_gateways import await_services
from support.loops import serving
from support.processes import TIMEOUT_SECONDS

from zmdp.interop.flux.gateway import FluxGateway, FluxSettings
from zmdp.mdp.errors import ZmdpError
from zmdp.workers import AsyncWorker


class Running:
    """A running gateway, and what its tests need."""

    def __init__(self, gateway, loop, stop, thread):
        self.gateway = gateway
        self.path = gateway.settings.path
        self._loop = loop
        self._stop = stop
        self._thread = thread

    def client(self, order="<"):
        return FluxClient(self.path, order)

    def run(self, function, *arguments):
        """Call a function, or run a coroutine function, in the gateway's thread."""

        async def call():
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(TIMEOUT_SECONDS)

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()


@contextmanager
def running_gateway(endpoint, path, *, keys=None, **settings):
    """Run a gateway in a thread, for a `with` block."""
    gateway = FluxGateway(endpoint, FluxSettings(str(path), **settings), keys=keys)
    ready, failure, found = threading.Event(), [], {}

    async def main():
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with gateway:
                ready.set()
                await found["stop"].wait()
        except ZmdpError as error:
            failure.append(error)
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT_SECONDS)
    if failure:
        thread.join()
        raise failure.pop()
    running = Running(gateway, found["loop"], found["stop"], thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.stop()
    if failure:
        raise failure[0]


@contextmanager
def running_workers(endpoint, **handlers):
    """Run an AsyncWorker for each handler, in a thread of their own."""
    with serving(*(AsyncWorker(name, handler, broker=endpoint) for name, handler in handlers.items())):
        await_services(endpoint, *handlers)
        yield


async def echo(request):
    """Reply with the request."""
    return list(request)


async def count(request):
    """Stream as many parts as the request says, then nothing."""
    for number in range(json.loads(request[0])["parts"]):
        yield b'{"i":%d}' % number

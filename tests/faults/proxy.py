"""TCP proxies whose network fails when it is told to."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

CHUNK_BYTES = 65536


class Proxy:
    """Forwards connections to a port on loopback; can end all of them, or hold back what they carry."""

    def __init__(self, name: str, target: int) -> None:
        self.name = name
        self.port = 0
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    async def listen(self) -> None:
        """Begin to accept connections, at `port`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """End all connections."""
        for each in set(self._tasks):
            each.cancel()

    async def close(self) -> None:
        """Accept no more connections, and end those that there are."""
        self._server.close()
        tasks = set(self._tasks)
        await self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stall(self) -> None:
        """Forward nothing more until `resume`; the connections stay."""
        self._flows.clear()

    async def resume(self) -> None:
        """Forward again."""
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):  # asyncio of Python 3.11 logs a cancelled server task
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
                try:
                    await self._relay((reader, far_writer), (far_reader, writer))
                finally:
                    far_writer.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _relay(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Forward both ways until one of them ends."""
        pumps = [asyncio.ensure_future(self._pump(*way)) for way in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()


class Network:
    """Runs proxies in a thread."""

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def add(self, name: str, target: int) -> str:
        """Start a proxy; return its endpoint."""
        proxy = Proxy(name, target)
        self.do(proxy.listen())
        self.proxies.append(proxy)
        return f"tcp://127.0.0.1:{proxy.port}"

    def do(self, what: Coroutine[Any, Any, None]) -> None:
        """Have the thread do something, and wait until it is done."""
        asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def close(self) -> None:
        """End all connections, and the thread."""
        for each in self.proxies:
            self.do(each.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

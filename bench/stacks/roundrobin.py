"""ZeroMQ's own load distribution: a ROUTER–DEALER proxy, which distributes requests round robin (inturn.py)."""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from . import processes
from .load import Ask
from .peer import Peer, Server, Work

INTURN = processes.BENCH / "inturn.py"


@dataclass
class RoundRobin(Peer):
    """A worker gets its turn, busy or not."""

    name: str = "ZeroMQ's round robin"

    @contextmanager
    def server(self, folder: Path) -> Iterator[Server]:
        del folder
        with processes.running(sys.executable, INTURN) as process:
            yield Server(process.read_line(), [process.pid])

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        socket = zmq.Context().socket(zmq.DEALER)
        socket.connect(address.rpartition(" ")[2])
        ready()
        while True:
            message = socket.recv_multipart()
            socket.send_multipart([*message[:-1], work(message[-1])])

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        loop = asyncio.get_running_loop()
        waiting: dict[bytes, asyncio.Future[bytes]] = {}
        numbers = itertools.count()
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(address.partition(" ")[0])

            def arrived() -> None:
                while socket.get(zmq.EVENTS) & zmq.POLLIN:
                    number, body = socket.recv_multipart()
                    waiting.pop(number).set_result(body)

            async def ask(body: bytes) -> bytes:
                number = b"%d" % next(numbers)
                future = waiting[number] = loop.create_future()
                socket.send_multipart([number, body])
                loop.call_soon(arrived)  # the descriptor tells of changes only
                return await future

            descriptor = int(socket.get(zmq.FD))
            loop.add_reader(descriptor, arrived)
            await asyncio.sleep(0.5)  # until the workers have surely connected
            try:
                yield ask
            finally:
                loop.remove_reader(descriptor)

"""The server's socket."""

import asyncio
import socket

from zmdp.mdp.http.guard import MAX_IGNORED
from zmdp.mdp.http.limits import ConnectionLimits
from zmdp.mdp.http.server import LISTENERS, Server, run
from zmdp.mdp.transport.tcp import listen

CALLERS = 4 * LISTENERS


async def nothing(scope, receive, send):
    raise AssertionError(scope)


def test_many_callers_do_not_keep_others_from_connecting():
    async def main():
        listener = listen("127.0.0.1", 0)
        server = Server(nothing, ConnectionLimits(), listener)
        running = asyncio.ensure_future(server.run())
        held = [socket.create_connection(listener.getsockname()[:2]) for _ in range(CALLERS)]
        turns = 0
        while len(server.connections) < CALLERS:
            await asyncio.sleep(0)
            turns += 1
        server.stop()
        await running
        for each in held:
            each.close()
        return turns

    assert run(main) <= CALLERS // 2


class Peak:
    """An owner of connections that remembers the most memory that it has been charged."""

    def __init__(self):
        self._memory = self.most = 0

    @property
    def memory(self):
        return self._memory

    @memory.setter
    def memory(self, size):
        self._memory = size
        self.most = max(self.most, size)


def test_a_refused_body_is_not_kept_while_the_rest_of_it_arrives():
    limits, owner, ended = ConnectionLimits(max_memory=2 << 20), Peak(), []

    async def application(scope, receive, send):
        del scope, send
        pieces = []
        while (message := await receive())["type"] == "http.request":
            pieces.append(message["body"])
        ended.append(sum(map(len, pieces)))

    async def main():
        listener = listen("127.0.0.1", 0)
        server = Server(application, limits, listener, owner=owner)
        running = asyncio.ensure_future(server.run())
        try:
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4000000\r\n\r\n")
            writer.write(bytes(limits.max_unfinished + 1))
            assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
            (kept,) = ended  # before the response begins, after which the client may go on sending
            assert 0 < kept <= limits.max_unfinished + 1
            assert owner.memory == 0
            owner.most = 0
            writer.write(bytes(MAX_IGNORED // 2))
            await writer.drain()
            writer.close()
            while len(server.connections):
                await asyncio.sleep(0)
            assert owner.most == 0
        finally:
            server.stop()
            server.stop()
            await running

    run(main)

"""The server's socket."""

import asyncio
import socket

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

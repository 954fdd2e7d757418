"""The server: how it stops, and how many connections it has."""

import asyncio
import contextlib
import logging
import socket

import pytest
from support.gateways import Raw

from zmdp.gateways.upstream import raise_descriptor_limit
from zmdp.mdp.http.limits import ServerLimits
from zmdp.mdp.http.server import Server, run
from zmdp.mdp.transport.listening import listen

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
IDLE = 1500


async def answer(scope, receive, send):
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def serving(application, drive, **limits):
    """Run `drive` in a thread, with the server's port and a function that stops it."""

    async def main():
        listener = listen("127.0.0.1", 0)
        server = Server(application, ServerLimits(**limits), listener)
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(server.run())
        port = listener.getsockname()[1]
        try:
            return await asyncio.to_thread(drive, port, lambda: loop.call_soon_threadsafe(server.stop))
        finally:
            for _ in range(2):
                server.stop()
            await running

    return run(main)


@pytest.mark.parametrize(
    "data",
    [b"", b"GET /", GET[:-4] + b"\r\ncontent-length: 100\r\n\r\nx", GET],
    ids=["silent", "a fragment of the headers", "a fragment of the body", "answered"],
)
def test_probes_are_answered_beside_idle_connections(data):
    raise_descriptor_limit(2 * IDLE)  # both ends are in this process

    def drive(port, stop):
        del stop
        with contextlib.ExitStack() as stack:
            for _ in range(IDLE):
                stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(data)
            for _ in range(3):
                with Raw(port) as client:
                    assert client.send(GET).response()[::2] == (200, b"ok")

    serving(answer, drive)


def test_more_connections_than_there_may_be():
    def drive(port, stop):
        del stop
        with Raw(port) as first:
            assert first.send(GET).response()[0] == 200
            with Raw(port) as second:
                assert second.send(GET).response()[0] == 503
            assert first.send(GET).response()[0] in {200, 503}  # the second may not have ended yet

    serving(answer, drive, max_connections=2)


class Endless:
    """Answers when it is let, or never."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, scope, receive, send):
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("stops", [1, 2], ids=["after a while", "at once"])
def test_requests_that_do_not_end_are_given_up(stops, caplog):
    application = Endless()

    async def main():
        listener = listen("127.0.0.1", 0)
        limits = ServerLimits(drain_timeout=0.2 if stops == 1 else 1000.0)
        server = Server(application, limits, listener)
        running = asyncio.ensure_future(server.run())
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(GET)
        await application.begun.wait()
        for _ in range(stops):
            server.stop()
        await running
        writer.close()
        return server.cut_off

    with caplog.at_level(logging.WARNING):
        assert run(main) is True
    assert application.cancelled == 1
    assert "gave up 1 request, which had" in caplog.text


def test_a_request_in_progress_is_finished():
    begun, let = asyncio.Event(), asyncio.Event()

    async def application(scope, receive, send):
        begun.set()
        await let.wait()
        await answer(scope, receive, send)

    async def main():
        listener = listen("127.0.0.1", 0)
        server = Server(application, ServerLimits(), listener)
        running = asyncio.ensure_future(server.run())
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(GET)
        await begun.wait()
        server.stop()
        let.set()
        found = await reader.read()
        writer.close()
        await running
        return found, server.cut_off

    found, cut_off = run(main)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert cut_off is False

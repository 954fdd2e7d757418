"""Endpoints of Starlette whose browsers leave, with a real server, broker and worker."""

import asyncio
import socket
import threading
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from support.processes import TIMEOUT_SECONDS

from zmdp import AsyncClient, Worker
from zmdp.clients.starlette import while_connected
from zmdp.testing import running_broker


class Handler:
    """Begins to stream, and goes on until it is cancelled."""

    def __init__(self):
        self.began = threading.Event()
        self.cancelled = threading.Event()

    def __call__(self, request):
        self.began.set()
        while not request.cancelled:
            yield b"more"
            self.cancelled.wait(0.01)
        self.cancelled.set()


async def whole(request):
    await request.body()
    reply = await while_connected(request, request.state.client.request(request.path_params["service"]))
    return PlainTextResponse(reply[0])


async def stream(request):
    async def parts():
        async for part in request.state.client.stream(request.path_params["service"]):
            yield part[0]

    return StreamingResponse(parts())


@contextmanager
def serving(endpoint):
    """Run the application, and yield the port on which it listens."""

    @asynccontextmanager
    async def lifespan(app):
        async with AsyncClient(endpoint) as client:
            yield {"client": client}

    routes = [Route("/whole/{service}", whole, methods=["POST"]), Route("/stream/{service}", stream)]
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes, lifespan=lifespan), log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def endpoint():
    with running_broker(drain_timeout=0.0) as server:
        yield server.endpoints[0]


@pytest.fixture(scope="module")
def port(endpoint):
    with serving(endpoint) as port:
        yield port


def test_a_reply_is_returned(endpoint, port):
    with Worker("hello", lambda request: b"hello", broker=endpoint):
        answer = httpx.post(f"http://127.0.0.1:{port}/whole/hello", content=b"body", timeout=TIMEOUT_SECONDS)
    assert (answer.status_code, answer.text) == (200, "hello")


@pytest.mark.parametrize("head", ["POST /whole/{}", "GET /stream/{}"])
def test_a_request_is_cancelled_when_the_browser_leaves(endpoint, port, head, caplog):
    handler, service = Handler(), head[:4].strip().lower()
    with Worker(service, handler, broker=endpoint):
        with socket.create_connection(("127.0.0.1", port)) as browser:
            text = f"{head.format(service)} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            browser.sendall(text.encode())
            assert handler.began.wait(TIMEOUT_SECONDS)
        assert handler.cancelled.wait(TIMEOUT_SECONDS)
    assert [each for each in caplog.records if each.name.startswith("uvicorn")] == []


class Asked:
    """A request whose client stays, or leaves."""

    def __init__(self, *messages):
        self._messages = list(messages)

    async def receive(self):
        if not self._messages:
            await asyncio.get_running_loop().create_future()
        return {"type": self._messages.pop(0)}


def test_what_is_raised():
    async def fail():
        raise LookupError

    async def main():
        with pytest.raises(LookupError):
            await while_connected(Asked(), fail())
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(HTTPException) as caught:
            await while_connected(Asked("http.request", "http.disconnect"), never)
        assert (caught.value.status_code, never.cancelled()) == (499, True)
        never = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(while_connected(Asked(), never))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert never.cancelled()

    asyncio.run(main())

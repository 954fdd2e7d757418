"""What a request costs the HTTP gateway, against a bare echo of Starlette on uvicorn: `python bench/gateway_http.py`.

Both run in processes of their own, with uvloop and httptools, and take turns under the same load: connections that each
keep one POST outstanding, from another process.  Figures are microseconds of CPU per request of the server's process;
the gateway's broker and worker are further processes.  The ratio is that of the medians of all turns.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from native import cpu_seconds
from turns import WORKER, running, start_broker

ECHO = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

async def echo(request):
    return Response(await request.body(), media_type="application/octet-stream")

app = Starlette(routes=[Route("/services/echo", echo, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", lifespan="off", log_level="error",
            access_log=False, server_header=False, proxy_headers=False)
"""


class Caller(asyncio.Protocol):
    """A connection that keeps one request outstanding while `load.until` is in the future."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._missing = 0
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self) -> None:
        self.transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"unexpected reply: {self._received!r}")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        assert body == self._load.body
        self._received = b""
        self._load.answered += 1
        if time.monotonic() < self._load.until:
            self.send()
        else:
            self._load.ended()


class Load:
    """All connections to one server, in the load's own process."""

    def __init__(self, body: int) -> None:
        self.body = b"x" * body
        self.answered = self.running = 0
        self.until = 0.0
        self.callers: list[Caller] = []

    async def connect(self, url: str, connections: int) -> None:
        at = urlsplit(url)
        head = (
            f"POST /services/echo HTTP/1.1\r\nhost: {at.netloc}\r\naccept: */*\r\naccept-encoding: gzip, deflate\r\n"
            f"user-agent: bench\r\ncontent-type: application/octet-stream\r\ncontent-length: {len(self.body)}\r\n\r\n"
        )
        self.request = head.encode() + self.body
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            _, caller = await loop.create_connection(lambda: Caller(self), at.hostname, at.port)
            self.callers.append(caller)

    async def turn(self, seconds: float) -> int:
        self.answered, self.until = 0, time.monotonic() + seconds
        self.running, self.done = len(self.callers), asyncio.get_running_loop().create_future()
        for caller in self.callers:
            caller.send()
        await self.done
        return self.answered

    def ended(self) -> None:
        self.running -= 1
        if not self.running:
            self.done.set_result(None)


async def generate(url: str, connections: int, body: int) -> None:
    """The load's process: a line with the seconds of a turn in, a line with the number of requests out."""
    load = Load(body)
    await load.connect(url, connections)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await load.turn(float(line)), flush=True)


def started(stack: ExitStack, *command: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def await_listener(port: int) -> None:
    import socket

    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a turn")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--body", type=int, default=32, help="bytes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        uvloop.run(generate(options.load, options.connections, options.body))
        return
    with ExitStack() as stack:
        endpoint, broker = start_broker(stack)
        worker = started(stack, sys.executable, "-c", WORKER, endpoint)
        command = (sys.executable, "-m", "zmdp.clients.gateways.cli", "http", "--bind", "127.0.0.1:0")
        gateway = stack.enter_context(running(*command, "--broker", endpoint, "--log-level", "error"))
        assert gateway.stdout is not None
        port = free_port()
        echo = stack.enter_context(running(sys.executable, "-c", ECHO, str(port)))
        await_listener(port)
        urls = {"gateway": gateway.stdout.readline().strip(), "echo": f"http://127.0.0.1:{port}"}
        pids = {"gateway": gateway.pid, "echo": echo.pid}
        loads = {
            name: started(
                stack, sys.executable, str(Path(__file__)), "--load", url, "--connections", str(options.connections),
                "--body", str(options.body),
            )
            for name, url in urls.items()
        }  # fmt: skip
        costs: dict[str, list[float]] = {name: [] for name in urls}
        rates: dict[str, list[float]] = {name: [] for name in urls}
        others: list[float] = []
        for number in range(-1, options.rounds):  # the first round warms up
            for name in list(urls)[:: 1 if number % 2 else -1]:
                load = loads[name]
                assert load.stdin is not None
                assert load.stdout is not None
                before, beside = cpu_seconds(pids[name]), cpu_seconds(broker) + cpu_seconds(worker.pid)
                began = time.monotonic()
                load.stdin.write(f"{options.seconds}\n")
                answered = int(load.stdout.readline())
                if number >= 0:
                    rates[name].append(answered / (time.monotonic() - began))
                    costs[name].append(1e6 * (cpu_seconds(pids[name]) - before) / answered)
                    if name == "gateway":
                        others.append(1e6 * (cpu_seconds(broker) + cpu_seconds(worker.pid) - beside) / answered)
    found = {name: statistics.median(each) for name, each in costs.items()}
    ratio = found["gateway"] / found["echo"]
    if options.json:
        print(json.dumps({**found, "ratio": ratio}))
        return
    for name, cost in found.items():
        print(f"{name:8} {cost:6.1f} µs of CPU per request, {statistics.median(rates[name]):7.0f} requests/s")
    print(f"ratio    {ratio:6.2f}; broker and worker: {statistics.median(others):.1f} µs per request")


if __name__ == "__main__":
    main()

"""What X1 gives, measured with real processes on this machine: `python bench/x1.py`.

1. `AsyncClient` with 1, 64 and 500 requests outstanding: requests a second and latencies.
2. From a worker's kill -9 to its request running elsewhere; from a broker's kill -9 to the first reply after its
   restart.
3. A mixed load (200 requests a second, 5% of them take 200 ms, 4 workers): the short ones' latencies, beside the same
   load on workers that are given requests in turn whether they are busy or not.

Compare ratios, not numbers: they depend on the machine and on what else it does.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

from zmdp.clients import AsyncClient
from zmdp.clients.load import Result, mixed, pipelined

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ROUNDS = 5
SECONDS = 5.0


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start_broker(stack: ExitStack, bind: str = "tcp://127.0.0.1:*") -> tuple[subprocess.Popen[str], str]:
    process = stack.enter_context(running(str(BIN / "mdp-broker"), "--bind", bind, "--log-level", "error"))
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def start_worker(stack: ExitStack, endpoint: str, target: str, *options: str) -> subprocess.Popen[str]:
    command = (str(BIN / "mdworker"), target, "--broker", endpoint, "--log-level", "error", *options)
    return stack.enter_context(running(*command))


def nothing(_: float) -> None:
    pass


# ── 1 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def throughput(endpoint: str) -> None:
    print(f"AsyncClient, 4 echo workers, 32-byte bodies, {SECONDS:g} s each, median of 3:")
    async with AsyncClient(endpoint) as client:
        await client.request("echo", b"x")
        results: dict[int, list[Result]] = {1: [], 64: [], 500: []}
        for _ in range(3):
            for outstanding, found in results.items():
                found.append(
                    await pipelined(
                        client, "echo", [b"x" * 32], outstanding=outstanding, seconds=SECONDS, progress=nothing
                    )
                )
        for outstanding, found in results.items():
            rate = statistics.median(each.replies / each.seconds for each in found)
            halves = statistics.median(each.latencies["all"].percentile(50) for each in found)
            worst = statistics.median(each.latencies["all"].percentile(99) for each in found)
            latencies = f"p50 {halves * 1e3:7.2f} ms, p99 {worst * 1e3:7.2f} ms"
            print(f"  {outstanding:4} outstanding: {rate:8,.0f} a second, {latencies}")


# ── 2 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def worker_killed(endpoint: str) -> None:
    waits = []
    for _ in range(ROUNDS):
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                start_worker(stack, endpoint, "services:hold")
            async with AsyncClient(endpoint, timeout=60) as client:
                while len(await workers_of(client, "hold")) < 2:
                    await asyncio.sleep(0.05)
                asking = asyncio.create_task(client.request("hold", folder.encode()))
                while not (begun := list(Path(folder).iterdir())):
                    await asyncio.sleep(0.01)
                killed = time.monotonic()
                os.kill(int(begun[0].name), signal.SIGKILL)
                reply = await asking
                waits.append(float(reply[0]) - killed)
    told("from a worker's kill -9 to its request running elsewhere", waits)


async def broker_killed() -> None:
    from_kill, from_start = [], []
    for _ in range(ROUNDS):
        with ExitStack() as stack:
            broker, endpoint = start_broker(stack)
            for _ in range(4):
                start_worker(stack, endpoint, "zmdp.workers.sleep:worker")
            async with AsyncClient(endpoint, timeout=60) as client:
                await client.request("sleep", b"1")
                asking = [asyncio.create_task(client.request("sleep", b"5", b"%d" % n)) for n in range(500)]
                await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                broker.kill()
                killed = time.monotonic()
                broker.wait()
                start_broker(stack, endpoint)
                started = time.monotonic()
                await asyncio.sleep(0)
                left = [each for each in asking if not each.done()]
                await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                from_kill.append(time.monotonic() - killed)
                from_start.append(time.monotonic() - started)
                assert len(await asyncio.gather(*asking)) == 500
    told("from a broker's kill -9 to the first reply after its restart", from_kill)
    told("… of which after the new broker listened", from_start)


async def workers_of(client: AsyncClient, service: str) -> list[object]:
    answer = await client.request("mmi.workers", service.encode())
    found: list[object] = json.loads(answer[0])["workers"]
    return found


def told(what: str, seconds: list[float]) -> None:
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} times"
    print(f"{what}: median {statistics.median(seconds):.2f} s ({spread})")


# ── 3 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class InTurn:
    """A client of workers that are given requests in turn, whether they are busy or not: ZeroMQ's own DEALER."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._arrived)

    async def request(self, service: str, *frames: bytes, wait: bool) -> None:
        del service, wait
        number = os.urandom(8)
        future = self._waiting[number] = self._loop.create_future()
        self._socket.send_multipart([number, *frames])
        self._loop.call_soon(self._arrived)
        await future

    def _arrived(self) -> None:
        while self._socket.get(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._waiting.pop(self._socket.recv_multipart()[0]).set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._socket.close(0)


async def mixed_load(endpoint: str) -> None:
    print("mixed load: 200 requests a second at random moments, 5% take 200 ms, the others 1 ms; 4 workers; 20 s each:")
    load = {"share": 0.05, "rate": 200.0, "seconds": 20.0, "progress": nothing}
    with ExitStack() as stack:
        stack.enter_context(
            running(str(BIN / "mdworker"), "zmdp.workers.sleep:worker", "--broker", endpoint, "--processes", "4")
        )
        async with AsyncClient(endpoint) as client:
            while len(await workers_of(client, "sleep")) < 4:
                await asyncio.sleep(0.05)
            ours = await mixed(client, "sleep", [b"1"], [b"200"], **load)
    with ExitStack() as stack, zmq.Context() as context:
        proxy = stack.enter_context(running(sys.executable, str(HERE / "inturn.py"), "proxy"))
        assert proxy.stdout is not None
        front, back = proxy.stdout.readline().split()
        for _ in range(4):
            each = stack.enter_context(running(sys.executable, str(HERE / "inturn.py"), "worker", back))
            assert each.stdout is not None
            each.stdout.readline()
        await asyncio.sleep(1)  # connected, as far as can be told
        client = InTurn(front, context)
        theirs = await mixed(client, "sleep", [b"1"], [b"200"], **load)  # type: ignore[arg-type]
        client.close()
    for name, result in (("zmdp, to whoever is idle", ours), ("in turn, busy or not", theirs)):
        short = result.latencies["short"]
        print(
            f"  {name:26} short ones ({short.count}): p50 {short.percentile(50) * 1e3:7.2f} ms, "
            f"p99 {short.percentile(99) * 1e3:7.2f} ms, errors {sum(result.errors.values())}"
        )


async def main() -> None:
    with ExitStack() as stack:
        _, endpoint = start_broker(stack)
        for _ in range(4):
            start_worker(stack, endpoint, "zmdp.workers.echo:worker")
        await throughput(endpoint)
    with ExitStack() as stack:
        _, endpoint = start_broker(stack)
        await worker_killed(endpoint)
        await broker_killed()
        await mixed_load(endpoint)


if __name__ == "__main__":
    asyncio.run(main())

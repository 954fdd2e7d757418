"""Recovery from a broker's kill -9, measured with real processes on this machine: `python bench/x1.py`.

A client has 500 requests outstanding when the broker is killed; another broker starts immediately at the same endpoint.
The result is the time until the first reply; all 500 must be answered.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zmdp.clients import AsyncClient

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ROUNDS = 5
WORKERS = 4
OUTSTANDING = 500


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process, and kill it at the end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start_broker(stack: ExitStack, bind: str = "tcp://127.0.0.1:*") -> tuple[subprocess.Popen[str], str]:
    """Start a broker; return its process and its endpoint."""
    process = stack.enter_context(running(str(BIN / "mdp-broker"), "--bind", bind, "--log-level", "error"))
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def start_worker(stack: ExitStack, endpoint: str, target: str, *options: str) -> subprocess.Popen[str]:
    """Start an `mdworker` process."""
    command = (str(BIN / "mdworker"), target, "--broker", endpoint, "--log-level", "error", *options)
    return stack.enter_context(running(*command))


async def recovery() -> tuple[float, float]:
    """Return the seconds to the first reply, from the kill and from when the new broker listened."""
    with ExitStack() as stack:
        broker, endpoint = start_broker(stack)
        for _ in range(WORKERS):
            start_worker(stack, endpoint, "zmdp.workers.sleep:worker")
        async with AsyncClient(endpoint, timeout=60) as client:
            await client.request("sleep", b"1")
            asking = [asyncio.create_task(client.request("sleep", b"5", b"%d" % n)) for n in range(OUTSTANDING)]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            broker.kill()
            killed = time.monotonic()
            broker.wait()
            start_broker(stack, endpoint)
            started = time.monotonic()
            await asyncio.sleep(0)
            left = [each for each in asking if not each.done()]
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            replied = time.monotonic()
            if len(await asyncio.gather(*asking)) != OUTSTANDING:
                raise SystemExit("some requests were not answered")
            return replied - killed, replied - started


def show(what: str, seconds: list[float]) -> None:
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} times"
    print(f"{what}: median {statistics.median(seconds):.2f} s ({spread})")


def main() -> None:
    found = [asyncio.run(recovery()) for _ in range(ROUNDS)]
    show("from a broker's kill -9 to the first reply after its restart", [killed for killed, _ in found])
    show("… of which after the new broker listened", [started for _, started in found])


if __name__ == "__main__":
    main()

"""The cost of keys: throughput of AsyncClient, mdp-broker and AsyncWorker, with and without CURVE.

    python bench/curve.py [--rounds 10] [--seconds 1] [--outstanding 64] [--body 32]

Both brokers, each with a worker process, run the whole time; the client calls them in turns.  CPU is that of each
process with all its threads, also libzmq's, which encrypt.
"""

import argparse
import asyncio
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from turns import Case, arguments, compare, echo, running, start_broker

from zmdp.clients import AsyncClient
from zmdp.mdp.keys import create_keys
from zmdp.workers import AsyncWorker

TARGET = 0.8
"""Throughput with keys, compared with that without."""
ACCESS = """
secret_key = "broker.key_secret"
[roles.client]
keys = ["client.key"]
call = ["echo"]
[roles.worker]
keys = ["worker.key"]
offer = ["echo"]
"""


def keys_of(folder: str, name: str) -> dict[str, Any]:
    """Return the arguments for the key of that name; without `folder`, none."""
    return {"key": f"{folder}/{name}.key_secret", "broker_key": f"{folder}/broker.key"} if folder else {}


async def serve(endpoint: str, folder: str) -> None:
    """Run the worker."""
    async with AsyncWorker("echo", echo, broker=endpoint, **keys_of(folder, "worker")) as worker:
        await worker.wait()


def start(stack: ExitStack, name: str, folder: str) -> Case:
    """Start a broker, with keys if there is a folder with them, and a worker; return them with a client."""
    access = ("--access", f"{folder}/access.toml") if folder else ()
    endpoint, broker = start_broker(stack, *access)
    worker = stack.enter_context(running(sys.executable, __file__, "--serve", endpoint, folder))
    client = AsyncClient(endpoint, timeout=60, **keys_of(folder, "client"))
    return Case(name, client, {"client": os.getpid(), "broker": broker, "worker": worker.pid})


def measure(options: argparse.Namespace) -> list[Case]:
    """Return what was measured without keys, and with them."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        for name in ("broker", "client", "worker"):
            create_keys(name, Path(folder))
        Path(folder, "access.toml").write_text(ACCESS)
        cases = [start(stack, "without keys", ""), start(stack, "with keys", folder)]
        asyncio.run(compare(cases, options))
        return cases


def main() -> None:
    parser = arguments("The cost of keys")
    parser.add_argument("--serve", nargs=2, metavar=("ENDPOINT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(*options.serve))
        return
    cases = measure(options)
    for case in cases:
        cpu = ", ".join(f"{who} {statistics.median(each):.1f}" for who, each in case.cpu.items())
        print(f"{case.name:13} {statistics.median(case.rates):8,.0f} requests/s; CPU in µs per request: {cpu}")
    without, with_keys = cases
    ratio = statistics.median(with_keys.rates) / statistics.median(without.rates)
    each = statistics.median(b / a for a, b in zip(without.rates, with_keys.rates, strict=True))
    print(f"throughput with keys / without: {ratio:.2f} (median of the rounds' ratios: {each:.2f}); target {TARGET}")
    costs = [sum(statistics.median(each) for each in case.cpu.values()) for case in cases]
    print(f"CPU of all three, without / with keys: {costs[0] / costs[1]:.2f}")


if __name__ == "__main__":
    main()

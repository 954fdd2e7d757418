"""Failover under load: brokers are killed or drained, one every few seconds, while requests are outstanding.

    python tests/failover.py [--how kill|drain] [--tree] [--seconds 120] [--calls 100000]
                             [--every 3] [--outstanding 500] [--streams 20]

- By default: a pair of brokers, each the other's peer, and two clients and two workers that know both, in either order.
  The brokers are ended in turn, and started again.
- `--tree`: a root, two brokers below it, and below each of those two leaves.  Clients and workers know one leaf each.
  The root and the two brokers below it are ended in turn.  What cannot reach a worker meanwhile waits at its leaf, so
  a call may take as long as a broker is away.

Every call has its own body, and its reply must have that.  Some calls are streams: a stream that has begun may break
off with an error, but must not repeat or mix parts.  Before the first end and after the last there are a few quiet
seconds, from which the normal latency is taken.  The exit code is 1 if a call failed or a reply was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from support.processes import BIN

from zmdp.clients import AsyncClient, StreamInterrupted, ZmdpError
from zmdp.workers import AsyncWorker, Last

KILL_TARGET = 0.5
"""Seconds that 99 % of the calls around a kill may take."""
DRAIN_TARGET = 3.0
"""The same around the end of a broker that is drained, compared with the normal p99."""
TIMEOUT = 60.0
AWAY = 0.3
"""Seconds until a killed broker is started again."""
AROUND = 0.5
"""Seconds before and after an end within which a call must have begun to count as one around it."""
WARM_UP, QUIET = 2.0, 5.0
"""Seconds before the first measurement, and of each of the two quiet periods."""
PARTS = 3
SHOWN = 5
"""Errors that are printed."""

Times = list[tuple[float, float]]


async def echo(request: Any) -> list[bytes]:
    return list(request)


async def parts(request: Any) -> Any:
    for number in range(PARTS - 1):
        yield [*request, b"%d" % number]
    yield Last([*request, b"%d" % (PARTS - 1)])


async def serve(endpoints: Sequence[str]) -> None:
    """Run a worker of each service, which does not tell each time that it moves."""
    logging.disable(logging.WARNING)
    async with AsyncWorker("echo", echo, broker=endpoints), AsyncWorker("parts", parts, broker=endpoints) as worker:
        await worker.wait()


def free_endpoints(count: int) -> list[str]:
    """Return endpoints on loopback at which nothing listens."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    endpoints = [f"tcp://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return endpoints


async def start_worker(stack: AsyncExitStack, endpoints: Sequence[str]) -> None:
    """Start a process of workers, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", *endpoints)
    stack.push_async_callback(process.wait)
    stack.callback(process.kill)


class Broker:
    """A broker's process, which can be ended and started again."""

    def __init__(self, name: str, endpoint: str, *links: str) -> None:
        self.name = name
        self.endpoint = endpoint
        options = ("--bind", endpoint, "--name", name, "--log-level", "error", *links)
        self._command = (str(BIN / "mdp-broker"), *options)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and return when it is ready."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert await self._process.stdout.readline(), f"broker {self.name} has not started"

    async def end(self, number: signal.Signals) -> None:
        """Send it a signal, and return when it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await self._process.wait()


@dataclass
class System:
    """What is started: brokers, those of them that are ended, and the endpoints of each client and worker."""

    brokers: list[Broker]
    victims: list[Broker]
    clients: list[list[str]]
    workers: list[list[str]]


def pair() -> System:
    a, b = free_endpoints(2)
    brokers = [Broker("a", a, "--peer", b), Broker("b", b, "--peer", a)]
    return System(brokers, brokers, [[a, b], [b, a]], [[a, b], [b, a]])


def tree() -> System:
    root, *below = free_endpoints(7)
    middle, leaves = below[:2], below[2:]
    victims = [Broker("root", root)]
    victims += [Broker(f"middle{at}", endpoint, "--parent", root) for at, endpoint in enumerate(middle)]
    others = [
        Broker(f"leaf{at}", endpoint, "--parent", middle[at // 2]) for at, endpoint in enumerate(leaves)
    ]  # fmt: skip
    return System([*victims, *others], victims, [[leaves[0]], [leaves[2]]], [[leaves[1]], [leaves[3]]])


@dataclass
class Load:
    """Calls without pause, and what has become of them."""

    clients: list[AsyncClient]
    began: array[float] = field(default_factory=lambda: array("d"))
    """When each answered call began."""
    took: array[float] = field(default_factory=lambda: array("d"))
    """Seconds until its reply."""
    wrong: int = 0
    broken_off: int = 0
    """Streams that had begun."""
    failed: Counter[str] = field(default_factory=Counter)
    stopped: bool = False

    async def call(self, number: int, *, stream: bool) -> None:
        """Make one call after the other."""
        client, count = self.clients[number % len(self.clients)], 0
        while not self.stopped:
            count += 1
            body = b"%d-%d" % (number, count)
            began = time.monotonic()
            try:
                right = await (self._stream(client, body) if stream else self._request(client, body))
            except ZmdpError as error:
                self.failed[f"{type(error).__name__}: {error}"] += 1
                continue
            self.wrong += not right
            self.began.append(began)
            self.took.append(time.monotonic() - began)

    async def _request(self, client: AsyncClient, body: bytes) -> bool:
        return list(await client.request("echo", body)) == [body]

    async def _stream(self, client: AsyncClient, body: bytes) -> bool:
        right, count = True, 0
        try:
            async for part in client.stream("parts", body):
                right &= part == [body, b"%d" % count]
                count += 1
        except StreamInterrupted:
            self.broken_off += 1
            return right and 0 < count < PARTS
        return right and count == PARTS


async def end_in_turn(victims: list[Broker], load: Load, options: argparse.Namespace) -> Times:
    """End one broker after the other and start it again; return when, and how long it took until it had ended."""
    began = time.monotonic()
    ends: Times = []
    while time.monotonic() < began + options.seconds or len(load.took) < options.calls:
        victim = victims[len(ends) % len(victims)]
        end = time.monotonic()
        await victim.end(signal.SIGKILL if options.how == "kill" else signal.SIGTERM)
        ends.append((end, time.monotonic() - end))
        if options.how == "kill":
            await asyncio.sleep(AWAY)
        await victim.start()
        await asyncio.sleep(max(end + options.every - time.monotonic(), 0.0))
    return ends


async def measure(system: System, options: argparse.Namespace) -> tuple[Load, Times, Times]:
    """Return the load, what `end_in_turn` returns, and the quiet periods."""
    async with AsyncExitStack() as stack:
        for broker in system.brokers:
            stack.push_async_callback(broker.end, signal.SIGKILL)
            await broker.start()
        for endpoints in system.workers:
            await start_worker(stack, endpoints)
        clients = [AsyncClient(endpoints, timeout=TIMEOUT) for endpoints in system.clients]
        for client in clients:
            stack.push_async_callback(client.close)
            await client.request("echo", b"")
        load = Load(clients)
        callers = [
            asyncio.create_task(load.call(number, stream=number < options.streams))
            for number in range(options.outstanding)
        ]
        await asyncio.sleep(WARM_UP)
        quiet = [await _quiet()]
        ends = await end_in_turn(system.victims, load, options)
        quiet.append(await _quiet())
        load.stopped = True
        await asyncio.gather(*callers)
    return load, ends, quiet


async def _quiet() -> tuple[float, float]:
    began = time.monotonic()
    await asyncio.sleep(QUIET)
    return began, time.monotonic()


def p99(took: list[float]) -> float:
    return sorted(took)[int(len(took) * 0.99)] if took else float("nan")


def within(calls: Times, began: float, ended: float) -> list[float]:
    """Return how long the calls took that began in a period; `calls` are sorted."""
    return [took for _, took in calls[bisect_left(calls, (began,)) : bisect_left(calls, (ended,))]]


def report(load: Load, ends: Times, quiet: Times, options: argparse.Namespace) -> bool:
    """Print the figures; return whether no call failed and no reply was wrong."""
    calls = sorted(zip(load.began, load.took, strict=True))
    normal = p99([took for period in quiet for took in within(calls, *period)])
    around = [within(calls, end - AROUND, end + AROUND) for end, _ in ends]
    near = p99([took for each in around for took in each])
    worst = max((p99(each) for each in around if each), default=float("nan"))
    failed = load.failed.total()
    what = "killed" if options.how == "kill" else "drained"
    print(f"{len(ends)} times a broker was {what}, which took up to {max(took for _, took in ends):.3f} s; "
          f"{options.outstanding} requests outstanding, {options.streams} of them streams")  # fmt: skip
    print(f"calls: {len(calls) + failed:,}, failed: {failed} (target 0), wrong replies: {load.wrong} (target 0), "
          f"streams broken off after a part: {load.broken_off}")  # fmt: skip
    for text, count in load.failed.most_common(SHOWN):
        print(f"  {count} × {text}")
    target = f"target {KILL_TARGET} s"
    if options.tree:
        target = "no target: calls wait until the broker is back"
    elif options.how == "drain":
        target = f"{near / normal:.1f} × normal, target {DRAIN_TARGET:g}"
    print(f"p99 normally: {normal:.3f} s; of calls begun in the second around an end: {near:.3f} s ({target}), "
          f"around the worst end {worst:.3f} s; longest call: {max(load.took):.3f} s")  # fmt: skip
    return not failed and not load.wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--how", choices=["kill", "drain"], default="kill", help="SIGKILL or SIGTERM")
    parser.add_argument("--tree", action="store_true", help="seven brokers instead of two")
    parser.add_argument("--seconds", type=float, default=120.0, help="for which brokers are ended, at least")
    parser.add_argument("--calls", type=int, default=100_000, help="minimum number of calls")
    parser.add_argument("--every", type=float, default=3.0, help="seconds from one end to the next")
    parser.add_argument("--outstanding", type=int, default=500)
    parser.add_argument("--streams", type=int, default=20, help="how many of these are streams")
    parser.add_argument("--serve", nargs="+", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    load, ends, quiet = asyncio.run(measure(tree() if options.tree else pair(), options))
    sys.exit(not report(load, ends, quiet, options))


if __name__ == "__main__":
    main()

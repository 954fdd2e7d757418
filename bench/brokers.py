"""The cost of links: broker CPU per local request beside other brokers, and of a request that passes one more broker.

    python bench/brokers.py [--rounds 10] [--seconds 1] [--outstanding 64] [--body 32] [--peers 2 4 8]

All brokers and workers run the whole time; one client calls the services in turns:

- `alone`: a broker without links, with a worker;
- `2 peers` …: the same, linked to so many others;
- `1 hop`: the client calls a broker whose peer has the worker, so that each request passes both;
- `2 hops`: the client and the worker are at two leaves of a tree, so that each request passes three.

CPU is that of each broker with all its threads, also libzmq's, and of all on the way together.  Compare within one run.
"""

import argparse
import asyncio
import statistics
import sys
from contextlib import ExitStack

from turns import Case, arguments, compare, echo, running, start_broker

from zmdp.clients import AsyncClient
from zmdp.workers import AsyncWorker


async def serve(endpoint: str) -> None:
    """Run the worker."""
    async with AsyncWorker("echo", echo, broker=endpoint) as worker:
        await worker.wait()


class Brokers:
    """Starts brokers with distinct names."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started = 0

    def start(self, *peers: str, parent: str | None = None) -> tuple[str, int]:
        """Start a broker that is linked to these; return its endpoint and process."""
        self._started += 1
        links = [argument for peer in peers for argument in ("--peer", peer)]
        links += ["--parent", parent] if parent else []
        return start_broker(self._stack, "--name", f"b{self._started}", *links)

    def work(self, endpoint: str) -> None:
        """Start a worker."""
        self._stack.enter_context(running(sys.executable, __file__, "--serve", endpoint))


def cases(brokers: Brokers, peers: list[int]) -> list[Case]:
    """Start everything; return what is compared."""
    found = []
    others = [brokers.start()[0] for _ in range(max(peers, default=0))]
    for count in (0, *peers):
        endpoint, pid = brokers.start(*others[:count])
        brokers.work(endpoint)
        found.append(Case(f"{count} peers" if count else "alone", AsyncClient(endpoint, timeout=60), {"broker": pid}))
    far, far_pid = brokers.start()
    brokers.work(far)
    near, near_pid = brokers.start(far)
    found.append(Case("1 hop", AsyncClient(near, timeout=60), {"first": near_pid, "second": far_pid}))
    root, root_pid = brokers.start()
    leaves = [brokers.start(parent=root) for _ in range(2)]
    brokers.work(leaves[1][0])
    pids = {"first": leaves[0][1], "second": root_pid, "third": leaves[1][1]}
    found.append(Case("2 hops", AsyncClient(leaves[0][0], timeout=60), pids))
    return found


def report(found: list[Case]) -> None:
    """Print the medians, and the ratio of all brokers on the way to the one without links, in the same round."""
    alone = found[0].cpu["broker"]
    for case in found:
        each = ", ".join(f"{who} {statistics.median(cpu):.1f} µs" for who, cpu in case.cpu.items())
        together = [sum(cpu) / base for *cpu, base in zip(*case.cpu.values(), alone, strict=True)]
        low, median, high = min(together), statistics.median(together), max(together)
        print(f"{case.name:<8} {statistics.median(case.rates):8,.0f} requests/s, CPU of {each}; "
              f"together {median:.2f} ({low:.2f}–{high:.2f}) × alone")  # fmt: skip


def main() -> None:
    parser = arguments("The cost of links")
    parser.add_argument("--peers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    with ExitStack() as stack:
        found = cases(Brokers(stack), options.peers)
        asyncio.run(compare(found, options))
        report(found)


if __name__ == "__main__":
    main()

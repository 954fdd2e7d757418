"""What a scrape of /metrics and an open dashboard cost: throughput of a broker with them, beside one without.

    python bench/scrape.py [--rounds N] [--seconds S] [--interval S] [--services N]

Two brokers, each with a worker, take turns; the second one runs with `--http`, and in its turns a process scrapes
/metrics every 100 ms, while the overview is open in one window (a stream of updates).  So both see the same noise of
the machine.  `--services` adds services that nobody calls, each with a request that waits.  The target is a ratio of at
least 0.97.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import AsyncExitStack, ExitStack, suppress

from turns import BIN, Case, arguments, compare, running

from zmdp.clients import AsyncClient

SCRAPER = textwrap.dedent("""
    import http.client, sys, threading, time
    port, interval = int(sys.argv[1]), float(sys.argv[2])

    def watch():
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/live/")
        answer = connection.getresponse()
        while answer.readline():
            pass

    threading.Thread(target=watch, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        began = time.monotonic()
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200 and b"mdp_up 1.0" in body, body[:200]
        time.sleep(max(0.0, began + interval - time.monotonic()))
""")


def wait_until_ready(url: str) -> None:
    """Wait until the broker has answered its web server."""
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}metrics") as answer:
            if b"mdp_up 1.0" in answer.read():
                return
        time.sleep(0.1)


class Scraped(Case):
    """A case in whose turns a process scrapes."""

    command: tuple[str, ...] = ()

    async def turn(self, seconds: float, outstanding: int, body: int) -> None:
        with subprocess.Popen(self.command) as scraper:
            try:
                await super().turn(seconds, outstanding, body)
                assert scraper.poll() is None, "the scraper has failed"
            finally:
                scraper.kill()


class Ignored:
    """Takes what a request results in."""

    def put(self, outcome: object) -> None:
        del outcome


async def main(options: argparse.Namespace) -> int:
    """Compare the two; return the exit code."""
    with ExitStack() as stack:
        async with AsyncExitStack() as fillers:
            cases: list[Case] = []
            for kind, extra in ((Case, ()), (Scraped, ("--http", "127.0.0.1:0"))):
                limits = ("--max-unserved", "100000", "--max-services", "100000")
                command = (str(BIN / "mdp-broker"), "--bind", "tcp://127.0.0.1:*", "--log-level", "error")
                broker = stack.enter_context(running(*command, *limits, *extra))
                assert broker.stdout is not None
                endpoint = broker.stdout.readline().strip()
                worker = stack.enter_context(
                    running(str(BIN / "mdworker"), "turns:echo", "--broker", endpoint, "--log-level", "error",
                            "--service", "echo")
                )  # fmt: skip
                case = kind("scraped" if extra else "alone", AsyncClient(endpoint), {"broker": broker.pid})
                case.pids["worker"] = worker.pid
                if extra:
                    url = broker.stdout.readline().strip()
                    port = url.rstrip("/").rpartition(":")[2]
                    await asyncio.to_thread(wait_until_ready, url)
                    case.command = (sys.executable, "-c", SCRAPER, port, str(options.interval))  # type: ignore[attr-defined]
                if options.services:
                    filler = await fillers.enter_async_context(AsyncClient(endpoint))
                    for number in range(options.services):
                        filler.begin(Ignored(), f"tenant.{number:05}", b"x", timeout=None)
                cases.append(case)
            await compare(cases, options)
    alone, scraped = cases
    ratios = [with_ / without for with_, without in zip(scraped.rates, alone.rates, strict=True)]
    for case in cases:
        used = statistics.median(case.cpu["broker"])
        print(f"{case.name:8} {statistics.median(case.rates):9.0f} requests/s, {used:6.2f} µs of the broker's CPU each")
    ratio = statistics.median(ratios)
    print(f"ratio    {ratio:9.3f} (from {min(ratios):.3f} to {max(ratios):.3f}; the target is 0.97)")
    return 0 if ratio >= 0.97 else 1


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between two scrapes")
    parser.add_argument("--services", type=int, default=0, help="further services")
    sys.exit(asyncio.run(main(parser.parse_args())))

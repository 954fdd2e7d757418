"""Failover under load: brokers are killed or drained, one every few seconds, while requests are outstanding.

    cd tests && python -m faults.failover [--how kill|drain] [--tree] [--seconds 120] [--every 3] [--outstanding 500]

- By default: a pair of brokers, each the other's peer, and two callers and two workers that know both, in either order.
  The brokers are ended in turn, and started again.
- `--tree`: a root, two brokers below it, and below each of those two leaves.  Callers and workers know one leaf each.
  The root and the two brokers below it are ended in turn.  What cannot reach a worker meanwhile waits at its leaf, so
  a call may take as long as a broker is away.

The ledger tells whether every call got the right reply; a stream that has begun may break off.  Before the first end
and after the last there are a few quiet seconds, from which the normal latency is taken.
"""

import random
import sys
import tempfile
import time
from bisect import bisect_left
from pathlib import Path
from typing import Final

import click
from faults.programs import Program
from faults.referee import SHOWN, Verdict
from faults.site import Site, is_ready, wait_until
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.clients import Client

AWAY_SECONDS: Final = 0.3
"""Until a killed broker is started again."""
AROUND_SECONDS: Final = 0.5
"""Before and after an end, within which a call must have begun to count as one around it."""
QUIET_SECONDS: Final = 5.0
"""How long each of the two quiet periods is."""
TARGETS: Final = {
    "kill": "target 0.5 s", "drain": "target 3 × normal", "tree": "no target: calls wait until the broker is back",
}  # fmt: skip

BEATS: Final = ("--heartbeat", "0.5", "--liveness", "240")
"""Only the end of a connection is noticed, however slow the machine is."""
MIN_ENDS: Final = 4

Period = tuple[float, float]


class FailoverSite(Site):
    """Brokers, some of which are ended, and workers and callers at them."""

    def __init__(self, folder: Path, outstanding: int, *, tree: bool) -> None:
        super().__init__(folder, random.Random(1))
        ends = [free_endpoint() for _ in range(7 if tree else 2)]
        if tree:
            links = [(), *[("--parent", ends[0])] * 2, *(("--parent", ends[1 + at // 2]) for at in range(4))]
            places = [ends[3], ends[5]], [ends[4], ends[6]]
        else:
            links = [("--peer", ends[1]), ("--peer", ends[0])]
            places = [",".join(ends), ",".join(ends[::-1])], [",".join(ends), ",".join(ends[::-1])]
        for at, (endpoint, link) in enumerate(zip(ends, links, strict=True)):
            name = f"broker-{at}"
            self.run("broker", name, "mdp-broker", "--bind", endpoint, "--name", name, *link, *BEATS)
        self.victims = self.programs[: 3 if tree else 2]
        for at, place in enumerate(places[1]):
            self.run("workers", f"worker-{at}", "mdworker", "faults.services:services", "--broker", place,
                     "--concurrency", "32", *BEATS)  # fmt: skip
        for place in places[0]:
            with Client(place.split(","), timeout=TIMEOUT_SECONDS) as client:
                for service in ("faults.quick", "faults.parts"):
                    eventually(lambda client=client, service=service: client.available(service))
        for at, place in enumerate(places[0]):
            self.run("caller", f"caller-{at}", "crowd", str(outstanding // 2), MDP_BROKER=place)

    def end(self, victim: Program, how: str) -> Period:
        """End a broker and start it again; return when that began, and how long it took until it had ended."""
        began, pid = time.monotonic(), victim.pid
        if how == "kill":
            self.kill(victim, away=AWAY_SECONDS)
        else:
            self.terminate(victim)
            wait_until(lambda: victim.pid != pid, self.look)
        took = time.monotonic() - began
        wait_until(lambda: is_ready(victim), self.look)
        return began, took

    def quiet(self) -> Period:
        """Let a quiet period pass."""
        began = time.monotonic()
        self.wait(QUIET_SECONDS)
        return began, time.monotonic()


def p99(took: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(took)[int(len(took) * 0.99)] if took else float("nan")


def failover(
    folder: Path, *, how: str = "kill", tree: bool = False, seconds: float = 120.0, every: float = 3.0,
    outstanding: int = 500,
) -> tuple[Verdict, FailoverSite]:  # fmt: skip
    """Run the load and print the figures; return what the ledger says, and the site with what is broken."""
    site = FailoverSite(folder, outstanding, tree=tree)
    try:
        quiet, ends = [site.quiet()], []
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(ends) < MIN_ENDS:
            ends.append(site.end(site.victims[len(ends) % len(site.victims)], how))
            site.wait(ends[-1][0] + every - time.monotonic())
        quiet.append(site.quiet())
        site.broken += site.end_callers(site.look)
        site.referee.read()
        verdict = site.referee.judge(site.faults)
        site.close()
    except BaseException:
        site.kill_all()
        raise
    site.broken += verdict.broken
    calls = sorted(
        (call.sent, call.ended - call.sent) for call in site.referee.calls.values() if call.sent and call.ended
    )

    def within(began: float, ended: float) -> list[float]:
        return [took for _, took in calls[bisect_left(calls, (began,)) : bisect_left(calls, (ended,))]]

    normal = p99([took for period in quiet for took in within(*period)])
    near = p99([took for end, _ in ends for took in within(end - AROUND_SECONDS, end + AROUND_SECONDS)])
    click.echo(
        f"{len(ends)} times a broker ended by {how}, which took up to {max(took for _, took in ends):.3f} s\n"
        f"{verdict.counts}\n"
        f"p99 normally: {normal:.3f} s; of calls begun in the second around an end: {near:.3f} s "
        f"({TARGETS['tree' if tree else how]}); longest call: {max(took for _, took in calls):.3f} s"
    )
    return verdict, site


@click.command()
@click.option("--how", type=click.Choice(["kill", "drain"]), default="kill", show_default=True)
@click.option("--tree", is_flag=True, help="Seven brokers instead of two.")
@click.option("--seconds", default=120.0, show_default=True, help="For which brokers are ended.")
@click.option("--every", default=3.0, show_default=True, help="Seconds from one end to the next.")
@click.option("--outstanding", default=500, show_default=True, help="Outstanding calls; one in 25 is a stream.")
def main(**settings: object) -> None:
    """End brokers under load, and check that no call fails."""
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        _, site = failover(Path(folder), **settings)  # type: ignore[arg-type]
    for each in site.broken[:SHOWN]:
        click.echo(f"WRONG: {each}")
    sys.exit(bool(site.broken))


if __name__ == "__main__":
    main()

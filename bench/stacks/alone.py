"""Run a single part: its options, and a plain table of its records."""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]


def main(title: str, run: Callable[[argparse.Namespace, Callable[[str], None]], Iterator[Record]]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, fewer peers")
    parser.add_argument("--rounds", type=int, help="number of turns of each peer")
    parser.add_argument("--seconds", type=float, help="seconds that each load lasts")
    parser.add_argument(
        "--only", metavar="PEER", action="append", help="measure only peers whose names begin with PEER; repeatable"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all that was started is ended
    began = time.monotonic()
    records = []
    try:
        for record in run(options, lambda text: print(text, file=sys.stderr, flush=True)):
            records.append(record)  # noqa: PERF402 - what was measured is kept if it is interrupted
    except KeyboardInterrupt:
        print("interrupted: what was measured until then follows", file=sys.stderr)
    print(title)
    for line in table(records):
        print(line)
    print(f"{time.monotonic() - began:.0f} s")


def extent(options: argparse.Namespace) -> tuple[int, float]:
    """Return the number of rounds, and the seconds of each load."""
    quick = getattr(options, "quick", False)
    rounds = getattr(options, "rounds", None) or (2 if quick else 3)
    return rounds, getattr(options, "seconds", None) or (0.5 if quick else 1.0)


def wanted(options: argparse.Namespace, name: str, quick: Sequence[str] = ()) -> bool:
    """Return whether to measure a peer; with --quick only those whose names begin with one of `quick`."""
    only = getattr(options, "only", None) or (quick if getattr(options, "quick", False) else ())
    return not only or name.lower().startswith(tuple(each.lower() for each in only))


def table(records: Iterable[Record]) -> Iterator[str]:
    """Yield lines: a block for each figure and its parameters, with ratios to the base, round by round."""
    bases: dict[str, str] = {}
    blocks: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for record in records:
        if "base" in record:
            bases[record["figure"]] = record["base"]
        elif "skipped" in record:
            yield f"{record['skipped']}: skipped, {record['why']}"
        elif "rounds" in record:
            params = ", ".join(f"{name} {value}" for name, value in record["params"].items())
            block = blocks.setdefault((record["figure"], record["unit"], params), {})
            block.setdefault(record["peer"], []).extend(record["rounds"])
    for (figure, unit, params), peers in blocks.items():
        yield f"\n{figure} ({unit}); {params}"
        base = bases.get(figure, "")
        for peer, rounds in peers.items():
            spread = f"{statistics.median(rounds):12,.2f}  ({min(rounds):,.2f}–{max(rounds):,.2f})"
            ratios = [mine / its for mine, its in zip(rounds, peers.get(base, []), strict=False) if its]
            ratio = f"{statistics.median(ratios):.2f} × {base} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""
            yield f"  {peer:32}{spread:40}{ratio}"

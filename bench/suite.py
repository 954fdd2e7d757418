"""The benchmark suite: the cost of the broker, and zmdp compared with its peers, in turn and in the same run.

    python bench/suite.py [--parts cost,stacks,mixed,death,durable] [--only PEER]… [--quick] [--rounds N] [--seconds S]
                          [--out build/bench]

It prints results.md and writes it, with results.json, into the folder; progress goes to stderr.  The page begins with
the targets (targets.py) and the values measured for them.  A run with the defaults takes about twenty minutes; --quick
takes a few, and measures little more than the targets need.  Ctrl-C ends the run and keeps its results so far.  Peers
that are not installed are skipped, and the page lists them.

A part is a module with `PART`, `TITLE` and `run(options, tell)`, which yields records as report.py describes them.
"""

import argparse
import datetime
import importlib
import os
import platform
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import report

HERE = Path(__file__).parent
PARTS = ("cost", "stacks", "mixed", "death", "durable")
"""The parts, which are also the names of their modules."""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def find(part: str) -> ModuleType:
    """Return the module of a part.  Raises `ImportError`."""
    return importlib.import_module(part)


def load_average() -> str:
    return ", ".join(f"{each:.2f}" for each in os.getloadavg())


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of the measured programs; `mdp-broker --version` reports whether its modules are compiled."""
    import zmq

    command = [str(Path(sys.executable).parent / "mdp-broker"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    return {
        "zmdp": " ".join(said.split()).removeprefix("mdp-broker "),
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
    }


def measure(options: argparse.Namespace, results: dict[str, Any], folder: Path) -> None:
    """Run all chosen parts; `results` keeps everything that was measured, even if a part fails."""
    records: list[dict[str, Any]] = results["records"]
    for part in options.parts:
        try:
            module = find(part)
        except ImportError as error:
            tell(f"{part}: missing: {error}")
            records.append({"part": part, "skipped": part, "why": f"it does not import: {error}"})
            continue
        tell(f"{part}: {module.TITLE}")
        records.append({"part": part, "title": module.TITLE})
        measured = module.run(options, tell)
        try:
            for record in measured:
                if "skipped" in record:
                    tell(f"{part}: without {record['skipped']}: {record['why']}")
                records.append(dict(record))
        except Exception as error:  # noqa: BLE001 - the other parts are measured nevertheless
            traceback.print_exc()
            records.append({"part": part, "skipped": f"the rest of {part}", "why": f"{type(error).__name__}: {error}"})
        finally:
            if hasattr(measured, "close"):
                measured.close()  # its processes end now
        results["machine"]["load after"] = load_average()
        judge(results)
        report.write(results, folder)


def judge(results: dict[str, Any]) -> None:
    """Compare the results with the targets."""
    import targets  # it needs all parts

    results["targets"] = targets.judge(report.figures(results["records"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n", maxsplit=1)[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas [%(default)s]")
    parser.add_argument(
        "--only", metavar="PEER", action="append", help="measure only peers whose names begin with PEER; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, fewer points and peers")
    parser.add_argument("--rounds", type=int, help="rounds of every measurement [3; --quick: 2]")
    parser.add_argument("--seconds", type=float, help="duration of one measurement of a full stack [1; --quick: 0.5]")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "bench", help="folder for the results")
    options = parser.parse_args()
    options.parts = [part.strip() for part in options.parts.split(",") if part.strip()]
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    options.rounds = options.rounds or (2 if options.quick else 3)
    options.seconds = options.seconds or (0.5 if options.quick else 1.0)
    return options


def interrupt(number: int, frame: object) -> None:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def main() -> int:
    """Measure and write."""
    options = arguments()
    signal.signal(signal.SIGTERM, interrupt)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load before": load_average()},
        "versions": versions(),
        "options": {"quick": options.quick, "rounds": options.rounds, "seconds": options.seconds},
        "records": [],
    }
    try:
        measure(options, results, options.out)
    except KeyboardInterrupt:
        tell("interrupted: writing what was measured")
        results["interrupted"] = True
    results["machine"]["load after"] = load_average()
    judge(results)
    report.write(results, options.out)
    print(report.markdown(results))
    tell(f"written to {options.out}")
    return 130 if results.get("interrupted") else 0


if __name__ == "__main__":
    sys.exit(main())

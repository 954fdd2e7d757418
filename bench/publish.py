"""Copy the results of a run to the documentation: `python bench/publish.py [bench/results]`.

It writes docs/explanation/benchmarks.md with all figures, and updates two plots and the targets between two comments in
docs/explanation/performance.md.
"""

import json
import shutil
import sys
from pathlib import Path

import report

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = DOCS / "explanation"
BEGIN, END = "<!-- targets: written by bench/publish.py -->", "<!-- end of targets -->"
PLOTS = {
    "stacks-requests-per-second": "requests-per-second",
    "mixed-latency-of-short-requests-p99": "mixed-p99",
}
HEADING = "# Benchmarks\n"
INTRODUCTION = "\n`make bench` wrote this page in one run; [Performance](performance.md) explains how to read it.\n"


def with_targets(page: str, table: str) -> str:
    """Return the page with the table between its two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    results = json.loads((folder / "results.json").read_text())
    page = report.markdown({**results, "targets": []}).replace(HEADING, HEADING + INTRODUCTION, 1)
    (PAGES / "benchmarks.md").write_text(page)
    performance = PAGES / "performance.md"
    performance.write_text(with_targets(performance.read_text(), report.targets_table(results["targets"])))
    for plot, name in PLOTS.items():
        shutil.copy(folder / f"{plot}.png", DOCS / "plots" / f"{name}.png")


if __name__ == "__main__":
    main()

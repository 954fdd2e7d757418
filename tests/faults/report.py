"""Writes what a soak has shown: `report.md`, `report.json` and `soak.png`."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fault import Fault
from .monitor import SETTLED_SECONDS, STEP_BYTES, Monitor
from .referee import SHOWN, Verdict

MB = 1e6
LONG_ENOUGH_SECONDS = 60.0
"""Processes that lived shorter are counted, but have no row."""
SPARSE = 6
"""Every which sample of memory is in the JSON."""


@dataclass(frozen=True)
class Soak:
    """What a soak has shown."""

    began: float
    seconds: float
    seed: int
    verdict: Verdict
    broken: list[str]
    """All broken invariants."""
    faults: list[Fault]
    replaced: list[tuple[float, float]]
    """When everything was replaced."""
    monitor: Monitor

    @property
    def replacements(self) -> str:
        """How long each took."""
        return ", ".join(f"{ended - began:.0f} s" for began, ended in self.replaced)


def write(soak: Soak, folder: Path) -> None:
    """Write the report into the folder."""
    (folder / "report.json").write_text(json.dumps(_facts(soak), indent=1, ensure_ascii=False))
    (folder / "report.md").write_text(markdown(soak))
    try:
        _plot(soak, folder / "soak.png")
    except ImportError:
        (folder / "soak.png").unlink(missing_ok=True)


def _facts(soak: Soak) -> dict[str, Any]:
    return {
        "seconds": round(soak.seconds), "seed": soak.seed, "counts": soak.verdict.counts, "broken": soak.broken,
        "faults": [{"at": round(each.at - soak.began, 1), "what": each.what} for each in soak.faults],
        "memory, MB": [
            {
                "process": each.name,
                "by second": {round(used.at - soak.began): round(used.rss / MB, 2) for used in each.usage[::SPARSE]},
            }
            for each in soak.monitor.series.values()
            if each.seconds >= LONG_ENOUGH_SECONDS
        ],
    }  # fmt: skip


def _kind(fault: Fault) -> str:
    return (
        " ".join(fault.what.split()[:2]).removesuffix(" a") if fault.what.startswith("kill") else fault.what.split()[0]
    )


def markdown(soak: Soak) -> str:
    """Return the report as Markdown."""
    lines = [f"# A soak of {soak.seconds / 3600:.2f} hours: {'BROKEN' if soak.broken else 'all invariants hold'}", ""]
    lines += [f"Seed {soak.seed}; everything was replaced {len(soak.replaced)} times ({soak.replacements})."]
    lines += ["", *(f"- {each}" for each in soak.broken[:SHOWN])]
    if len(soak.broken) > SHOWN:
        lines.append(f"- and {len(soak.broken) - SHOWN} more")
    lines += [
        "",
        "| calls | |",
        "|---|---:|",
        *(f"| {name} | {count:,} |" for name, count in soak.verdict.counts.items()),
    ]
    kinds = Counter(map(_kind, soak.faults))
    lines += ["", "| faults | |", "|---|---:|", *(f"| {name} | {count} |" for name, count in kinds.most_common())]
    lines += ["", "![memory, descriptors, threads, latency, database](soak.png)", "", *_processes(soak)]
    return "\n".join(lines) + "\n"


def _processes(soak: Soak) -> list[str]:
    settled = min(SETTLED_SECONDS, soak.seconds / 6)
    lines = [
        f"Memory's slope is that after the first {settled:.0f} s of a process. One of a few minutes says little: it is",
        f"judged only if the process was watched for 15 minutes after its first {SETTLED_SECONDS / 60:.0f}, and if",
        f"memory grew by more than a step of the allocators, {STEP_BYTES / MB:.1f} MB.", "",
        "| process | seconds | MB at the end | % per hour | descriptors, first to last | threads, first to last |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for each in sorted(soak.monitor.series.values(), key=lambda series: (series.name, series.usage[0].at)):
        if each.seconds < LONG_ENOUGH_SECONDS:
            continue
        first, last = each.usage[0], each.usage[-1]
        slope = each.slope(settled)
        lines.append(
            f"| {each.name} | {each.seconds:.0f} | {last.rss / MB:.1f} | {'' if slope is None else f'{slope:+.1f}'} | "
            f"{first.descriptors} → {last.descriptors} | {first.threads} → {last.threads} |"
        )
    return lines


def _plot(soak: Soak, path: Path) -> None:
    """Draw everything over the time.  Raises `ImportError` without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(6, 1, figsize=(12, 22), sharex=True)
    memory, descriptors, threads, median, tail, database = axes
    colours: dict[str, str] = {}
    for each in soak.monitor.series.values():
        label = each.name if each.name not in colours else None
        colour = colours.setdefault(each.name, f"C{len(colours) % 10}")
        minutes = [(usage.at - soak.began) / 60 for usage in each.usage]
        style = {"color": colour, "label": label, "linewidth": 1}
        memory.plot(minutes, [usage.rss / MB for usage in each.usage], **style)
        descriptors.plot(minutes, [usage.descriptors for usage in each.usage], **style)
        threads.plot(minutes, [usage.threads for usage in each.usage], **style)
    for kind in sorted({each.kind for each in soak.monitor.latencies}):
        found = [each for each in soak.monitor.latencies if each.kind == kind]
        minutes = [(each.at - soak.began) / 60 for each in found]
        median.semilogy(minutes, [each.p50 for each in found], label=kind)
        tail.semilogy(minutes, [each.p99 for each in found], label=kind)
    database.plot(*zip(*(((at - soak.began) / 60, size / MB) for at, size in soak.monitor.database), strict=True))
    titles = ("memory, MB", "descriptors", "threads", "p50 of calls, s", "p99 of calls, s", "database, MB")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, loc="left")
        for began, ended in soak.replaced:
            axis.axvspan((began - soak.began) / 60, (ended - soak.began) / 60, color="#dddddd")
    for axis in (memory, median):
        axis.legend(fontsize=7, loc="upper left", ncols=3)
    for fault in soak.faults:
        if fault.hard:
            tail.axvline((fault.at - soak.began) / 60, color="#cc0000", linewidth=0.3)
    axes[-1].set_xlabel("minutes; grey: everything is replaced; red: faults")
    drawn.tight_layout()
    drawn.savefig(path, dpi=90)
    plt.close(drawn)

"""Tables and JSON of the results.

A record is a dictionary of one of four kinds:

    {"part": "cost", "title": "What the broker costs"}
    {"part": "cost", "figure": "broker CPU per request", "base": "forwarding loop in C", "note": "…"}
    {"part": "cost", "figure": "broker CPU per request", "unit": "µs", "peer": "zmdp", "params": {"outstanding": 64},
     "rounds": [1.2, 1.3]}
    {"part": "cost", "skipped": "zmdp, pure Python", "why": "…"}

Rounds of all peers with equal part, figure and params were measured in turn, so ratios are computed per round, against
the base of that figure, a peer, in the same round.  A further record with the same part, figure, peer and params adds
rounds; None stands for a round that failed.

Besides the records, the results have `targets` (targets.py), the first table of the page.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Params = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Spread:
    """A median, with the minimum and the maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        found = [each for each in values if each is not None]
        return cls(statistics.median(found), min(found), max(found)) if found else None

    def __str__(self) -> str:
        if self.low == self.high:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}–{number(self.high)})"


@dataclass
class Row:
    """The rounds of one peer with one set of params."""

    peer: str
    params: Params
    rounds: list[float | None]
    ratio: Spread | None = None

    @property
    def value(self) -> Spread | None:
        return Spread.of(self.rounds)


@dataclass
class Figure:
    """All measurements of one quantity."""

    part: str
    name: str
    unit: str = ""
    base: str | None = None
    note: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(row.peer for row in self.rows))

    @property
    def points(self) -> list[Params]:
        """The sets of params, in the order of their first record."""
        return list(dict.fromkeys(row.params for row in self.rows))

    @property
    def varying(self) -> list[str]:
        """The params that differ between series."""
        names = dict.fromkeys(name for point in self.points for name, _ in point)
        return [name for name in names if len({dict(point).get(name) for point in self.points}) > 1]

    def row(self, peer: str, params: Params) -> Row | None:
        return next((row for row in self.rows if row.peer == peer and row.params == params), None)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: float) -> str:
    """Format a number with three significant digits."""
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value:.1e}"
    return f"{value:,.{3 if 0 < size < 0.1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def shown(value: object) -> str:
    return f"{value:,}" if is_number(value) else str(value)


def described(params: Iterable[tuple[str, Any]]) -> str:
    """Format params, e.g. as "10 idle workers, dialect X1"."""
    return ", ".join(f"{shown(value)} {name}" if is_number(value) else f"{name} {value}" for name, value in params)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def ratios(rounds: Sequence[float | None], base: Sequence[float | None]) -> Spread | None:
    """Return the ratios to the base, round by round, without rounds in which either failed."""
    return Spread.of(mine / theirs for mine, theirs in zip(rounds, base, strict=False) if mine is not None and theirs)


def figures(records: Iterable[Record]) -> list[Figure]:
    """Join and compare records."""
    found: dict[tuple[str, str], Figure] = {}
    for record in records:
        if "figure" not in record:
            continue
        figure = found.setdefault((record["part"], record["figure"]), Figure(record["part"], record["figure"]))
        if "rounds" not in record:
            figure.base = record.get("base", figure.base)
            figure.note = record.get("note", figure.note)
            figure.unit = record.get("unit", figure.unit)
            continue
        figure.unit = record.get("unit", figure.unit)
        params = tuple(record.get("params", {}).items())
        row = figure.row(record["peer"], params)
        if row is None:
            row = Row(record["peer"], params, [])
            figure.rows.append(row)
        row.rounds += record["rounds"]
    for figure in found.values():
        for row in figure.rows:
            base = None if figure.base is None else figure.row(figure.base, row.params)
            row.ratio = None if base is None else ratios(row.rounds, base.rounds)
    return [figure for figure in found.values() if figure.rows]


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(figure: Figure) -> str:
    """Return a figure as a Markdown table."""
    varying = figure.varying
    head = [*varying, "", f"{figure.unit or 'value'}, median (min–max)"]
    if figure.base is not None:
        head.append(f"× {figure.base} (min–max)")
    lines = [head, ["---" if name == "" else "---:" for name in head]]
    for point in figure.points:
        values = [shown(dict(point).get(name, "")) for name in varying]
        for peer in figure.peers:
            row = figure.row(peer, point)
            if row is None:
                continue
            cells = [*values, peer, str(row.value) if row.value else "failed"]
            if figure.base is not None:
                cells.append("" if row.ratio is None else str(row.ratio))
            lines.append(cells)
            values = ["" for _ in varying]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def constant(figure: Figure) -> str:
    """Return the params that all series of a figure share."""
    varying = figure.varying
    same = described((name, value) for name, value in figure.points[0] if name not in varying)
    return ", ".join(each for each in (same, figure.note) if each)


def markdown(results: Mapping[str, Any]) -> str:
    """Return all results as a page."""
    records = results.get("records", [])
    lines = ["# Benchmarks", "", *about(results)]
    if results.get("targets"):
        lines += ["", "## Targets", "", targets_table(results["targets"])]
    titles = {record["part"]: record["title"] for record in records if "title" in record}
    found = figures(records)
    for part in dict.fromkeys(record["part"] for record in records):
        lines += ["", f"## {titles.get(part, part)}"]
        for figure in found:
            if figure.part != part:
                continue
            lines += ["", f"### {figure.name[:1].upper()}{figure.name[1:]}", ""]
            if constant(figure):
                lines += [constant(figure) + ".", ""]
            lines.append(table(figure))
        skipped = [record for record in records if record["part"] == part and "skipped" in record]
        if skipped:
            lines += ["", "Not measured:", ""]
            lines += [f"- {record['skipped']}: {record['why']}" for record in skipped]
    return "\n".join(lines) + "\n"


def targets_table(targets: Iterable[Mapping[str, Any]]) -> str:
    """Return the targets as a Markdown table."""
    lines = ["| | target | measured, median (min–max) | reached |", "| --- | ---: | ---: | --- |"]
    for each in targets:
        reached = {True: "yes", False: "**no**", None: ""}[each.get("reached")]
        lines.append(f"| {each['name']} | {each['target']} | {each.get('measured', 'not measured')} | {reached} |")
    return "\n".join(lines)


def about(results: Mapping[str, Any]) -> list[str]:
    """Return the date, machine and versions of the run, as lines of a list."""
    machine, versions = results.get("machine", {}), results.get("versions", {})
    lines = []
    if machine:
        before, after = machine.get("load before"), machine.get("load after")
        lines.append(
            f"- {results.get('date', '')}: {machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, "
            f"load average {before} before and {after} after"
        )
    if versions:
        lines.append("- " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    lines.append(
        "- All contenders of a comparison take turns in each round. A ratio is the median of the ratios of all rounds, "
        "with the minimum and the maximum. Ratios hold on other machines, absolute numbers do not."
    )
    if results.get("interrupted"):
        lines.append("- **Interrupted**: not everything was measured.")
    return lines


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Write results.json and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (folder / "results.md").write_text(markdown(results))

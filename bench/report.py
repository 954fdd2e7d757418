"""Tables, JSON and plots of the results; `python bench/report.py results.json` recreates them from JSON.

A record is a dictionary of one of four kinds:

    {"part": "cost", "title": "What the broker costs"}
    {"part": "cost", "figure": "broker CPU per request", "base": "forwarding loop in C", "x": "outstanding",
     "note": "…"}
    {"part": "cost", "figure": "broker CPU per request", "unit": "µs", "peer": "zmdp", "params": {"outstanding": 64},
     "rounds": [1.2, 1.3]}
    {"part": "cost", "skipped": "the Guide's broker in C", "why": "…"}

Rounds of all peers with equal part, figure and params were measured in turn, so ratios are computed per round, against
the base of that figure in the same round.  The base is a peer, or a part of the params ({"idle workers": 10}): then
each peer is compared with itself.  `x` is the param on the x-axis of a plot; each combination of the others gets its
own panel.  A further record with the same part, figure, peer and params adds rounds; None stands for a round that
failed.

Besides the records, the results have `targets` (targets.py), the first table of the page.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    base: str | dict[str, Any] | None = None
    x: str | None = None
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

    @property
    def base_name(self) -> str:
        if isinstance(self.base, dict):
            return described(self.base.items())
        return self.base or ""

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.part} {self.name}".lower()).strip("-")

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


def short(value: object) -> str:
    """Format a number for the ticks of an axis: 64k, 10M."""
    if is_number(value) and value >= 10_000:
        return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k"
    return shown(value)


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
            figure.x = record.get("x", figure.x)
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
            base = _base_of(figure, row)
            row.ratio = None if base is None else ratios(row.rounds, base.rounds)
    return [figure for figure in found.values() if figure.rows]


def _base_of(figure: Figure, row: Row) -> Row | None:
    if isinstance(figure.base, dict):
        base = figure.base
        return figure.row(row.peer, tuple((name, base.get(name, value)) for name, value in row.params))
    return None if figure.base is None else figure.row(figure.base, row.params)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(figure: Figure) -> str:
    """Return a figure as a Markdown table."""
    varying = figure.varying
    head = [*varying, "", f"{figure.unit or 'value'}, median (min–max)"]
    if figure.base is not None:
        head.append(f"× {figure.base_name} (min–max)")
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


def markdown(results: Mapping[str, Any], images: Mapping[str, str] | None = None) -> str:
    """Return all results as a page; `images` maps the slugs of figures to the file names of plots."""
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
            if images and figure.slug in images:
                lines += ["", f"![{figure.name}]({images[figure.slug]})"]
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


# ── plots ────────────────────────────────────────────────────────────────────────────────────────────────────────────

OURS = {
    "zmdp": "#0072B2", "zmdp, pure Python": "#56B4E9", "zmdp, asyncio": "#0072B2", "zmdp, threads": "#56B4E9",
    "Titanic, SQLite": "#0072B2", "Titanic, PostgreSQL": "#56B4E9", "one row per request": "#0072B2",
}  # fmt: skip
OTHERS = ["#D55E00", "#009E73", "#E69F00", "#CC79A7", "#7F7F7F", "#8C510A", "#5E3C99", "#4D4D4D"]
"""After Okabe and Ito: distinguishable with any kind of colour vision; the markers differ as well."""
MARKERS = "osD^vP*X<>hp"
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
FORMATS = ("png", "svg")
Styles = Mapping[str, tuple[str, str]]


def styles(found: Sequence[Figure]) -> Styles:
    """Return a colour and a marker for each peer of a part, the same in all of its plots; the base is black."""
    peers = dict.fromkeys(peer for figure in found for peer in figure.peers)
    bases = {figure.base for figure in found if isinstance(figure.base, str)}
    others = iter(OTHERS * len(peers))
    return {
        peer: (OURS.get(peer) or ("#000000" if peer in bases else next(others)), MARKERS[at % len(MARKERS)])
        for at, peer in enumerate(peers)
    }


def plots(found: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Draw all figures into `folder`; return the names of the PNGs by slug.  Raises `ImportError` without
    matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "zmdp", "axes.spines.top": False, "axes.spines.right": False})
    images = {}
    for figure in found:
        if not any(row.value for row in figure.rows):
            continue
        look = styles([each for each in found if each.part == figure.part])
        drawn = (_lines if figure.x is not None and _long_enough(figure) else _dots)(figure, look)
        for form in FORMATS:
            drawn.savefig(folder / f"{figure.slug}.{form}", dpi=130, bbox_inches="tight", facecolor="white")
        import matplotlib.pyplot as plt

        plt.close(drawn)
        images[figure.slug] = f"{figure.slug}.png"
    return images


def _long_enough(figure: Figure) -> bool:
    return len({dict(point).get(figure.x) for point in figure.points}) > 1


def _panels(figure: Figure) -> list[Params]:
    """Return the combinations of the params other than x, each of which gets a panel."""
    return list(dict.fromkeys(tuple(each for each in point if each[0] != figure.x) for point in figure.points))


def _titled(figure: Figure, panel: Params) -> str:
    return described((name, value) for name, value in panel if name in figure.varying)


def _measured(figure: Figure) -> str:
    """Return the label of an axis: the quantity and its unit."""
    name = figure.name.split(",", maxsplit=1)[0]
    return f"{name}, {figure.unit}" if figure.unit not in {"", "1/s"} else name


def _lines(figure: Figure, look: Styles) -> Any:
    """Draw values over x and, if there is a base, the ratios below them; one column per panel."""
    import matplotlib.pyplot as plt

    panels = _panels(figure)
    steps = list(dict.fromkeys(dict(point)[figure.x] for point in figure.points))
    if all(map(is_number, steps)):
        steps.sort()
    kinds: list[tuple[str, Callable[[Row], Spread | None]]] = [(_measured(figure), lambda row: row.value)]
    if any(row.ratio for row in figure.rows):
        kinds.append((f"× {figure.base_name}", lambda row: row.ratio))
    drawn, axes = plt.subplots(
        len(kinds), len(panels), figsize=(1.5 + 5.2 * len(panels), 0.6 + 3.6 * len(kinds)), squeeze=False, sharey="row"
    )
    for down, (label, take) in enumerate(kinds):
        ends = [_draw(axis, figure, panel, steps, take, look) for axis, panel in zip(axes[down], panels, strict=True)]
        _scale(axes[down], [value for row in figure.rows if (value := take(row))])
        axes[down][0].set_ylabel(label)
        for axis, panel, here in zip(axes[down], panels, ends, strict=True):
            if down == 1:
                axis.axhline(1.0, color="#000000", linewidth=0.8, linestyle="--")
            axis.set_xticks(range(len(steps)), [short(step) for step in steps])
            axis.set_xlim(-0.25, (len(steps) - 1) * 1.75 + 0.25)
            axis.set_xlabel(figure.x if down == len(kinds) - 1 else "", loc="left")
            axis.set_title(_titled(figure, panel) if down == 0 else "", loc="left", fontsize=9)
            axis.grid(axis="y", linewidth=0.3)
            _label(drawn, axis, here)
    drawn.suptitle(_heading(figure), x=0.01, ha="left", fontsize=11)
    drawn.tight_layout()
    return drawn


def _draw(
    axis: Any, figure: Figure, panel: Params, steps: list[Any], take: Callable[[Row], Spread | None],
    look: Styles,
) -> list[tuple[float, int, str, str]]:  # fmt: skip
    """Draw a line for each peer; return where each ends, with its name and colour."""
    ends = []
    for peer in figure.peers:
        places: dict[int, Spread] = {}
        for row in figure.rows:
            rest = tuple(each for each in row.params if each[0] != figure.x)
            value = take(row) if row.peer == peer and rest == panel else None
            if value is not None:
                places[steps.index(dict(row.params)[figure.x])] = value
        if places:
            colour, marker = look[peer]
            order = sorted(places)
            values = [places[at] for at in order]
            axis.errorbar(
                order, [each.median for each in values],
                yerr=([each.median - each.low for each in values], [each.high - each.median for each in values]),
                color=colour, marker=marker, markersize=5, capsize=2, linewidth=1.4, elinewidth=0.8,
            )  # fmt: skip
            ends.append((values[-1].median, order[-1], peer, colour))
    return ends


def _heading(figure: Figure) -> str:
    text = f"{figure.name[:1].upper()}{figure.name[1:]}"
    return "\n".join([text, *constant(figure).split("; ")]).rstrip()


def _scale(axes: Iterable[Any], values: Sequence[Spread]) -> None:
    """Scale the axis from zero, or logarithmically if that would hide small values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    least, most = min(each.low for each in values), max(each.high for each in values)
    for axis in axes:
        if least > 0 and most / least > 8:
            axis.set_yscale("log")
            axis.set_ylim(least / 1.4, most * 1.4)
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.set_ylim(0, most * 1.1 or 1)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _label(drawn: Any, axis: Any, ends: Sequence[tuple[float, int, str, str]]) -> None:
    """Write each line's name at its end, moved apart if names would overlap."""
    drawn.canvas.draw()
    apart = 11 * drawn.dpi / 72
    ends = sorted(ends)
    wanted = [axis.transData.transform((place, value))[1] for value, place, _, _ in ends]
    at = list(wanted)
    for index in range(1, len(at)):
        at[index] = max(at[index], at[index - 1] + apart)
    # As far down as they went up, so that nobody's name is far from its line.
    shift = sum(there - here for there, here in zip(at, wanted, strict=True)) / max(len(at), 1)
    for (value, place, peer, colour), here, there in zip(ends, wanted, at, strict=True):
        axis.annotate(
            peer, (place, value), xytext=(10, (there - here - shift) * 72 / drawn.dpi), textcoords="offset points",
            color=colour, fontsize=8, va="center", annotation_clip=False, bbox=BEHIND,
        )  # fmt: skip


def _dots(figure: Figure, look: Styles) -> Any:
    """Draw a dot with its spread for each peer, and a panel for each set of params."""
    import matplotlib.pyplot as plt

    panels = figure.points
    peers = figure.peers
    drawn, axes = plt.subplots(
        len(panels), 1, figsize=(8.5, 0.9 + len(panels) * (0.55 + 0.27 * len(peers))), squeeze=False, sharex=True
    )
    compared = figure.base is not None and any(row.ratio for row in figure.rows)
    most = 0.0
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        here = [row for peer in peers if (row := figure.row(peer, panel)) and (row.ratio if compared else row.value)]
        for down, row in enumerate(here):
            value = row.ratio if compared else row.value
            assert value is not None
            colour, marker = look[row.peer]
            error = ([value.median - value.low], [value.high - value.median])
            axis.errorbar([value.median], [down], xerr=error, color=colour, marker=marker, markersize=6, capsize=3)
            text = f"{value}" + (f"  ·  {number(row.value.median)} {figure.unit}" if compared and row.value else "")
            axis.annotate(text, (value.high, down), xytext=(9, 0), textcoords="offset points", fontsize=8, va="center")
            most = max(most, value.high)
        axis.set_yticks(range(len(here)), [row.peer for row in here])
        axis.set_ylim(len(here) - 0.4, -0.6)
        axis.set_title(_titled(figure, panel), loc="left", fontsize=9)
        if compared:
            axis.axvline(1.0, color="#000000", linewidth=0.8, linestyle="--")
        axis.grid(axis="x", linewidth=0.3)
    values = [each for row in figure.rows if (each := row.ratio if compared else row.value)]
    least = min(each.low for each in values)
    if least > 0 and most / least > 20:
        from matplotlib.ticker import FuncFormatter

        axes[-1, 0].set_xscale("log")
        axes[-1, 0].set_xlim(least / 1.5, most * (most / least) ** 0.45)
        axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    else:
        axes[-1, 0].set_xlim(0, most * 1.5 or 1)
    axes[-1, 0].set_xlabel(f"× {figure.base_name}" if compared else _measured(figure))
    drawn.suptitle(_heading(figure), x=0.01, ha="left", fontsize=11)
    drawn.tight_layout()
    return drawn


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_text(results: Mapping[str, Any], folder: Path) -> None:
    """Write results.json, and results.md without plots, which are slow to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (folder / "results.md").write_text(markdown(results))


def write(results: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
    """Write results.json, results.md and the plots."""
    write_text(results, folder)
    try:
        images = plots(figures(results.get("records", [])), folder)
    except ImportError:
        images = {}
        tell("matplotlib is not installed (pip install matplotlib): no plots, only the table and the JSON")
    (folder / "results.md").write_text(markdown(results, images))


def main() -> None:
    """Recreate the table and the plots from a results.json."""
    source = Path(sys.argv[1])
    write(json.loads(source.read_text()), source.parent, lambda text: print(text, file=sys.stderr))


if __name__ == "__main__":
    main()

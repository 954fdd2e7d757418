"""The targets that a run should reach, compared with its figures.

A target is a quantity of one peer, or its ratio to another peer in the same round of the same figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cost
import death
import durable
import mixed
import stacks
from report import Figure, Spread, ratios

ASYNCIO, THREADS = "zmdp, asyncio", "zmdp, threads"
NATS = "NATS"
CLASSIC = "RabbitMQ, classic queue"


@dataclass(frozen=True)
class Target:
    """`limit` is the minimum or the maximum of `peer`'s figure, or of its ratio to `over` if that is given."""

    name: str
    relation: str
    """≥, > or ≤."""
    limit: float
    part: str
    figure: str
    peer: str
    over: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    every: bool = False
    """Every measurement counts, not only the median."""

    @property
    def wanted(self) -> str:
        return f"{self.relation} {self.limit:,g}"

    def measured(self, figures: Sequence[Figure]) -> Spread | None:
        """Return the measured value, or None."""
        params = tuple(self.params.items())
        figure = next((each for each in figures if (each.part, each.name) == (self.part, self.figure)), None)
        row = figure and figure.row(self.peer, params)
        if not figure or not row:
            return None
        if self.over is None:
            return row.value
        base = figure.row(self.over, params)
        return ratios(row.rounds, base.rounds) if base else None

    def reached(self, found: Spread) -> bool:
        """Return whether that reaches the target."""
        if self.relation == "≤":
            return (found.high if self.every else found.median) <= self.limit
        value = found.low if self.every else found.median
        return value > self.limit if self.relation == ">" else value >= self.limit


def targets() -> Iterator[Target]:
    """Yield all targets."""
    rate, p50 = stacks.FIGURES[0][0], stacks.FIGURES[1][0]
    for name, peer, rates, latency in (
        ("asyncio", ASYNCIO, {64: 2.5, 500: 4.8}, 0.7),
        ("threads", THREADS, {64: 2.0, 500: 3.0}, 0.75),
    ):
        for outstanding, limit in rates.items():
            yield Target(
                f"{name}, requests per second ÷ NATS, {outstanding} outstanding", "≥", limit,
                stacks.PART, rate, peer, NATS, {"outstanding": outstanding},
            )  # fmt: skip
        yield Target(
            f"{name}, p50 with one outstanding ÷ NATS", "≤", latency,
            stacks.PART, p50, peer, NATS, {"outstanding": 1},
        )  # fmt: skip
    p99 = mixed.figure(99)
    limits = {mixed.BLOCKING: {100: 0.15, 200: 0.30}, mixed.AWAITING: {100: 0.05, 200: 0.05}}
    for handlers, by_rate in limits.items():
        for per_second, limit in by_rate.items():
            yield Target(
                f"p99 of short requests among slow ones ÷ NATS, {handlers} handlers, {per_second}/s", "≤", limit,
                mixed.PART, p99, "zmdp", NATS, {"handlers": handlers, "per second": per_second},
            )  # fmt: skip
    for by, where in (("", ""), (cost.ON_ONE_CORE, ", on one core")):
        for dialect, limit in (("X1", 0.5), ("0.2", 1.25)):
            yield Target(
                f"broker CPU per request ÷ forwarding loop in C, {dialect}, 64 outstanding{where}", "≤", limit,
                cost.PART, cost.CPU + by, cost.ZMDP, cost.C, {"dialect": dialect, "outstanding": 64},
            )  # fmt: skip
    yield Target(
        "kill -9 of a busy worker until its request runs elsewhere, ms (every kill)", "≤", 50,
        death.PART, death.FIGURE, "zmdp", None, {"killed": "busy", "time": death.BUSY}, every=True,
    )  # fmt: skip
    yield Target(
        "kill -9 of an idle worker until mmi.service knows, ms (every kill)", "≤", 50,
        death.PART, death.FIGURE, "zmdp", None, {"killed": "idle", "time": death.IDLE}, every=True,
    )  # fmt: skip
    yield Target(
        "durable accepts per second ÷ RabbitMQ classic queue with confirms, 64 outstanding", ">", 1,
        durable.PART, durable.FIGURES[0][0], durable.BASE, CLASSIC, {"outstanding": 64},
    )  # fmt: skip


def judge(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return all targets with the measured values, ready for JSON."""
    rows = []
    for target in targets():
        found = target.measured(figures)
        row: dict[str, Any] = {"name": target.name, "target": target.wanted}
        if found is not None:
            row |= {"measured": str(found), "median": found.median, "reached": target.reached(found)}
        rows.append(row)
    return rows

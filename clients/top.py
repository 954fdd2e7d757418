"""The live view of a broker: what `mdclient top` shows."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """What a broker reported at one moment."""

    services: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    stats: dict[str, Any]
    moment: float

    @classmethod
    def from_answers(cls, services: Mapping[str, Any], workers: Mapping[str, Any], stats: Mapping[str, Any]) -> "View":
        """Create a view from the answers to `mmi.services`, `mmi.workers` and `mmi.stats`."""
        return cls(services["services"], workers["workers"], dict(stats), time.monotonic())


def with_rates(view: View, before: View | None) -> dict[str, Any]:
    """Return the view with rates per second since `before`, ready for JSON."""
    seconds = view.moment - before.moment if before is not None else view.stats["up_seconds"]
    counted = {row["name"]: row["dispatched"] for row in before.services} if before is not None else {}

    def rate(now: int, then: int) -> float:
        return round(max(0, now - then) / seconds, 1) if seconds > 0 else 0.0

    services = [
        {**row, "per_second": rate(row["dispatched"], counted.get(row["name"], 0) if before is not None else 0)}
        for row in sorted(view.services, key=lambda row: (-row["queued"], row["name"]))
    ]
    old = before.stats if before is not None else {}
    return {
        "services": services,
        "workers": view.workers,
        "totals": {
            **{name: view.stats[name] for name in ("up_seconds", "workers", "queued", "request_bytes", "running")},
            "requests_per_second": rate(view.stats["requests"], old.get("requests", 0)),
            "replies_per_second": rate(view.stats["replies"], old.get("replies", 0)),
            "errors_per_second": rate(view.stats["errors"], old.get("errors", 0)),
            "dropped": sum(view.stats["dropped"].values()),
            "lost_workers": sum(view.stats["lost"].values()),
        },
    }


def lines(shown: Mapping[str, Any], broker: str, height: int) -> Iterator[str]:
    """Yield the view as lines of text, at most `height` of them."""
    totals = shown["totals"]
    yield f"{broker}   up {duration(totals['up_seconds'])}"
    yield (
        f"{totals['requests_per_second']:,.1f} requests/s   {totals['replies_per_second']:,.1f} replies/s   "
        f"{totals['errors_per_second']:,.1f} errors/s   {totals['running']:,} running   {totals['queued']:,} queued   "
        f"{totals['dropped']:,} dropped   {totals['lost_workers']:,} workers lost"
    )
    yield ""
    rows = max(1, (height - 7) // 2)
    columns = {
        "SERVICE": "name",
        "WORKERS": "workers",
        "IDLE": "idle",
        "CREDIT": "credit",
        "RUNNING": "running",
        "QUEUED": "queued",
        "REQUESTS/S": "per_second",
    }
    if any(elsewhere(row) for row in shown["services"]):
        columns["ELSEWHERE"] = "elsewhere"
    services = [{**row, "elsewhere": elsewhere(row) or "-"} for row in shown["services"]]
    yield from table(services, rows, columns)
    yield ""
    workers = [
        {
            **row,
            **{key: row[key] or "-" for key in ("name", "host", "pid", "version")},  # only X1 workers report them
            "up": duration(row["up_seconds"]),
            "silent": f"{row['silent_seconds']:.1f} s",
        }
        for row in sorted(shown["workers"], key=lambda row: (row["service"], row["id"]))
    ]
    columns = {
        "WORKER": "id",
        "SERVICE": "service",
        "NAME": "name",
        "HOST": "host",
        "PID": "pid",
        "VERSION": "version",
        "PROTOCOL": "protocol",
        "CREDIT": "credit",
        "HELD": "held",
        "UP": "up",
        "SILENT": "silent",
    }
    yield from table(workers, rows, columns)


def elsewhere(service: Mapping[str, Any]) -> str:
    """Return what other brokers offer of a service, a row of `mmi.services`; an empty text if nothing."""
    if not service.get("remote_credit"):
        return ""
    offered = f"{service['remote_free']:,} of {service['remote_credit']:,} free"
    hops = service["hops"]  # 0 if the service has workers here
    return f"{offered}, {hops} hop{'s' if hops > 1 else ''}" if hops else offered


def table(rows: Sequence[Mapping[str, Any]], most: int, columns: Mapping[str, str]) -> Iterator[str]:
    """Yield the first `most` of `rows` as lines of text, below the titles of their columns."""
    shown = [[str(row[key]) for key in columns.values()] for row in rows[:most]]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    numeric = [any(isinstance(row[key], int | float) for row in rows[:most]) for key in columns.values()]
    for cells in [list(columns), *shown]:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        yield "  ".join(aligned).rstrip()
    if not rows:
        yield "none"
    elif len(rows) > most:
        yield f"… and {len(rows) - most} more"


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

"""The live view of a broker: what `mdclient top` shows (docs/how-to/operations.md documents the keys of `--json`)."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rates import Interval, service_rates


@dataclass(frozen=True, slots=True)
class BrokerView:
    """The report of a broker at one moment."""

    services: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    stats: dict[str, Any]
    moment: float
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The counters of each service; empty if the broker does not tell them."""
    bounds: Sequence[float] = ()
    """The upper bounds of the buckets in `metrics`."""

    @classmethod
    def from_answers(
        cls,
        services: Mapping[str, Any],
        workers: Mapping[str, Any],
        stats: Mapping[str, Any],
        pages: Iterable[Mapping[str, Any]] = (),
    ) -> "BrokerView":
        """Create a view from the answers to `mmi.services`, `mmi.workers`, `mmi.stats`, and pages of `mmi.metrics`."""
        counted: dict[str, dict[str, Any]] = {}
        bounds: Sequence[float] = ()
        for page in pages:
            bounds = page["bounds"]
            counted |= {row["name"]: row for row in page["services"]}
        return cls(services["services"], workers["workers"], dict(stats), time.monotonic(), counted, bounds)


def with_rates(view: BrokerView, before: BrokerView | None) -> dict[str, Any]:
    """Return the view with rates per second since `before`, ready for JSON."""
    interval = Interval(view.moment - before.moment if before is not None else view.stats["up_seconds"])
    old = before.stats if before is not None else {}
    then = {row["name"]: row for row in before.services} if before is not None else {}
    services = sorted(view.services, key=lambda row: (-row["queued"], row["name"]))
    return {
        "services": [_service(row, then.get(row["name"]), view, before, interval) for row in services],
        "processes": _processes(view.workers, before.workers if before is not None else [], interval),
        "workers": view.workers,
        "totals": {
            **{name: view.stats[name] for name in ("up_seconds", "workers", "queued", "request_bytes", "running")},
            **{
                f"{name}_per_second": interval.rate(view.stats[name], old.get(name, 0))
                for name in ("requests", "replies", "errors")
            },
            "dropped": sum(view.stats["dropped"].values()),
            "lost_workers": sum(view.stats["lost"].values()),
        },
    }


def _service(
    row: Mapping[str, Any],
    then: Mapping[str, Any] | None,
    view: BrokerView,
    before: BrokerView | None,
    interval: Interval,
) -> dict[str, Any]:
    """Return a service with its rates, and its errors and latency if the broker counts them."""
    name = row["name"]
    sent = max(0, row["dispatched"] - (then["dispatched"] if then is not None else 0))
    old = before.metrics.get(name) if before is not None else None
    return {
        **row,
        "per_second": interval.rate(sent),
        **service_rates(view.metrics.get(name), old, view.bounds, sent, interval),
    }


def _processes(
    workers: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], interval: Interval
) -> list[dict[str, Any]]:
    """Group workers by the process and the name that they report.  One that reports neither is a group by itself."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for worker in workers:
        told = (worker["host"], worker["pid"], worker["name"])
        groups.setdefault(told if worker["pid"] else (worker["id"],), []).append(worker)
    earlier = {worker["id"]: worker for worker in before}
    found = [_process(group, earlier, interval) for group in groups.values()]
    return sorted(found, key=lambda row: (row["host"], row["name"], row["pid"], row["services"], row["workers"]))


def _process(
    group: Sequence[Mapping[str, Any]], before: Mapping[Any, Mapping[str, Any]], interval: Interval
) -> dict[str, Any]:
    first = group[0]

    def changed(key: str) -> float:
        return sum(max(0.0, float(each.get(key, 0) - before.get(each["id"], {}).get(key, 0))) for each in group)

    return {
        **{key: first[key] for key in ("host", "pid", "name", "version")},
        "protocol": first["protocol"],
        "services": sorted({each["service"] for each in group}),
        "workers": len(group),
        "credit": sum(each["credit"] for each in group),
        "held": sum(each["held"] for each in group),
        "done": sum(each.get("done", 0) for each in group),
        "per_second": interval.rate(changed("done")),
        "load": interval.rate(changed("busy_seconds"), digits=2),
        "leaving": any(each.get("leaving", False) for each in group),
        "up_seconds": max(each["up_seconds"] for each in group),
        "silent_seconds": max(each["silent_seconds"] for each in group),
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
        "SERVICE": "name", "WORKERS": "workers", "IDLE": "idle", "CREDIT": "credit", "RUNNING": "running",
        "QUEUED": "queued", "REQUESTS/S": "per_second",
    }  # fmt: skip
    if any(row["errors_per_second"] is not None for row in shown["services"]):
        columns |= {"ERRORS/S": "errors", "P50": "p50", "P99": "p99", "QUEUE P99": "queue_p99"}
    if any(elsewhere(row) for row in shown["services"]):
        columns["ELSEWHERE"] = "elsewhere"
    services = [
        {
            **row,
            "errors": "-" if row["errors_per_second"] is None else row["errors_per_second"],
            "p50": milliseconds(row["worker_p50_seconds"]),
            "p99": milliseconds(row["worker_p99_seconds"]),
            "queue_p99": milliseconds(row["queue_p99_seconds"]),
            "elsewhere": elsewhere(row) or "-",
        }
        for row in shown["services"]
    ]
    yield from table(services, rows, columns, right=("ERRORS/S", "P50", "P99", "QUEUE P99"))
    yield ""
    processes = [
        {
            **row,
            **{key: row[key] or "-" for key in ("name", "host", "pid", "version")},  # only X1 workers report them
            "services": ", ".join(row["services"]),
            "up": "leaving" if row["leaving"] else duration(row["up_seconds"]),
            "silent": f"{row['silent_seconds']:.1f} s",
        }
        for row in shown["processes"]
    ]
    columns = {
        "HOST": "host", "PID": "pid", "NAME": "name", "VERSION": "version", "PROTOCOL": "protocol",
        "SERVICES": "services", "WORKERS": "workers", "CREDIT": "credit", "HELD": "held", "DONE/S": "per_second",
        "LOAD": "load", "UP": "up", "SILENT": "silent",
    }  # fmt: skip
    yield from table(processes, rows, columns)


def elsewhere(service: Mapping[str, Any]) -> str:
    """Return the capacity of a service at other brokers, from a row of `mmi.services`; empty if there is none."""
    if not service.get("remote_credit"):
        return ""
    offered = f"{service['remote_free']:,} of {service['remote_credit']:,} free"
    hops = service["hops"]  # 0 if the service has workers here
    return f"{offered}, {hops} hop{'s' if hops > 1 else ''}" if hops else offered


def table(
    rows: Sequence[Mapping[str, Any]], most: int, columns: Mapping[str, str], right: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the first `most` of `rows` as lines of text, below the titles of their columns.

    Columns with a number are aligned at the right, like those in `right`.
    """
    shown = [[str(row[key]) for key in columns.values()] for row in rows[:most]]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    numeric = [
        title in right or any(isinstance(row[key], int | float) for row in rows[:most])
        for title, key in columns.items()
    ]
    for cells in [list(columns), *shown]:
        aligned = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, numeric, strict=True)
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


def milliseconds(seconds: float | None) -> str:
    """Return a latency with its unit."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"

"""A broker's metrics for Prometheus, in its text format or as OpenMetrics (docs/how-to/operations.md)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...mdp.histogram import sum_of, times_in
from .snapshot import Snapshot

MAX_SERVICES: Final = 500
"""Services with label values of their own.  Each takes some 50 time series; the others are added up."""
OTHER: Final = "_other"
"""The label of all other services."""
_REASONS: Final = {
    "dropped": ("mdp_dropped_requests", "Requests given up, by reason.  An outcome of mdp_requests is coarser."),
    "invalid": ("mdp_invalid_messages", "Messages and records that were not a valid command, by reason."),
    "disconnected": ("mdp_refusals", "DISCONNECTs sent because of an unexpected message, by reason."),
    "lost": ("mdp_lost_workers", "Workers that were no longer there, by reason."),
    "connections": ("mdp_connection_events", "Connections that were accepted, refused or ended, by reason."),
}
"""The counts by reason in `mmi.stats`."""


class Selection:
    """Decides which services have label values of their own, among those that have had a worker.

    A service that was counted among the others stays there: their sum must never decrease.
    """

    def __init__(self, maximum: int = MAX_SERVICES) -> None:
        self._maximum = maximum
        self._named: set[str] = set()
        self._folded: set[str] = set()

    def choose(self, services: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Return the names of services that are shown by name."""
        self._named &= services.keys()
        self._folded &= services.keys()
        for name, row in services.items():
            if name in self._named or name in self._folded or not row["served"]:
                continue
            (self._named if len(self._named) < self._maximum and name != OTHER else self._folded).add(name)
        return self._named


class BrokerCollector(Collector):
    """The metrics of a snapshot."""

    def __init__(self, snapshot: Snapshot | None, named: set[str]) -> None:
        self._snapshot = snapshot
        self._named = named

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        snapshot = self._snapshot
        yield GaugeMetricFamily("mdp_up", "1 if the broker answers.", value=float(snapshot is not None))
        if snapshot is not None:
            yield from self._broker(snapshot)
            yield from self._services(snapshot)
            yield from self._roles(snapshot.roles)
            yield from self._links(snapshot.brokers["links"])

    def _broker(self, snapshot: Snapshot) -> Iterator[Metric]:
        broker, stats = snapshot.broker, snapshot.stats
        info = GaugeMetricFamily("mdp_build_info", "Version of the broker, and its name.", labels=["version", "broker"])
        info.add_metric([broker["version"], broker["broker"]], 1)
        yield info
        yield _gauge("mdp_uptime_seconds", "Time since the broker started.", broker["up_seconds"])
        yield _gauge("mdp_draining", "1 if the broker accepts no new requests.", float(broker["draining"]))
        yield _gauge("mdp_connections", "Open connections.", snapshot.connections)
        yield _gauge("mdp_request_memory_bytes", "Memory charged for outstanding requests.", stats["request_bytes"])
        yield _counter("mdp_late_replies", "Messages from workers about requests they no longer held.", stats["late"])
        yield _counter("mdp_internal_errors", "Exceptions in the broker itself.", stats["internal_errors"])
        for key, (name, text) in _REASONS.items():
            family = CounterMetricFamily(name, text, labels=["reason"])
            for reason, count in stats[key].items():
                family.add_metric([reason], count)
            yield family

    def _services(self, snapshot: Snapshot) -> Iterator[Metric]:
        label = ["service"]
        requests = CounterMetricFamily(
            "mdp_requests", "Requests that ended: ok, the code of an ERROR, or a reason.", labels=["service", "outcome"]
        )
        queue = HistogramMetricFamily(
            "mdp_request_queue_seconds", "Time in the queue, of the requests that waited.", labels=label
        )
        duration = HistogramMetricFamily(
            "mdp_request_duration_seconds", "Time at the worker, of the requests that it answered.", labels=label
        )
        depth = GaugeMetricFamily("mdp_queue_depth", "Requests that wait for a worker.", labels=label)
        held_back = GaugeMetricFamily("mdp_queue_limited", "Those of them that a limit holds back.", labels=label)
        throttled = CounterMetricFamily(
            "mdp_throttled", "Requests that could not start at once, because of a limit.", labels=label
        )
        oldest = GaugeMetricFamily("mdp_queue_oldest_seconds", "Age of the oldest request that waits.", labels=label)
        running = GaugeMetricFamily("mdp_requests_running", "Requests that workers hold.", labels=label)
        workers = GaugeMetricFamily("mdp_workers", "Workers that offer the service.", labels=["service", "state"])
        again = CounterMetricFamily("mdp_redispatches", "Requests that came back from a worker.", labels=label)
        sent = CounterMetricFamily("mdp_request_bytes", "Bytes of the bodies sent to workers.", labels=label)
        received = CounterMetricFamily("mdp_reply_bytes", "Bytes of the bodies sent to clients.", labels=label)
        named = [(name, [row]) for name, row in snapshot.services.items() if name in self._named]
        rest = [row for name, row in snapshot.services.items() if name not in self._named]
        for name, rows in [*named, (OTHER, [*rest, snapshot.others])]:
            for outcome, count in _outcomes(rows).items():
                requests.add_metric([name, outcome], count)
            if name == OTHER and not rest and not _outcomes(rows):
                continue
            for family, key in ((queue, "queue_seconds"), (duration, "worker_seconds")):
                times = sum_of(times_in(row[key]) for row in rows)
                family.add_metric([name], times.cumulative(snapshot.bounds), times.total)
            for gauge, key in ((depth, "queued"), (held_back, "held_back"), (running, "running")):
                gauge.add_metric([name], sum(row.get(key, 0) for row in rows))
            oldest.add_metric([name], max(row.get("oldest_seconds", 0.0) for row in rows))
            idle = sum(row.get("idle", 0) for row in rows)
            workers.add_metric([name, "idle"], idle)
            workers.add_metric([name, "busy"], sum(row.get("workers", 0) for row in rows) - idle)
            for counter, key in (
                (again, "redispatched"), (throttled, "throttled"), (sent, "request_bytes"), (received, "reply_bytes")
            ):  # fmt: skip
                counter.add_metric([name], sum(row[key] for row in rows))
        yield from (
            requests, queue, duration, depth, held_back, oldest, running, workers, again, throttled, sent, received
        )  # fmt: skip

    def _roles(self, roles: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        accepted = CounterMetricFamily("mdp_role_requests", "Requests accepted from a role.", labels=["role"])
        failed = CounterMetricFamily("mdp_role_failures", "Requests of a role that did not succeed.", labels=["role"])
        outstanding = GaugeMetricFamily("mdp_role_outstanding", "Requests that have not ended.", labels=["role"])
        memory = GaugeMetricFamily("mdp_role_memory_bytes", "Memory charged for these.", labels=["role"])
        for role in roles:
            for family, key in (
                (accepted, "accepted"), (failed, "failed"), (outstanding, "outstanding"), (memory, "request_bytes")
            ):  # fmt: skip
                family.add_metric([role["name"]], role[key])
        yield from (accepted, failed, outstanding, memory)

    def _links(self, links: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        labels = ["broker", "kind"]
        up = GaugeMetricFamily("mdp_link_up", "1 if the link works.", labels=labels)
        outstanding = GaugeMetricFamily("mdp_link_outstanding", "Requests that are there.", labels=labels)
        sent = CounterMetricFamily("mdp_link_sent", "Requests passed on over the link.", labels=labels)
        received = CounterMetricFamily("mdp_link_received", "Requests that came over it.", labels=labels)
        found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for link in links:  # a second link to the same broker may stand by
            found.setdefault((link["broker"] or link["endpoint"], link["kind"]), []).append(link)
        for names, same in found.items():
            up.add_metric([*names], float(any(link["state"] in {"up", "standby"} for link in same)))
            outstanding.add_metric([*names], sum(link["outstanding_there"] for link in same))
            sent.add_metric([*names], sum(link["sent"] for link in same))
            received.add_metric([*names], sum(link["received"] for link in same))
        yield from (up, outstanding, sent, received)


def _outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for outcome, count in row["outcomes"].items():
            total[outcome] = total.get(outcome, 0) + count
    return total


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)

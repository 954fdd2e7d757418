"""Titanic's metrics for Prometheus (docs/how-to/operations.md)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ....mdp.histogram import Histogram
from ....version import __version__
from ...db.store.models import STATES


class TitanicCollector(Collector):
    """The metrics of one Titanic, and of its database unless that cannot be read."""

    def __init__(self, counted: Mapping[str, Any], stats: Mapping[str, Any] | None) -> None:
        self._counted = counted
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        counted = self._counted
        info = GaugeMetricFamily("titanic_build_info", "Version of this Titanic.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield _gauge("titanic_uptime_seconds", "Time since this Titanic started.", counted["up_seconds"])
        yield from self._database()
        yield _counter("titanic_accepted", "Requests that were stored.", counted["accepted"])
        yield _counter("titanic_repeated", "Requests whose key was known.", counted["repeated"])
        yield _labelled("titanic_rejected", "Requests that were not stored.", "reason", counted["rejected"])
        yield _counter("titanic_attempts", "Requests sent to their services, each time.", counted["attempts"])
        yield _counter("titanic_retries", "Attempts after which a request waits for another.", counted["retries"])
        yield _counter("titanic_lost_workers", "Workers lost while they handled a request.", counted["deaths"])
        yield _labelled("titanic_finished", "Requests that ended: ok, or the code.", "outcome", counted["finished"])
        yield _gauge("titanic_broker_up", "1 if the broker tells which services it has.", float(counted["broker"]))
        yield _gauge("titanic_services", "Services that have workers.", counted["services"])
        yield _gauge("titanic_claimed", "Requests that this Titanic has claimed.", counted["claimed"])
        yield _gauge("titanic_in_flight", "Those of them that are at the broker.", counted["in_flight"])
        yield _gauge("titanic_unstored", "Outcomes that wait to be stored.", counted["unstored"])
        yield from _commits(counted["commits"])

    def _database(self) -> Iterator[Metric]:
        stats = self._stats
        yield _gauge("titanic_database_up", "1 if the database can be read.", float(stats is not None))
        if stats is not None:
            states = GaugeMetricFamily("titanic_requests", "Requests in the database.", labels=["state"])
            for state in STATES:
                states.add_metric([state], stats["total"][state])
            yield states
            yield _gauge(
                "titanic_oldest_pending_seconds",
                "For how long a pending request could have run already.",
                stats["total"]["oldest_pending_seconds"] or 0.0,
            )
            yield _gauge("titanic_instances", "Titanics that run requests of this database.", stats["titanics"])


def _commits(commits: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    seconds = HistogramMetricFamily("titanic_commit_seconds", "Duration of a transaction.", labels=["thread"])
    items = HistogramMetricFamily(
        "titanic_commit_items", "Requests, outcomes and other items in a transaction.", labels=["thread"]
    )
    failures = CounterMetricFamily("titanic_commit_failures", "Transactions that failed.", labels=["thread"])
    for thread, counts in commits.items():
        for family, key in ((seconds, "seconds"), (items, "items")):
            found = counts[key]
            family.add_metric([thread], Histogram(found["buckets"]).cumulative(found["bounds"]), found["sum"])
        failures.add_metric([thread], counts["failures"])
    yield from (seconds, items, failures)


def _labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)

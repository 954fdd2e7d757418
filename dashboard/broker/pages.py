"""The pages, metrics and health of a broker."""

import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.registry import Collector

from ...clients.command.stubs import types
from ...mdp.histogram import times_in
from ...mdp.program.control_services import SPARK
from ...mdp.service_limits import ServiceLimits
from ...mdp.services import About, Description
from ...mdp.services.submission import show_defaults
from ..shell.charts import bars, chart
from ..shell.formats import link, seconds
from ..shell.paging import Column, Table, table
from ..shell.shell import Action, NotFoundError, Page, Section, View
from .exposition import BrokerCollector, Selection
from .lists import Listing, Lists
from .observer import Observer, Unavailable
from .snapshot import NOTHING, Change, Snapshot, change, change_of, levels_of, point_between

FRESH_SECONDS: Final = 2.0
"""Seconds for which an answer of the broker proves that its loop runs."""
DEAD_SECONDS: Final = 30.0
"""A broker that has not answered for this long is reported as dead."""
BUSIEST: Final = 8
"""Services on the overview."""
RECENT: Final = 10
"""Failures on a page."""
_NO_SERVICE: Final[Mapping[str, Any]] = {
    "workers": 0, "idle": 0, "running": 0, "queued": 0, "held_back": 0, "oldest_seconds": 0.0, "rate": 0.0,
    "errors": 0.0, "p50": None, "p99": None, "elsewhere": 0, "hops": None,
}  # fmt: skip
"""The row of a service that only other brokers offer."""
_FAR: Final = float("inf")


@dataclass(frozen=True)
class Described:
    """One description of a service, as its page shows it."""

    about: About
    types: str
    submission: str


class BrokerSection:
    """The section of the broker that an observer asks."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lists = Lists(observer)
        self._selection = Selection()
        self._changes: tuple[Snapshot | None, dict[str, Change]] = (None, {})
        self._started = time.monotonic()

    def section(self) -> Section:
        """Return what to mount in a shell."""
        return Section(
            pages=[
                Page("/", "overview.html", self._overview, "Overview", "o"),
                Page("/services", "services.html", self._services, "Services", "s"),
                Page("/service", "service.html", self._service, part_of="/services"),
                Page("/workers", "workers.html", self._workers, "Workers", "w"),
                Page("/requests", "requests.html", self._requests, "Requests", "r"),
                Page("/brokers", "brokers.html", self._brokers, "Brokers", "b"),
            ],
            actions=[Action("/requests/cancel", self._cancel)],
            collectors=self._collectors,
            version=lambda: self._observer.generation,
            troubles=self._troubles,
            is_alive=self._is_alive,
            until_changed=self._observer.until_changed,
        )

    def name(self) -> str:
        """Return the name of the broker."""
        snapshot = self._observer.latest
        return str(snapshot.broker["broker"]) if snapshot is not None else "broker"

    # ── metrics and health ───────────────────────────────────────────────────────────────────────────────────────────

    def _collectors(self) -> Sequence[Collector]:
        snapshot = None if self._observer.trouble else self._observer.latest
        named = self._selection.choose(snapshot.services) if snapshot is not None else set()
        return [BrokerCollector(snapshot, named)]

    async def _troubles(self) -> list[str]:
        """Return why the broker is not ready.  An answer proves that it listens and that its loop runs."""
        observer = self._observer
        latest, answered = observer.latest, observer.last_answer
        if observer.trouble or latest is None or answered is None or time.monotonic() - answered > FRESH_SECONDS:
            try:
                broker = await observer.ask("mmi.broker")
            except Unavailable as error:
                return [str(error)]
        else:
            broker = latest.broker
        return ["the broker is draining: it accepts no new requests"] if broker["draining"] else []

    async def _is_alive(self) -> bool:
        if time.monotonic() - (self._observer.last_answer or self._started) < DEAD_SECONDS:
            return True
        with suppress(Unavailable):  # this process may have been held up, and so not have asked
            await self._observer.now("mmi.broker")
            return True
        return False

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _overview(self, view: View) -> Mapping[str, Any]:
        observer = self._observer
        latest, earlier = observer.latest, observer.earlier
        if latest is None or earlier is None:
            return {"trouble": observer.trouble, "latest": None}
        now, points = change(earlier, latest), list(observer.history.points)
        at, step = latest.at, observer.history.step
        p50, p99 = (now.at_worker.quantile(share, latest.bounds) for share in (0.5, 0.99))
        points.append(point_between(earlier, latest, levels_of(latest)))
        charts = [
            chart("Requests per second", points, [("rate", "", lambda each: each.rate)], now=at, step=step),
            chart(
                "Time at the worker", points,
                [("p99", "p99", lambda each: each.p99), ("p50", "p50", lambda each: each.p50)],
                now=at, step=step, show=seconds, current=f"p99 {seconds(p99)}",
            ),
            chart(
                "Requests that wait", points, [("queue", "", lambda each: each.queued)], now=at, step=step,
            ),
            chart("Errors per second", points, [("errors", "", lambda each: each.errors)], now=at, step=step),
        ]  # fmt: skip
        rows = [row for row in self._rows(latest) if not row["name"].startswith(SPARK)]
        return {
            "trouble": observer.trouble, "latest": latest, "now": now, "p50": p50, "p99": p99, "charts": charts,
            "busiest": sorted((row for row in rows if row["rate"]), key=lambda row: -row["rate"])[:BUSIEST],
            "failures": await self._failures() if view.visitor.act else [],
            "attention": sorted(filter(_needs_attention, rows), key=lambda row: -row["oldest_seconds"])[:BUSIEST],
            "outcomes": sorted(latest.outcomes.items(), key=lambda pair: -pair[1]),
            "has_workers": any(row["workers"] for row in rows),
        }  # fmt: skip

    async def _services(self, view: View) -> Mapping[str, Any]:
        latest, elsewhere = self._observer.latest, await self._elsewhere()
        columns = [
            Column.text("name", "Service", lambda row: row["name"].casefold()),
            Column("workers", "Workers", lambda row: row["workers"]),
            Column("elsewhere", "Elsewhere", lambda row: row["elsewhere"]),
            Column("running", "Running", lambda row: row["running"]),
            Column("queued", "Waiting", lambda row: row["queued"]),
            Column("oldest", "Oldest", lambda row: row["oldest_seconds"]),
            Column("rate", "Per second", lambda row: row["rate"]),
            Column("errors", "Errors", lambda row: row["errors"]),
            Column("p50", "p50", lambda row: _or(row["p50"])),
            Column("p99", "p99", lambda row: _or(row["p99"])),
        ]
        rows = {row["name"]: row for row in self._rows(latest)} if latest is not None else {}
        every = [{**_NO_SERVICE, "name": name, **rows.get(name, {}), **elsewhere.get(name, {})}
                 for name in rows.keys() | elsewhere.keys()]  # fmt: skip
        users = [row for row in every if not row["name"].startswith(SPARK)]
        control = sorted((row for row in every if row["name"].startswith(SPARK)), key=lambda row: row["name"])
        found = table(users, columns, view.path, view.query, text=lambda row: str(row["name"]), default="name")
        return {"trouble": self._observer.trouble, "table": found, "control": control}

    async def _elsewhere(self) -> dict[str, Mapping[str, Any]]:
        """Return how many requests the workers of linked brokers can take, and how far away they are, by service."""
        latest = self._observer.latest
        if latest is None or not latest.brokers["links"]:
            return {}
        with suppress(Unavailable):
            rows = (await self._observer.ask("mmi.services"))["services"]
            return {
                row["name"]: {"elsewhere": row["remote_credit"], "hops": row["hops"]}
                for row in rows
                if row["remote_credit"]
            }
        return {}

    async def _service(self, view: View) -> Mapping[str, Any]:
        name = view.query.get("name", "")
        observer = self._observer
        latest, earlier = observer.latest, observer.earlier
        row = latest.services.get(name) if latest is not None else None
        elsewhere = (await self._elsewhere()).get(name, {})
        if row is None and elsewhere:  # this broker has counted nothing yet
            row = {**NOTHING, "name": name}
        if latest is None or earlier is None or row is None:
            raise NotFoundError(f"The broker knows no service {name!r}. Perhaps its last worker has left.")
        now = change_of(earlier, latest, name)
        all_times, in_queue = times_in(row["worker_seconds"]), times_in(row["queue_seconds"])
        body = _as_bytes(name)
        requests, trouble = await _told(self._lists.requests(body))
        workers, _ = await _told(self._lists.workers(body))
        described = await self._described(name)
        return {
            "trouble": observer.trouble, "row": row, "now": now, "described": described,
            "p50": now.at_worker.quantile(0.5, latest.bounds), "p99": now.at_worker.quantile(0.99, latest.bounds),
            "all": all_times, "bars": bars(all_times, latest.bounds), "queue_bars": bars(in_queue, latest.bounds),
            "all_p50": all_times.quantile(0.5, latest.bounds), "all_p99": all_times.quantile(0.99, latest.bounds),
            "in_queue": in_queue, "queue_p99": in_queue.quantile(0.99, latest.bounds),
            "outcomes": sorted(row["outcomes"].items(), key=lambda pair: -pair[1]),
            "failures": await self._failures(name) if view.visitor.act else [],
            "limits": str(ServiceLimits.read(row["limits"])) if row["limits"] else "",
            "groups": await self._groups(body) if view.visitor.act else [],
            "workers": self._worker_table(workers, view, paged=False),
            "requests": self._request_table(requests, view, paged=False), "no_requests": trouble, "cancelled": "",
            "elsewhere": elsewhere,
        }  # fmt: skip

    async def _described(self, service: str) -> list[Described]:
        """Return how workers describe a service; the description that most of them give comes first."""
        try:
            answer = await self._observer.ask("mmi.describe", service.encode(errors="replace"))
        except Unavailable:
            return []
        abouts = [About.read(each["about"], each["workers"]) for each in answer["abouts"]] if answer != 404 else []
        return [
            Described(each, types(Description(service, each.workers, (each,))), show_defaults(each.submission))
            for each in abouts
        ]

    async def _failures(self, service: str = "") -> list[Mapping[str, Any]]:
        """Return the latest failed requests of one service, or of all services but Spark's own."""
        with suppress(Unavailable):
            rows = (await self._observer.ask("mmi.failures"))["failures"]
            if service:
                return [row for row in rows if row["service"] == service][:RECENT]
            return [row for row in rows if not row["service"].startswith(SPARK)][:RECENT]
        return []

    async def _groups(self, service: bytes) -> list[Mapping[str, Any]]:
        """Return the groups of a service with the most requests that wait."""
        with suppress(Unavailable):
            groups: list[Mapping[str, Any]] = (await self._observer.ask("mmi.limit", service))["groups"]
            return [] if [each["group"] for each in groups] == [""] else groups
        return []

    async def _workers(self, view: View) -> Mapping[str, Any]:
        workers, trouble = await _told(self._lists.workers(_as_bytes(view.service)))
        found = self._worker_table(workers, view)
        return {"trouble": self._observer.trouble or trouble, "table": found}

    async def _requests(self, view: View) -> Mapping[str, Any]:
        requests, trouble = await _told(self._lists.requests(_as_bytes(view.service)))
        return {
            "trouble": self._observer.trouble, "no_requests": trouble, "table": self._request_table(requests, view),
            "cancelled": view.query.get("cancelled", ""),
        }  # fmt: skip

    async def _brokers(self, view: View) -> Mapping[str, Any]:
        del view
        latest, earlier = self._observer.latest, self._observer.earlier
        if latest is None or earlier is None:
            return {"trouble": self._observer.trouble, "brokers": None}
        before = {_link_key(each): each for each in earlier.brokers["links"]}
        spent = latest.at - earlier.at
        links = [
            {
                **each,
                **{
                    f"{way}_rate": max(each[way] - before.get(_link_key(each), each)[way], 0) / spent if spent else 0.0
                    for way in ("sent", "received")
                },
            }
            for each in latest.brokers["links"]
        ]
        return {
            "trouble": self._observer.trouble, "brokers": latest.brokers, "links": links, "latest": latest,
        }  # fmt: skip

    async def _cancel(self, fields: Mapping[str, str]) -> str:
        number = fields.get("id", "")
        try:
            answer = await self._observer.now("mmi.cancel", number.encode())
            outcome = "yes" if isinstance(answer, dict) and answer.get("cancelled") else "no"
        except Unavailable:
            outcome = "unavailable"
        self._observer.refresh()
        self._lists.refresh()
        return link("/requests", service=fields.get("service", ""), cancelled=outcome)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rows(self, latest: Snapshot) -> list[dict[str, Any]]:
        """Return a row for each service, with its recent rates and times."""
        earlier = self._observer.earlier
        if self._changes[0] is not latest:
            changes = {name: change_of(earlier, latest, name) for name in latest.services} if earlier else {}
            self._changes = latest, changes
        changes = self._changes[1]
        return [
            {
                **row,
                "rate": changes[name].rate,
                "errors": changes[name].error_rate,
                "p50": changes[name].at_worker.quantile(0.5, latest.bounds),
                "p99": changes[name].at_worker.quantile(0.99, latest.bounds),
            }
            for name, row in latest.services.items()
        ]

    def _worker_table(self, workers: Listing, view: View, *, paged: bool = True) -> Table:
        columns = [
            Column.text("host", "Host", lambda row: (row["host"], row["pid"])),
            Column("pid", "PID", lambda row: row["pid"]),
            Column.text("name", "Name", lambda row: row["name"]),
            Column.text("service", "Service", lambda row: row["service"]),
            Column.text("state", "State", _state),
            Column("held", "Holds", lambda row: row["held"]),
            Column("done", "Done", lambda row: row["done"]),
            Column("average", "Average", _average),
            Column("up", "Connected", lambda row: row["up_seconds"]),
            Column.text("protocol", "Protocol", lambda row: row["protocol"]),
        ]
        return table(
            workers.rows, columns, view.path, view.query if paged else _without_search(view.query), default="host",
            text=lambda row: f"{row['host']} {row['pid']} {row['name']} {row['service']}", more=workers.more,
            shown=lambda row: {**row, "state": _state(row), "average": _average(row)},
        )  # fmt: skip

    def _request_table(self, requests: Listing, view: View, *, paged: bool = True) -> Table:
        columns = [
            Column("age", "Age", lambda row: row["age_seconds"]),
            Column.text("service", "Service", lambda row: row["service"]),
            Column.text("state", "State", lambda row: row["state"]),
            Column("since", "In that state", lambda row: row["state_seconds"]),
            Column.text("caller", "Caller", _caller),
            Column("worker", "Worker", _at, number=False),
            Column("attempts", "Attempts", lambda row: row["attempts"]),
            Column("ttl", "Time left", lambda row: _FAR if row["ttl_seconds"] is None else row["ttl_seconds"]),
            Column("bytes", "Size", lambda row: row["bytes"]),
            Column("id", "Request", number=False),
        ]
        return table(
            requests.rows, columns, view.path, view.query if paged else _without_search(view.query), default="-age",
            text=lambda row: " ".join(
                (row["service"], _caller(row), row["group"], row["id"], row["request_id"] or "", row["state"])
            ),
            more=requests.more, shown=lambda row: {**row, "caller": _caller(row), "at": _at(row)},
        )  # fmt: skip


async def _told(asked: Awaitable[Listing]) -> tuple[Listing, str]:
    """Return a list of the broker's, or an empty one and the reason."""
    try:
        return await asked, ""
    except Unavailable as error:
        return Listing(), str(error)


def _needs_attention(row: Mapping[str, Any]) -> bool:
    return bool(row["errors"] or (row["queued"] and (not row["workers"] or row["oldest_seconds"] > 1)))


def _or(value: float | None) -> float:
    return -1.0 if value is None else value


def _state(row: Mapping[str, Any]) -> str:
    return "leaving" if row["leaving"] else "busy" if row["busy"] else "idle"


def _average(row: Mapping[str, Any]) -> float:
    """Return how many requests a worker has held on average."""
    return float(row["busy_seconds"] / row["up_seconds"]) if row["up_seconds"] else 0.0


def _caller(row: Mapping[str, Any]) -> str:
    return f"{row['role']} {row['client']}".strip()


def _at(row: Mapping[str, Any]) -> str:
    """Return where a request is: at a worker, at another broker, or nowhere."""
    if row["broker"]:
        return f"broker {row['broker']}"
    return "" if row["worker"] is None else f"worker {row['worker']}"


def _link_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["broker"], row["kind"], row["endpoint"]


def _without_search(query: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in query.items() if name not in {"q", "page", "sort"}}


def _as_bytes(name: str) -> bytes:
    """Return a service's name as the broker has it; it has only printable ones."""
    return name.encode(errors="replace")

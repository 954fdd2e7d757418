"""The pages, metrics and health of a Titanic."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prometheus_client.registry import Collector

from ....dashboard.shell.charts import bars
from ....dashboard.shell.formats import link, number, seconds
from ....dashboard.shell.paging import Column, Table, table
from ....dashboard.shell.shell import Action, NotFoundError, Page, Section, View
from ....mdp.histogram import Histogram
from ...api.frames import unpack
from ...api.options import read_uuid
from ...db.store.models import NOT_ENDED, STATES
from .. import admin
from .collector import TitanicCollector
from .database import MAX_PARTS, AdminDatabase, DatabaseError
from .history import Look, charts, new_history

INTERVAL_SECONDS: Final = 1.0
"""How often it looks."""
RECENT_LOOKS: Final = 10
"""Rates are those of so many intervals."""
DEAD_SECONDS: Final = 30.0
"""A Titanic whose event loop has not turned for so long does not live."""
TURN_SECONDS: Final = 5.0
"""How long it may take to turn once more, before that is said."""
MAX_SHOWN: Final = 4000
"""Characters of a body that are shown."""

Snapshot = Callable[[], dict[str, Any]]


class TitanicSection:
    """The section of a Titanic.

    Args:
        snapshot: Returns what the Titanic counts (`Server.snapshot`).
        turn: Returns once the Titanic's event loop has turned.
        database: Its database.
    """

    def __init__(self, snapshot: Snapshot, turn: Callable[[], Awaitable[None]], database: AdminDatabase) -> None:
        self._snapshot = snapshot
        self._turn = turn
        self._database = database
        self._looks = [Look(time.monotonic(), snapshot())]
        self._history = new_history()
        self._stats: Mapping[str, Any] | None = None
        self._trouble = "the database has not been read yet"
        self._turned_at = time.monotonic()
        self._generation = 0
        self._changed = asyncio.Event()
        """Set, and replaced by another, whenever there is something new."""

    def section(self) -> Section:
        """Return what to mount in a shell."""
        return Section(
            pages=[
                Page("/", "titanic-overview.html", self._overview, "Overview", "o"),
                Page("/requests", "titanic-requests.html", self._requests, "Requests", "r"),
                Page("/request", "titanic-request.html", self._request, part_of="/requests"),
            ],
            actions=[
                Action("/request/retry", self._retry),
                Action("/request/cancel", self._cancel),
                Action("/requests/retry", self._retry_all),
            ],
            templates=Path(__file__).parent / "templates",
            collectors=self._collectors,
            version=lambda: self._generation,
            troubles=self._troubles,
            is_alive=self._is_alive,
            until_changed=self._until_changed,
        )

    async def run(self) -> None:
        """Look at the Titanic and its database until cancelled."""
        turning: asyncio.Future[None] | None = None
        while True:
            if turning is None or turning.done():
                turning = asyncio.ensure_future(self._note_turn())
            at, counted = time.monotonic(), self._snapshot()
            try:
                self._stats, self._trouble = await self._database.stats(), ""
            except DatabaseError as error:
                self._stats, self._trouble = None, str(error)
            self._looks = [*self._looks[-RECENT_LOOKS:], Look(at, counted, self._stats)]
            self._history.add(self._looks[-1])
            self._refresh()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _note_turn(self) -> None:
        await self._turn()
        self._turned_at = time.monotonic()

    def _refresh(self) -> None:
        self._generation += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_changed(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    # ── metrics and health ───────────────────────────────────────────────────────────────────────────────────────────

    def _collectors(self) -> Sequence[Collector]:
        return [TitanicCollector(self._snapshot(), self._stats)]

    async def _troubles(self) -> list[str]:
        found = []
        snapshot = self._snapshot()
        if snapshot["stopping"]:
            found.append("Titanic is shutting down")
        if not snapshot["broker"]:
            found.append("the broker does not answer: no request is executed")
        try:
            await self._database.stats()
        except DatabaseError as error:
            found.append(f"the database cannot be read: {error}")
        return found

    async def _is_alive(self) -> bool:
        if time.monotonic() - self._turned_at >= DEAD_SECONDS:
            # Perhaps it was this thread that was held up, or that waits for the database.
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS):
                    await self._note_turn()
        return time.monotonic() - self._turned_at < DEAD_SECONDS

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _overview(self, view: View) -> Mapping[str, Any]:
        del view
        earlier, latest = self._looks[0], self._looks[-1]
        counted, spent = latest.counted, latest.at - earlier.at

        def rate(key: str) -> float:
            return max(_total(counted[key]) - _total(earlier.counted[key]), 0) / spent if spent else 0.0

        writer = counted["commits"]["writer"]
        times, items = (Histogram(writer[key]["buckets"], writer[key]["sum"]) for key in ("seconds", "items"))
        bounds = writer["seconds"]["bounds"]
        services = self._stats["services"] if self._stats is not None else {}
        rows = [{"name": name, **row} for name, row in services.items()]
        rows.sort(key=lambda row: (-row["failed"], -row["pending"], row["name"]))
        return {
            "trouble": self._trouble, "counted": counted, "stats": self._stats,
            "charts": charts(self._history, earlier, latest),
            "rates": {key: rate(key) for key in ("accepted", "attempts", "finished", "retries")},
            "bars": bars(times, bounds), "p50": times.quantile(0.5, bounds), "p99": times.quantile(0.99, bounds),
            "times": times, "mean_items": items.total / items.count if items.count else None,
            "outcomes": sorted(counted["finished"].items(), key=lambda pair: -pair[1]),
            "rejected": sorted(counted["rejected"].items()), "services": rows[:MAX_PARTS],
            "more_services": len(rows) - MAX_PARTS,
        }  # fmt: skip

    async def _requests(self, view: View) -> Mapping[str, Any]:
        state = view.query.get("state", "")
        text = view.query.get("q", "").strip()
        service = view.query.get("service", "")
        which = admin.Filter((state,) if state in STATES else STATES, service or None)
        trouble = ""
        try:
            rows, more = await self._database.search(which, text)
        except DatabaseError as error:
            rows, more, trouble = [], False, str(error)
        now = time.time()
        rows = [{**row, "age": now - row["created"], "note": admin.note(row, now, seconds)} for row in rows]
        return {
            "trouble": trouble, "table": _table(rows, view), "more": more, "service": service, "state": state,
            "states": STATES, "done": view.query.get("done", ""),
        }  # fmt: skip

    async def _request(self, view: View) -> Mapping[str, Any]:
        uuid = read_uuid(view.query.get("uuid", "").strip())
        try:
            row, parts_count = await self._database.show(uuid) if uuid is not None else (None, 0)
        except DatabaseError as error:
            return {"trouble": str(error), "row": None}
        if row is None:
            raise NotFoundError("Titanic has no request with this UUID. Perhaps it was closed, or has expired.")
        now = time.time()
        # Others may look at what happens, but what a request says is for its owner and for admins.
        contents = _contents(row, parts_count) if view.visitor.act else None
        return {
            "trouble": "", "row": row, "contents": contents, "parts_count": parts_count,
            "age": now - row["created"], "note": admin.note(row, now, seconds), "done": view.query.get("done", ""),
            "attempts": _attempts(row, now),
            "times": [(name, _moment(row[key])) for name, key in _TIMES if row[key] is not None],
            "can_retry": row["state"] == "failed", "can_cancel": row["state"] in NOT_ENDED,
        }  # fmt: skip

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _retry(self, fields: Mapping[str, str]) -> str:
        return await self._act(fields, self._database.retry)

    async def _cancel(self, fields: Mapping[str, str]) -> str:
        return await self._act(fields, self._database.cancel)

    async def _act(self, fields: Mapping[str, str], change: Callable[[Sequence[UUID]], Awaitable[int]]) -> str:
        uuid = read_uuid(fields.get("uuid", "").strip())
        try:
            changed = await change([uuid]) if uuid is not None else 0
            done = "yes" if changed else "no"
        except DatabaseError:
            done = "unavailable"
        self._refresh()
        return link("/request", uuid=uuid.hex if uuid is not None else "", done=done)

    async def _retry_all(self, fields: Mapping[str, str]) -> str:
        service = fields.get("service", "")
        try:
            done = f"{await self._database.retry_all(service or None)}"
        except DatabaseError:
            done = "unavailable"
        self._refresh()
        return link("/requests", state="failed", service=service, done=done)


_TIMES: Final = (
    ("Submitted", "created"), ("Due", "due"), ("Last attempt", "started"), ("Ended", "finished"),
    ("Deleted", "expires"),
)  # fmt: skip


def _attempts(row: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """Return what the database knows of the attempts of a request: it keeps the latest one."""
    found = [("Attempts", number(row["attempts"]))]
    if row["started"] is not None:
        latest = f"began {_moment(row['started'])}"
        if row["state"] == "running":
            latest += f", {seconds(now - row['started'])} ago, at Titanic {row['holder']}"
        elif row["finished"] is not None and row["finished"] >= row["started"]:
            latest += f", ended {seconds(row['finished'] - row['started'])} later"
        found.append(("Latest", latest))
    if row["failures"] or row["retries"]:
        found.append(("Failed in the handler", f"{number(row['failures'])}; {number(row['retries'])} are retried"))
    if row["deaths"]:
        found.append(("Lost with a worker", number(row["deaths"])))
    if row["error"]:
        code = "" if row["code"] is None else f"{row['code']}: "
        found.append(("Last error", f"{code}{row['error']}"))
    if row["state"] == "delayed" and row["attempts"]:
        found.append(("Next", f"in {seconds(max(row['due'] - now, 0.0))}, {_moment(row['due'])}"))
    return found


def _total(count: Any) -> float:
    return float(sum(count.values()) if isinstance(count, dict) else count)


def _moment(value: float) -> str:
    return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")


def _table(rows: Sequence[Mapping[str, Any]], view: View) -> Table:
    columns = [
        Column("age", "Age", lambda row: row["age"], descending=False),
        Column.text("service", "Service", lambda row: row["service"]),
        Column.text("state", "State", lambda row: row["state"]),
        Column.text("owner", "Owner", lambda row: row["owner"]),
        Column("priority", "Priority", lambda row: row["priority"]),
        Column("attempts", "Attempts", lambda row: row["attempts"]),
        Column("uuid", "UUID", number=False),
        Column("note", "Note", number=False),
    ]
    # The database has searched already, in whole texts.
    unsearched = {name: value for name, value in view.query.items() if name != "q"}
    found = table(rows, columns, view.path, unsearched, text=str, default="age")
    return Table(
        found.path, view.query, found.rows, found.headings, found.total, found.matching, found.page, found.pages,
        view.query.get("q", "").strip(),
    )  # fmt: skip


def _contents(row: Mapping[str, Any], parts_count: int) -> list[tuple[str, str]]:
    """Return what a request and its replies say, with a title for each frame."""
    found = [("Header", f"{name}: {value}") for name, value in json.loads(row["headers"] or "{}").items()]
    for title, packed in (
        ("Body", row["body"]),
        *((f"PARTIAL {at}", part) for at, part in enumerate(row["partials"])),
        ("Reply" if row["state"] == "done" else "Detail", row["reply"]),
    ):
        if packed is not None:
            found += [(title, _shown(frame)) for frame in unpack(packed)]
    if (more := parts_count - len(row["partials"])) > 0:
        found.append(("PARTIALs", f"{number(more)} more: titanic show {row['uuid']}"))
    return found


def _shown(frame: bytes) -> str:
    """Return a frame as text; bytes that are not text are shown in hex."""
    text = frame[: 4 * MAX_SHOWN].decode(errors="replace")
    if "\N{REPLACEMENT CHARACTER}" in (text if len(frame) <= 4 * MAX_SHOWN else text[:-1]):
        text = frame[: MAX_SHOWN // 2].hex(" ")
    if len(text) > MAX_SHOWN or len(frame) > 4 * MAX_SHOWN:
        return f"{text[:MAX_SHOWN]}… ({number(len(frame))} bytes)"
    return text

"""Long lists that the broker returns in pages: shared by all visitors, and fetched at a bounded rate."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from .observer import MAX_INTERVAL_SECONDS, SHARE, Observer, Unavailable

MAX_LISTED: Final = {"mmi.workers": 20_000, "mmi.requests": 10_000}
"""Rows kept of each list.  The broker finds up to that many requests by the ids in its answers."""
WAIT_SECONDS: Final = 0.5
"""How long a page waits for a new list if there is an older one."""
FORGET_SECONDS: Final = 5.0
"""How long a list is kept once it is out of date."""


@dataclass(frozen=True)
class Listing:
    """The rows of a list, and how many more there are."""

    rows: Sequence[Mapping[str, Any]] = ()
    more: int = 0
    at: float = field(default_factory=time.monotonic)
    """The monotonic time at which the last row arrived."""


@dataclass
class _Entry:
    """A list that visitors have asked for."""

    listing: Listing | None = None
    due: float = 0.0
    asking: asyncio.Task[Listing] | None = None


class Lists:
    """The lists of workers and of requests, of one service each or of all."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._entries: dict[tuple[str, bytes], _Entry] = {}

    async def workers(self, service: bytes = b"") -> Listing:
        """Return the workers of a service, or of all.  Raises `Unavailable`."""
        return await self._get("mmi.workers", service)

    async def requests(self, service: bytes = b"") -> Listing:
        """Return the requests in flight for a service, or for all.  Raises `Unavailable`."""
        return await self._get("mmi.requests", service)

    def refresh(self) -> None:
        """Fetch each list again when it is next needed."""
        for entry in self._entries.values():
            entry.due = 0.0

    async def _get(self, name: str, service: bytes) -> Listing:
        now = time.monotonic()
        for key, each in list(self._entries.items()):
            if each.asking is None and each.due + FORGET_SECONDS < now:
                del self._entries[key]
        entry = self._entries.setdefault((name, service), _Entry())
        if entry.asking is None and entry.due <= now:
            if service:
                self._observer.count_question()
            entry.asking = asyncio.create_task(self._ask(name, service, entry))
            entry.asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        asking = entry.asking
        if asking is None:
            assert entry.listing is not None  # noqa: S101 - otherwise it would be due
            return entry.listing
        if entry.listing is None:
            return await asyncio.shield(asking)
        with suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(asking), WAIT_SECONDS)
        return entry.listing

    async def _ask(self, name: str, service: bytes, entry: _Entry) -> Listing:
        listing, spent = None, 0.0
        began = time.monotonic()
        try:
            listing, spent = await self._pages(name, service)
        finally:
            entry.asking, entry.listing = None, listing
            entry.due = 0.0 if listing is None else began + min(max(0.9, spent / SHARE), MAX_INTERVAL_SECONDS)
        return listing

    async def _pages(self, name: str, service: bytes) -> tuple[Listing, float]:
        """Return the list, and an upper bound of the seconds that the broker spent on it."""
        title = name.removeprefix("mmi.")
        rows: dict[Any, Mapping[str, Any]] = {}
        begin, spent = 0, 0.0
        while True:
            began = time.monotonic()
            answer = await self._observer.now(name, service, b"%d" % begin)
            took = time.monotonic() - began
            spent += took
            try:
                page, more = answer[title], answer["more"]
                new = {row["id"]: row for row in page}
            except (TypeError, KeyError):
                raise Unavailable(f"this broker does not answer {name}") from None
            known = len(rows)
            rows.update(new)  # requests come and go, so two pages may have the same
            full = len(rows) >= MAX_LISTED[name]
            if not more or len(rows) == known or full:
                return Listing(list(rows.values()), more if full else 0), spent
            begin = max(new) if title == "workers" else begin + len(page)
            await asyncio.sleep(min(took, 0.05))  # others come first

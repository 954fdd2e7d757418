"""Long lists that the broker tells in pages: kept for all who look, and asked for seldom enough."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from .observer import MAX_INTERVAL_SECONDS, SHARE, Observer, Unavailable

MAX_LISTED: Final = {"mmi.workers": 20_000, "mmi.requests": 10_000}
"""Rows that are kept of each list.  The broker finds so many requests by the ids under which it has listed them."""
WAIT_SECONDS: Final = 0.5
"""How long a page waits for a new list if there is an older one."""
FORGET_SECONDS: Final = 5.0
"""How long a list is kept after it was due to be asked for again."""


@dataclass(frozen=True)
class Listing:
    """The rows of a list, and how many more there are."""

    rows: Sequence[Mapping[str, Any]] = ()
    more: int = 0
    at: float = field(default_factory=time.monotonic)
    """When it was complete."""


@dataclass
class _Entry:
    """What is known of a list."""

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
        """Ask again at the next occasion."""
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
        """Return the list, and the seconds that the broker took for it at most."""
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

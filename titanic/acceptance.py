"""Stores what is submitted, and tells the dispatcher (`store/acceptance.py` has the SQL).

Rows whose caller waits are stored when workers can take them, as running, which saves claiming them.
"""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final
from uuid import UUID

from . import store
from .backlog import Backlog
from .database import Database
from .discovery import Discovery
from .dispatcher import Dispatcher
from .lanes import Lane, Turn
from .submission import Submission

MAX_TURN_SECONDS: Final = 5.0
"""How long rows wait, not yet stored, for workers that can take them."""


class Acceptance:
    """Stores requests for the handlers of `titanic.request`.

    Args:
        database: Stores the requests.
        dispatcher: Executes them.
        discovery: Looks for workers of services that have none.
        backlog: Told of each request.
        lease: Until when requests that are stored as running belong to this Titanic.
    """

    def __init__(
        self, database: Database, dispatcher: Dispatcher, discovery: Discovery, backlog: Backlog, lease: store.Lease
    ) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._discovery = discovery
        self._backlog = backlog
        self._lease = lease
        self._accepting: set[asyncio.Future[Any]] = set()
        self._end = asyncio.get_running_loop().create_future()

    @property
    def accepting(self) -> Collection["asyncio.Future[Any]"]:
        """Answers that are awaited about rows which are being stored as running."""
        return self._accepting

    async def accept(self, wanted: Submission) -> UUID | None:
        """Store a request, and return what `store.accept` does.  Raises `StoreError`."""
        database = self._database
        uuid = await (database.writer if wanted.key is None else database.keyed).submit(store.accept, wanted)
        self._stored([wanted], [uuid])
        return uuid

    async def accept_rows(self, rows: Sequence[Submission], seconds: float | None) -> list[UUID | None]:
        """Store requests to a service that one caller has submitted together, each with a key.

        If workers can take them before half of the caller's `seconds` have passed, they are stored only then and run
        at once, which saves claiming them.  Returns what `store.accept` does.  Raises `StoreError`.
        """
        service, due = rows[0].service, rows[0].due
        patience = MAX_TURN_SECONDS if seconds is None else min(seconds / 2, MAX_TURN_SECONDS)
        lane = await self._turn(service, len(rows), patience) if due <= self._database.clock.now() else None
        if lane is not None:
            return [*await self._accept_running(lane, rows)]
        uuids = await self._database.keyed.submit_all(store.accept, rows)
        self._stored(rows, uuids)
        return uuids

    def stored(self, wanted: Sequence[Submission], uuids: Sequence[UUID | None]) -> None:
        """Have requests executed that were stored elsewhere; `uuids` is what `store.accept` returned."""
        services: dict[str, list[tuple[Submission, UUID | None]]] = {}
        for each, uuid in zip(wanted, uuids, strict=True):
            services.setdefault(each.service, []).append((each, uuid))
        for pairs in services.values():
            self._stored(*zip(*pairs, strict=True))

    def _stored(self, wanted: Sequence[Submission], uuids: Sequence[UUID | None]) -> None:
        """Have requests executed that were stored, all to one service."""
        new = sum(uuid == each.uuid for uuid, each in zip(uuids, wanted, strict=True))
        service, due = wanted[0].service, wanted[0].due
        self._backlog.accepted(service, new, sum(uuid is not None for uuid in uuids) - new)
        if not new:
            return
        if due > self._database.clock.now():
            self._backlog.look.set()
        elif not self._dispatcher.offered.get(service):
            self._discovery.hasten()  # if there are workers by now, maintenance finds the request
        else:
            lane = self._dispatcher.lane(service)
            lane.arrive()
            self._dispatcher.fill(lane)

    async def _turn(self, service: str, rows: int, seconds: float) -> Lane | None:
        """Wait until the service's workers can take so many rows, and return its lane; None if that takes longer."""
        if not self._dispatcher.offered.get(service) or self._end.done():
            return None
        lane = self._dispatcher.lane(service)
        turn = Turn(rows, asyncio.get_running_loop().create_future())
        lane.turns.append(turn)
        self._dispatcher.fill(lane)
        try:
            await asyncio.wait((turn.given, self._end), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if turn.given.done():
                lane.release(rows)
                self._dispatcher.fill(lane)
            raise
        finally:
            if not turn.given.done():
                lane.turns.remove(turn)
        return lane if turn.given.done() else None

    async def _accept_running(self, lane: Lane, rows: Sequence[Submission]) -> list[UUID]:
        """Store rows that have their turn and send them to the workers.  Returns their UUIDs, as `accept_rows`."""
        now = self._database.clock.now()
        accepting = self._database.keyed.submit_all(
            store.accept_running, [store.Arrival(each, self._lease, now) for each in rows]
        )
        self._accepting.add(accepting)
        accepting.add_done_callback(partial(self._accepted_running, lane, len(rows)))
        # If the caller goes away, the rows are executed all the same.
        return [each if isinstance(each, UUID) else each.uuid for each in await asyncio.shield(accepting)]

    def _accepted_running(self, lane: Lane, count: int, done: "asyncio.Future[list[store.Claimed | UUID]]") -> None:
        self._accepting.remove(done)
        claims: list[store.Claimed] = []
        if not done.cancelled() and done.exception() is None:
            claims = [each for each in done.result() if isinstance(each, store.Claimed)]
            self._backlog.accepted(lane.service, len(claims), count - len(claims))
        self._dispatcher.execute_rows(lane, count, claims)

    def end_turns(self) -> None:
        """Let no rows wait for their turn: Titanic is about to end."""
        self._end.set_result(None)

    async def settle(self) -> None:
        """Wait until all rows that are being stored as running are known to the dispatcher."""
        if self._accepting:
            await asyncio.wait(self._accepting)

"""Stores what is submitted, and tells the dispatcher (`store/acceptance.py` has the SQL).

Requests whose callers wait for the reply are stored when workers can take them, as running, which saves claiming them.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final
from uuid import UUID

from . import store
from .backlog import Backlog
from .callers import Turn, Waiter
from .database import Database
from .discovery import Discovery
from .dispatcher import Dispatcher
from .lanes import Lane
from .submission import Submission

MAX_TURN_SECONDS: Final = 5.0
"""How long a request waits, not yet stored, for workers that can take it."""


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

    @property
    def accepting(self) -> Collection["asyncio.Future[Any]"]:
        """Answers that are awaited about requests which are being stored as running."""
        return self._accepting

    async def accept(self, wanted: Submission) -> UUID | None:
        """Store a request, and return what `store.accept` does.  Raises `StoreError`."""
        database = self._database
        uuid = await (database.writer if wanted.key is None else database.keyed).submit(store.accept, wanted)
        self._stored([wanted], [uuid])
        return uuid

    def accept_for(self, waiter: Waiter, wanted: Submission, seconds: float | None) -> None:
        """Store a request with a key, for a caller that waits so many seconds for the reply.

        If workers can take it before half of these have passed, it is stored only then and run at once, which saves
        claiming it.  Urgent requests are stored at once, because those that are stored run first.  The waiter is told
        the UUID, or the error.
        """
        offered = self._dispatcher.offered.get(wanted.service)
        if not offered or wanted.priority or wanted.due > self._database.clock.now() or waiter.dismissed:
            self._accept_for(waiter, wanted)
            return
        patience = MAX_TURN_SECONDS if seconds is None else min(seconds / 2, MAX_TURN_SECONDS)
        lane = self._dispatcher.lane(wanted.service)
        waiter.turn = Turn(
            lane.turns,
            time.monotonic() + patience,
            partial(self._run_for, waiter, wanted, lane),
            partial(self._accept_for, waiter, wanted),
        )
        self._dispatcher.fill(lane)

    def _accept_for(self, waiter: Waiter, wanted: Submission) -> None:
        """Store a request to be claimed."""
        accepting = self._database.keyed.submit(store.accept, wanted)
        accepting.add_done_callback(partial(self._accepted_for, waiter, wanted))

    def _accepted_for(self, waiter: Waiter, wanted: Submission, done: "asyncio.Future[UUID | None]") -> None:
        error = done.exception()
        if error is not None:
            waiter.fail(error)
            return
        uuid = done.result()
        self._stored([wanted], [uuid])
        waiter.watch(uuid or wanted.uuid, new=uuid == wanted.uuid)

    def _run_for(self, waiter: Waiter, wanted: Submission, lane: Lane) -> None:
        """Store a request that has its turn, as running, and have it executed, even if the caller goes away."""
        arrival = store.Arrival(wanted, self._lease, self._database.clock.now())
        accepting = self._database.keyed.submit(store.accept_running, arrival)
        self._accepting.add(accepting)
        accepting.add_done_callback(partial(self._accepted_running, waiter, lane))

    def _accepted_running(self, waiter: Waiter, lane: Lane, done: "asyncio.Future[store.Claimed | UUID]") -> None:
        self._accepting.remove(done)
        claimed: store.Claimed | None = None
        error = done.exception()
        if error is not None:
            waiter.fail(error)
        elif isinstance(found := done.result(), UUID):
            self._backlog.accepted(lane.service, 0, 1)
            waiter.watch(found)
        else:
            claimed = found
            self._backlog.accepted(lane.service, 1, 0)
            waiter.watch(claimed.uuid, new=True)
        self._dispatcher.run(lane, claimed)

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

    async def settle(self) -> None:
        """Wait until all requests that are being stored as running are known to the dispatcher."""
        if self._accepting:
            await asyncio.wait(self._accepting)

"""Stores what is submitted, and tells the dispatcher (`store/acceptance.py` has the SQL)."""

import asyncio
from collections.abc import Sequence
from functools import partial
from uuid import UUID

from . import store
from .backlog import Backlog
from .callers import Waiter
from .database import Database
from .discovery import Discovery
from .dispatcher import Dispatcher
from .submission import Submission


class Acceptance:
    """Stores requests for the handlers of `titanic.request`.

    Args:
        database: Stores the requests.
        dispatcher: Executes them.
        discovery: Looks for workers of services that have none.
        backlog: Told of each request.
    """

    def __init__(self, database: Database, dispatcher: Dispatcher, discovery: Discovery, backlog: Backlog) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._discovery = discovery
        self._backlog = backlog

    async def accept(self, wanted: Submission) -> UUID | None:
        """Store a request, and return what `store.accept` does.  Raises `StoreError`."""
        database = self._database
        uuid = await (database.writer if wanted.key is None else database.keyed).submit(store.accept, wanted)
        self._stored([wanted], [uuid])
        return uuid

    def accept_for(self, waiter: Waiter, wanted: Submission) -> None:
        """Store a request with a key, for a caller that waits for the reply, and tell the waiter the UUID or error."""
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

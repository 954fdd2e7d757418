"""Requests that end together: so many in each turn, so that others are served meanwhile.

A million requests may end at once: those of a client that has left, those that were not to wait for another
worker, all of them when the broker closes.  Each such event is a *job*, which ends one request at a time; jobs take
turns, and the next turn goes on with the rest.

The ERRORs follow the pace at which a client reads.  While messages for it pile up, its requests end, but stay
registered, and it is told later: so no client that reads is dropped because its own requests have ended.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from .drops import Drop
from .records import Attempt, Client, Request, Service
from .requests import Requests
from .state import Part, State


class Endings(Part):
    """The requests of one broker that are about to end."""

    def __init__(self, state: State, requests: Requests) -> None:
        super().__init__(state)
        self._work = state.work
        self._congested = state.congested
        self._requests = requests
        self._jobs: deque[Iterator[None]] = deque()
        self._working = False
        self._now = 0.0

    def __bool__(self) -> bool:
        """Whether jobs are left.  Those that wait until a client reads do not count."""
        return bool(self._jobs)

    def add(self, job: Iterator[None], now: float) -> None:
        """Do a job, as much of it as the turn has work left for; the next turns do the rest."""
        self._jobs.append(job)
        if not self._working:
            self.go_on(now)

    def go_on(self, now: float) -> None:
        """Go on with the jobs until they are done, or the turn has no work left."""
        self._now = now
        self._working = True
        try:
            while self._jobs and self._work.left > 0:
                job = self._jobs.popleft()
                if next(job, self) is None:
                    self._work.left -= 1
                    self._jobs.append(job)
        finally:
            self._working = False

    def expire(self, now: float) -> None:
        """Drop the requests that have expired (C12), until the turn has no work left."""
        for request in self._registry.expiries.pop_due(now):
            self._requests.expire(request, now)
            self._work.left -= 1
            if self._work.left <= 0:
                break

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, client: Client, now: float) -> None:
        """Drop the requests of a client that is no longer connected."""
        self._registry.lose_client(client, now)
        self.add(self._drop_of(client), now)

    def _drop_of(self, client: Client) -> Iterator[None]:
        while (request := self._registry.next_of(client)) is not None:
            if request.has_ended:  # but the client was not told
                self._requests.finish(request, Drop.CLIENT_GONE, self._now)
            else:
                self._requests.drop(request, Drop.CLIENT_GONE, self._now)
            yield

    def service(self, service: Service, reason: Drop, now: float) -> None:
        """Drop the requests that wait for a service."""
        self.add(self.drop_waiting(service, reason), now)

    def drop_waiting(self, service: Service, reason: Drop) -> Iterator[None]:
        """Drop the requests that wait for a service, one at a time."""
        while (request := self._registry.next_waiting(service, self._now)) is not None:
            self._requests.drop(request, reason, self._now)
            yield

    def drop_held(self, held: Iterable[Attempt]) -> Iterator[None]:
        """Drop the requests that a worker or another broker holds because this broker closes, one at a time."""
        for attempt in list(held):
            request = attempt.request
            if request.attempt is attempt and not attempt.abandoned:  # else it has ended meanwhile
                if request.number is None:
                    self._registry.drop(request, self._now)  # its client is not told
                else:
                    self._requests.drop(request, Drop.CLOSING, self._now)
            yield

    def no_wait(self, service: Service, now: float) -> None:
        """Drop the requests that must not wait, since the last worker of their service is gone."""
        requests = self._registry.not_to_wait(service)
        if requests:
            self.add(self._drop_no_wait(service, requests), now)

    def _drop_no_wait(self, service: Service, requests: list[Request]) -> Iterator[None]:
        for request in requests:
            if service.available:
                return  # they may wait again
            if request.waits and not request.client.gone and not service.can_pass_on(request):
                # 404 tells the client that no worker has begun with the request.
                reason = Drop.LAST_WORKER_LOST if request.handed else Drop.NO_WORKER
                self._requests.drop(request, reason, self._now)
            yield

    # ── the pace of a client ─────────────────────────────────────────────────────────────────────────────────────────

    def congested(self, identity: bytes) -> None:
        """Stop telling the clients behind that routing id which requests have ended: messages for it pile up."""
        self._congested.setdefault(identity, {})

    def relieved(self, identity: bytes, now: float) -> None:
        """Tell the clients behind that routing id which requests have ended meanwhile."""
        for client in self._congested.pop(identity, ()):
            self.add(self._tell(client), now)

    def _tell(self, client: Client) -> Iterator[None]:
        while client.untold and not client.gone:
            behind = self._congested.get(client.identity)
            if behind is not None:
                behind[client] = None
                return
            self._requests.tell(client.untold.popleft(), self._now)
            yield

"""Requests as operators see them: in flight, and ended (`mmi.requests`, `mmi.tail`, `--slow`).

Lists are made when an operator asks for one.  A request costs the time of its acceptance, and one test at its end.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, Final

from ...codes import Code
from ...timers import NEVER
from ...tracing import REQUEST_ID, shown_id
from ...wire import DIALECTS, RequestId
from ...wire.names import show
from ..core.drops import Drop
from ..core.records import Attempt, Client, PeerKey, Remote, Request, Service
from ..core.state import Federation, Observer, State
from .recent import Failures, Tails

MAX_LISTED: Final = 10_000
"""Requests that can be found by the id under which they were listed."""
MAX_SEARCHED: Final = 8192
"""Bytes of options in which the caller's id is looked for: an answer must not take long."""
GIVEN_UP: Final = frozenset({f"{Code.CANCELLED.value}", Drop.CLIENT_GONE.value})
"""Outcomes of requests that their clients have given up."""
_ALL: Final = 1 << 60
Sees = Callable[[bytes], bool]
"""Returns whether the client may know of the service of that name."""

_REQUEST_ID_KEY: Final = b'"%s"' % REQUEST_ID.encode()


def request_id_of(request: Request) -> str:
    """Return the id that the caller has given a request in its headers, safe to show; empty if there is none."""
    raw = request.options.raw
    if _REQUEST_ID_KEY not in raw or len(raw) > MAX_SEARCHED:
        return ""
    return shown_id(json.loads(raw).get("headers", {}).get(REQUEST_ID, ""))


class Watch(Observer):
    """The requests of one broker as operators see them.

    `slow` is the time in seconds after which a request is logged at its end; None for never.  `secret` makes it
    impossible to tell a routing id from the name that a client is shown under (C39).
    """

    def __init__(self, state: State, federation: Federation, secret: bytes, slow: float | None) -> None:
        super().__init__(state)
        self._federation = federation
        self.active = slow is not None
        self._first_address = state.first_address
        self._secret = secret
        self._slow = math.inf if slow is None else slow
        self._tails = Tails()
        self._failures = Failures()
        self._named = 0
        """Number of ids given to requests that no worker had."""
        self._listed: dict[str, tuple[PeerKey, RequestId]] = {}
        """Where to find the requests that were listed last, by id."""

    # ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def id_of(self, request: Request, attempt: Attempt | None = None) -> str:
        """Return the id of a request at this broker.

        If a worker has or had it when its id is first needed, the id is the address that this worker knows.
        """
        known: str = getattr(request, "tag", "")  # most never get one, so it is not set for each
        if known:
            return known
        attempt = attempt or request.attempt
        if attempt is not None:
            request.tag = f"{attempt.address}"
        else:
            self._named += 1
            request.tag = f"{self._first_address}-{self._named}"
        return request.tag

    def fields(self, request: Request, attempt: Attempt | None = None) -> dict[str, Any]:
        """Return the fields of a log line about a request."""
        attempt = attempt or request.attempt
        fields: dict[str, Any] = {
            "request_id": request_id_of(request) or self.id_of(request, attempt),
            "service": show(request.name),
        }
        if attempt is not None and not isinstance(attempt.worker, Remote):
            fields["worker"] = attempt.worker.id
        if request.client.role.name:
            fields["role"] = request.client.role.name
        return fields

    def _client(self, client: Client) -> str:
        """Return the name under which a client is shown: different for each, and no routing id (C39)."""
        if client.broker:
            return f"broker {client.broker}"
        key = client.key
        frames = (key,) if isinstance(key, bytes) else key
        digest = blake2b(key=self._secret, digest_size=6)
        for frame in frames:
            digest.update(b"%d:" % len(frame) + frame)
        return digest.hexdigest()

    # ── requests in flight ───────────────────────────────────────────────────────────────────────────────────────────

    def in_flight(self, name: bytes, sees: Sees, most: int, now: float) -> tuple[list[dict[str, Any]], int]:
        """Return up to `most` rows, the oldest first, of the requests for a service, or for all if the name is empty.

        The second value is how many more there are.  If there are too many, half of the rows are for those that wait,
        and of these, each client's oldest are shown.
        """
        services = self._services(name, sees)
        running = list(islice(self._running(services), most))
        waiting = list(islice(_waiting(services, most), most))
        more = 0
        if len(running) + len(waiting) > most or sum(each.waiting for each in services) > len(waiting):
            all_running = max(sum(each.running for each in services), len(running))
            more = all_running + sum(each.waiting for each in services)
            waiting = waiting[: max(most // 2, most - len(running))]
            running = running[: most - len(waiting)]
            more -= len(running) + len(waiting)
        rows = [self._row(request, now) for request in (*running, *waiting)]
        rows.sort(key=_age, reverse=True)
        return rows, more

    def page(self, name: bytes, sees: Sees, skip: int, most: int, now: float) -> tuple[list[dict[str, Any]], int]:
        """Return up to `most` rows, without the first `skip`: those that run, then those that wait, by service.

        The second value is how many more there are.  Between two pages, requests come and go: some may be in both, or
        in neither.
        """
        services = self._services(name, sees)
        found = list(islice(chain(self._running(services), _waiting(services, _ALL)), skip, skip + most))
        total = sum(each.running + each.waiting for each in services)
        more = max(total - skip - len(found), 0) if len(found) == most else 0
        return [self._row(request, now) for request in found], more

    def _services(self, name: bytes, sees: Sees) -> list[Service]:
        """Return the service of that name, or all if it is empty, of those that the client may know of."""
        directory = self._directory
        known = {**directory.reachable, **directory.services}
        services = [known[name]] if name in known else [] if name else list(known.values())
        return [service for service in services if sees(service.name)]

    def _running(self, services: list[Service]) -> Iterator[Request]:
        """Yield the requests that workers hold, here or at other brokers, unless their clients no longer wait."""
        for service in services:
            left = service.running
            for worker in (*service.workers, *service.remotes):
                left -= worker.load
                yield from _of(worker.held.values())
            if left:  # at brokers that have withdrawn the service, such as those that drain
                for there in self._federation.held():
                    withdrawn = [each for each in there.values() if each.worker.leaving]
                    yield from _of([each for each in withdrawn if each.worker.service is service])

    def _row(self, request: Request, now: float) -> dict[str, Any]:
        id_ = self.id_of(request)
        self._listed.pop(id_, None)
        self._listed[id_] = (request.client.key, request.number)
        if len(self._listed) > MAX_LISTED:
            del self._listed[next(iter(self._listed))]
        worker = None if request.attempt is None else request.attempt.worker
        broker = worker.broker if isinstance(worker, Remote) else None
        return {
            "id": id_,
            **self._who(request),
            "state": "waiting" if worker is None else "running",
            "age_seconds": round(now - request.accepted, 3),
            "state_seconds": round(now - request.since, 3),
            "worker": None if worker is None or broker is not None else worker.id,
            "broker": broker,
            "ttl_seconds": None if request.deadline >= NEVER else round(max(request.deadline - now, 0.0), 3),
        }

    def _who(self, request: Request) -> dict[str, Any]:
        """Return the fields that a request has in every list."""
        return {
            "request_id": request_id_of(request) or None,
            "service": show(request.name),
            "group": request.options.group,
            "role": request.client.role.name,
            "client": self._client(request.client),
            "protocol": DIALECTS[request.header],
            "attempts": request.handed,
            "bytes": request.size,
        }

    def find(self, id_: str) -> Request | None:
        """Return the request in flight that was listed under that id, or that a worker knows by it; None if there is
        none (any longer)."""
        place = self._listed.get(id_)
        if place is not None:
            key, number = place
            client = self._directory.clients.get(key)
            if client is None:
                return None
            if number is not None:
                candidates: Iterable[Request] = [client.numbered[number]] if number in client.numbered else ()
            else:
                candidates = [*client.running, *self._registry.waiting_for(client)]
            return next((each for each in candidates if getattr(each, "tag", "") == id_), None)
        if not (id_.isascii() and id_.isdigit() and len(id_) < 20):
            return None
        address = int(id_)
        holders = [each.held for each in self._directory.workers.values()]
        holders += self._federation.held()
        for held in holders:
            attempt = held.get(address)
            if attempt is not None:
                return None if attempt.abandoned else attempt.request
        return None

    # ── requests that have ended ─────────────────────────────────────────────────────────────────────────────────────

    def tail(self, asked: bytes, now: float) -> dict[str, Any] | None:
        """Answer `mmi.tail`; None if the question is malformed."""
        answer = self._tails.answer(asked, now)
        self._decide()
        return answer

    def failures(self, name: bytes, now: float) -> dict[str, Any]:
        """Answer `mmi.failures`: those of a service, or all if the name is empty."""
        return self._failures.answer(show(name) if name else "", now)

    def failed(self, request: Request, attempt: Attempt | None, outcome: str, text: str, now: float) -> None:
        """Remember a request that was not answered with a FINAL, unless its client has given it up."""
        if outcome not in GIVEN_UP and self._failures.take(now):
            row = {"id": self.id_of(request, attempt), **self._who(request), "outcome": outcome}
            self._failures.add(row, text, now)

    def tidy(self, now: float) -> None:
        """Forget the tails that were not asked for lately."""
        self._tails.tidy(now)
        self._decide()

    def _decide(self) -> None:
        self.active = self._slow < math.inf or bool(self._tails)

    def ended(self, request: Request, attempt: Attempt | None, outcome: str, now: float) -> None:
        """Take note of the end of a request; of its last attempt, if it ended at a worker."""
        accepted: float = getattr(request, "accepted", now)  # one that was refused was not accepted
        left_queue = now if attempt is None else request.since
        if now - accepted > self._slow:
            text = "slow request for service %s: %.3f s in the queue, %.3f s at %s: %s"
            at = "a worker" if attempt is None else _holder(attempt)
            self._journal.note(
                now, logging.WARNING, "slow", text, request.name, left_queue - accepted, now - left_queue, at, outcome,
                fields=partial(self.fields, request, attempt),
            )  # fmt: skip
        if not self._tails:
            return
        self.tidy(now)
        name = request.name
        row: dict[str, Any] = {}
        for tail in self._tails.wanting(name, outcome, now):
            if not row:
                remote = attempt is not None and isinstance(attempt.worker, Remote)
                row = {
                    "id": self.id_of(request, attempt),
                    **self._who(request),
                    "outcome": outcome,
                    "queue_seconds": round(left_queue - accepted, 6),
                    "worker_seconds": None if attempt is None else round(now - left_queue, 6),
                    "worker": None if attempt is None or remote else attempt.worker.id,
                    "ended": now,
                }
            tail.append(row)


def _holder(attempt: Attempt) -> str:
    worker = attempt.worker
    return f"broker {worker.broker}" if isinstance(worker, Remote) else f"worker {worker}"


def _age(row: dict[str, Any]) -> float:
    age: float = row["age_seconds"]
    return age


def _of(attempts: Iterable[Attempt]) -> Iterator[Request]:
    for attempt in attempts:
        if not attempt.abandoned:
            yield attempt.request


def _waiting(services: list[Service], most: int) -> Iterator[Request]:
    """Yield the requests that wait; if there are many, the oldest of each client."""
    for service in services:
        yield from service.schedule.oldest_requests(most)
        yield from service.arrived

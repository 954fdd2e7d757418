"""The services of a broker, and the workers and clients that offer and call them.

No frames, no clock, no socket.  Every operation takes constant time, whatever the number of peers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from ...service_limits import NO_LIMITS, ServiceLimits
from ...wire import EMPTY, Route
from .records import About, Client, PeerKey, Proxy, Remote, Request, Service, Worker, key_of
from .roles import Role
from .scheduling.groups import Gate, Group, Groups, Throttling
from .service_metrics import Metrics

MAX_ABOUTS: Final = 8
"""Different texts of one service: a rolling deploy has two or three."""
MAX_ABOUTS_BYTES: Final = 64 << 20
"""Bytes of the texts of all services."""


class Directory:
    """All services, workers and clients of a broker; `Registry` has their requests.

    A service in which something arrived or became free is listed in `unsettled`, so that the broker looks at it at the
    end of its turn.
    """

    def __init__(self) -> None:
        self.services: dict[bytes, Service] = {}
        self.reachable: dict[bytes, Service] = {}
        """The services that other brokers offer."""
        self.brokers: dict[PeerKey, Client] = {}
        """The clients that are other brokers."""
        self.metrics = Metrics()
        self.throttling = Throttling()
        self.limits: Callable[[bytes], ServiceLimits | None] = lambda _: None
        """Returns the operator's limits for a service; None if there are none."""
        self.abouts = Abouts()
        self.unserved: dict[Service, None] = {}
        """Services without a worker, known only because requests wait for them (C41); the newest last."""
        self.workers: dict[PeerKey, Worker] = {}
        self.clients: dict[PeerKey, Client] = {}
        """The clients that have a request here."""
        self.proxies: dict[bytes, Proxy] = {}
        """The connections behind which there are several peers, by routing id."""
        self.unsettled: list[Service] = []
        """Services that changed in this turn: requests may be ready to dispatch, or the service may be forgotten."""

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def service(self, name: bytes) -> Service:
        """Return the service of that name; a new one is known once it has a worker or a request."""
        service = self.services.get(name)
        if service is None and self.reachable:
            service = self.reachable.get(name)
        return Service(name, self.metrics.others) if service is None else service

    def touch(self, service: Service) -> None:
        """Make the broker look at `service` at the end of its turn."""
        if not service.unsettled:
            service.unsettled = True
            if service.name not in self.services and self.reachable.get(service.name, service) is service:
                self.services[service.name] = service
                self.limit(service, -math.inf)
                if self.metrics.of(service.name).served or service.remotes:
                    self._count_by_name(service)
                if not service.remotes:
                    self.unserved[service] = None
            self.unsettled.append(service)

    def _count_by_name(self, service: Service) -> None:
        """Count the requests for `service` under its name.

        Before it has had a worker, its name may be anything that clients have made up, so counts by name could grow
        without limit.
        """
        service.metrics = self.metrics.of(service.name)
        service.metrics.served = True

    def take_unsettled(self) -> list[Service]:
        """Return the services to look at, which are to be reported with `settled` or `keep_unsettled`."""
        unsettled, self.unsettled = self.unsettled, []
        return unsettled

    def keep_unsettled(self, service: Service) -> None:
        """Make the broker look at `service` again in its next turn: more of it may be dispatched."""
        service.unsettled = False
        self.touch(service)

    def settled(self, service: Service) -> None:
        """Record that nothing more of `service` can be dispatched now; forget it if nothing is left of it."""
        service.unsettled = False
        self.forget_if_empty(service)

    def forget_if_empty(self, service: Service) -> None:
        """Forget a service if nothing is left of it."""
        if service.workers or service.waiting or service.unsettled or service.running:
            return
        groups = service.schedule.groups
        if groups is None or groups.may_be_forgotten():
            self.forget(service)

    def forget(self, service: Service) -> None:
        """Forget a service that has no workers and no requests; if it is touched again, it is a new one."""
        if self.services.get(service.name) is service:
            del self.services[service.name]
            self.metrics.forget(service.name)
        self._served(service)

    def _served(self, service: Service) -> None:
        """Record that `service` has a worker, or is forgotten."""
        self.unserved.pop(service, None)
        if service.named_by is not None:
            service.named_by.named -= 1
            service.named_by = None

    def newest_unserved(self) -> Service | None:
        """Return the newest service without a worker."""
        return next(reversed(self.unserved), None)

    def named(self, service: Service, client: Client) -> None:
        """Record that a service is known only because that client calls it (C41)."""
        service.named_by = client
        client.named += 1

    # ── limits and groups ────────────────────────────────────────────────────────────────────────────────────────────

    def groups_of(self, service: Service) -> Groups[Request]:
        """Return the groups of a service, which take turns from now on."""
        groups = service.schedule.groups
        if groups is None:
            groups = service.schedule.form_groups(service.name, self.throttling)
            for worker in service.workers:
                for attempt in worker.held.values():
                    attempt.start(groups, -math.inf)
        return groups

    def limit(self, service: Service, now: float) -> None:
        """Apply the limits that the operator, or else the workers of a service have set."""
        limits = self.limits(service.name)
        if limits is None:
            limits = NO_LIMITS
            for declared in service.declared:
                limits = limits.stricter(declared) if limits else declared
        groups = service.schedule.groups
        if limits or groups is not None:
            groups = self.groups_of(service)
            if groups.limits != limits:
                groups.limit(limits, now)
                self.touch(service)

    def wake(self, now: float) -> None:
        """Look again at services whose limits may let requests start now."""
        for gate in self.throttling.wakes.pop_due(now):
            self._wake(gate, now)

    def _wake(self, gate: Gate, now: float) -> None:
        groups = gate.groups if isinstance(gate, Group) else gate
        assert isinstance(groups, Groups)  # noqa: S101 - there are only these two
        groups.wake(gate, now)
        service = self.services.get(groups.service)
        if service is not None and service.schedule.groups is groups:
            self.touch(service)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, route: Route, role: Role) -> Client:
        """Return the client with that route; a new one, of `role`, is known once a request of it is accepted."""
        key = key_of(route)
        client = self.clients.get(key)
        if client is None and self.brokers:
            client = self.brokers.get(key)
        return Client(key, role) if client is None else client

    def add_client(self, client: Client) -> None:
        """Register a client, whose first request is accepted."""
        self.clients[client.key] = client
        self._add_behind(client.key)
        if not isinstance(client.key, bytes):
            client.proxy = self.proxies[client.key[0]]

    def lose_client(self, client: Client) -> None:
        """Record that a client is no longer connected: the next one with its key is another client."""
        client.gone = True
        if self.clients.get(client.key) is client:
            del self.clients[client.key]
            self._remove_behind(client.key)

    def remove_client(self, client: Client) -> None:
        """Forget a client, whose last request has ended."""
        if not client.gone:
            del self.clients[client.key]
            self._remove_behind(client.key)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_worker(self, worker: Worker, now: float, about: bytes = EMPTY) -> None:
        """Register a worker, which says this of its service."""
        worker.about = self.abouts.add(worker.service.name, about)
        self.workers[worker.key] = worker
        self._add_behind(worker.key)
        worker.service.workers[worker] = None
        worker.service.available += 1
        self._update(worker)
        self._served(worker.service)
        self._count_by_name(worker.service)
        self._availability_changed(worker.service)
        declared = worker.service.declared
        if len(worker.service.workers) == 1:
            declared.clear()
        if worker.limits:
            declared[worker.limits] = declared.get(worker.limits, 0) + 1
        if declared or worker.service.schedule.groups is not None:
            self.limit(worker.service, now)

    def set_credit(self, worker: Worker, credit: int) -> None:
        """Change how many requests a worker may hold."""
        worker.credit = credit
        self._update(worker)

    def leave(self, worker: Worker) -> None:
        """Stop giving requests to a worker."""
        self._withdraw(worker)
        self._update(worker)
        self._availability_changed(worker.service)

    def remove_worker(self, worker: Worker, now: float) -> None:
        """Forget a worker, which holds nothing.

        The limits that the last worker of a service has declared stay until there is another one.
        """
        if not worker.leaving:
            self._withdraw(worker)
        self._update(worker)
        del self.workers[worker.key]
        self._remove_behind(worker.key)
        service = worker.service
        del service.workers[worker]
        if worker.limits and service.workers:
            service.declared[worker.limits] -= 1
            if not service.declared[worker.limits]:
                del service.declared[worker.limits]
                self.limit(service, now)
        if not service.workers and not service.remotes:
            self.unserved[service] = None  # until its requests have ended
        self._availability_changed(service)

    def _withdraw(self, worker: Worker) -> None:
        worker.leaving = True
        worker.service.available -= 1
        if worker.about is not None:
            self.abouts.remove(worker.service.name, worker.about)

    def _update(self, worker: Worker) -> None:
        worker.update()
        self.touch(worker.service)

    def _availability_changed(self, service: Service) -> None:
        for remote in service.remotes:
            remote.decide()
            self._update(remote)

    # ── services of other brokers ────────────────────────────────────────────────────────────────────────────────────

    def add_remote(self, remote: Remote) -> None:
        """Record that a service can be reached through another broker; its credit is set with `update_remote`."""
        service = remote.service
        self.reachable[service.name] = service
        service.remotes.append(remote)
        self._served(service)
        if service.name in self.services:
            self._count_by_name(service)

    def update_remote(self, remote: Remote, credit: int, free: int, hops: int) -> None:
        """Record an announcement of the other broker."""
        remote.announced(credit, free, hops)
        self._update(remote)

    def remove_remote(self, remote: Remote) -> None:
        """Record that a service cannot be reached through a broker any longer.  Requests that are there go on."""
        service = remote.service
        remote.leaving = True
        self._update(remote)  # which also keeps the service, to which these requests may return
        service.remotes.remove(remote)
        if not service.remotes:
            self.reachable.pop(service.name, None)
            if not service.workers and service.name in self.services:
                self.unserved[service] = None  # until its requests have ended

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def workers_at(self, identity: bytes) -> list[Worker]:
        """Return the workers whose messages come from the connection with that routing id."""
        return [self.workers[key] for key in self._keys_at(identity) if key in self.workers]

    def clients_at(self, identity: bytes) -> list[Client]:
        """Return the clients whose messages come from the connection with that routing id."""
        return [self.clients[key] for key in self._keys_at(identity) if key in self.clients]

    def _keys_at(self, identity: bytes) -> list[PeerKey]:
        proxy = self.proxies.get(identity)
        return [identity] if proxy is None else [identity, *proxy.peers]

    def _add_behind(self, key: PeerKey) -> None:
        if not isinstance(key, bytes):
            self.proxies.setdefault(key[0], Proxy()).peers[key] = None

    def _remove_behind(self, key: PeerKey) -> None:
        """Forget a peer behind a proxy unless it is still a client or a worker."""
        if not isinstance(key, bytes) and key not in self.workers and key not in self.clients:
            proxy = self.proxies[key[0]]
            del proxy.peers[key]
            if not proxy.peers:
                del self.proxies[key[0]]


class Abouts:
    """The descriptions of each service by its workers; those that are leaving do not count."""

    def __init__(self, max_bytes: int = MAX_ABOUTS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_service: dict[bytes, dict[bytes, About]] = {}
        self._size = 0

    def of(self, service: bytes) -> list[About]:
        """Return the descriptions of a service, that of the most workers first."""
        return sorted(self._by_service.get(service, {}).values(), key=_rank)

    def add(self, service: bytes, text: bytes) -> About | None:
        """Record that one more worker says this of its service.  Return None if it is not kept: there is no room."""
        said = self._by_service.get(service, {})
        about = said.get(text)
        if about is None:
            if not text or len(said) >= MAX_ABOUTS or self._size + len(text) > self._max_bytes:
                return None
            about = said[text] = About(text)
            self._by_service[service] = said
            self._size += len(text)
        about.workers += 1
        return about

    def remove(self, service: bytes, about: About) -> None:
        """Record that one of the workers that say this is leaving."""
        about.workers -= 1
        if about.workers:
            return
        said = self._by_service[service]
        del said[about.text]
        self._size -= len(about.text)
        if not said:
            del self._by_service[service]


def _rank(about: About) -> int:
    return -about.workers

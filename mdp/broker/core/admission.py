"""Which requests the broker answers itself, accepts or refuses: its limits, and those of the client's role."""

from collections.abc import Callable

from ... import wire
from .drops import Drop
from .records import Remote, Request
from .requests import Requests
from .roles import Role
from .scheduling.groups import MAX_GROUPS
from .state import Part, State

Answer = Callable[[Request, Role, float], list[bytes]]
"""Returns the broker's own answer to a request for one of its `mmi.*` services, as that role may see it."""


class Admission(Part):
    """Decides on new requests.

    A request for which a worker has credit need not wait, and so passes the limits on queues.  A connection may take as
    much memory as is left: one by itself half of it, two a third each, so that there is always some for others.
    """

    def __init__(self, state: State, requests: Requests, answer: Answer) -> None:
        super().__init__(state)
        self._requests = requests
        self._answer = answer
        limits = state.limits
        self._max_queue, self._max_bytes = limits.max_queue, limits.max_request_bytes
        self._max_services, self._max_unserved = limits.max_services, limits.max_unserved

    def admit(self, request: Request, own: bool, user: Role, now: float) -> None:
        """Answer, accept or refuse a request that `user` may make.  `own` tells that the broker itself answers it."""
        if request.options.broker is not None and self._address(request):
            own = False
        if own and request.service.name == wire.DESCRIBE:
            own = not self._redirect(request, user)
        if own:
            # C25; C26: the reply is a FINAL whose service is the mmi name
            self._state.stats.mmi += 1
            self._state.outgoing.reply(request, True, self._answer(request, user, now))
        elif (drop := self._refusal(request, now)) is not None:
            self._requests.report(request, drop, now)
        else:
            self._registry.accept(request, now)
            return
        self._registry.remember_end(request)

    def _address(self, request: Request) -> bool:
        """Address a request to the broker that its options name.  Return whether that is another one than this."""
        broker, name = request.options.broker, request.service.name
        way = request.recorded_way()
        way.pinned = broker == self._state.name
        if broker is None or way.pinned:
            return False
        way.addressed = name
        self._registry.redirect(request, wire.BROKER + broker.encode())
        return True

    def _redirect(self, request: Request, user: Role) -> bool:
        """Address a question about a service without workers here to the next broker on the way to them, if any.

        One that is addressed to this broker is answered here, with the names of these brokers.
        """
        name = bytes(request.body[0])
        service, way = self._directory.reachable.get(name), request.way
        if service is None or service.available or not user.sees(name) or (way is not None and way.pinned):
            return False
        via = () if way is None else way.via
        for remote in sorted(service.remotes, key=_hops):
            target = wire.BROKER + remote.broker.encode()
            if remote.broker not in via and target in self._directory.reachable and not self._state.draining:
                request.recorded_way().addressed = request.service.name
                self._registry.redirect(request, target)
                return True
        return False

    def _refusal(self, request: Request, now: float) -> Drop | None:
        """Return why `request` cannot be accepted, or None."""
        registry, service, client = self._registry, request.service, request.client
        role = client.role
        if self._state.draining:
            return Drop.DRAINING
        if role.accepted - role.ended >= role.max_outstanding:
            return Drop.ROLE_OUTSTANDING
        charge = request.charge if client.requests else request.charge + client.charge
        alone = not self._directory.proxies and isinstance(client.key, bytes)
        used = client.request_bytes if alone else registry.used_by(client)
        if registry.request_bytes + used + charge > self._max_bytes:
            return Drop.MEMORY_FULL
        if role.request_bytes + charge > role.max_request_bytes:
            return Drop.ROLE_MEMORY_FULL
        waiting, schedule = service.waiting, service.schedule
        if schedule.groups is not None or request.options.group:
            return self._refusal_in_group(request, waiting, now)
        way = request.way
        # A request that may not go to every other broker cannot count on the credit there.
        anywhere = not client.is_broker and (way is None or not way.pinned)
        if waiting < (service.room if anywhere else schedule.capacity):
            return None
        return self._refusal_to_wait(request, waiting)

    def _refusal_in_group(self, request: Request, waiting: int, now: float) -> Drop | None:
        """Return why `request`, to a service with limits or groups, cannot be accepted, or None."""
        service, group, groups = request.service, request.options.group, request.service.schedule.groups
        if (groups is None or group not in groups.by_name) and self._directory.throttling.groups >= MAX_GROUPS:
            return Drop.TOO_MANY_GROUPS
        if groups is not None and service.available:
            if not waiting:  # those that were to start may have been cancelled
                groups.arrived = 0
            if groups.holds_back(group, now):
                service.metrics.throttled += 1
                if not (request.options.wait or (request.way is not None and request.way.waits)):
                    return Drop.LIMITED
            elif service.schedule.capacity > groups.arrived:
                groups.arrived += 1
                if not groups.waits(group):
                    return None
        return self._refusal_to_wait(request, waiting)

    def _refusal_to_wait(self, request: Request, waiting: int) -> Drop | None:
        """Return why `request` cannot wait together with the `waiting` others, or None."""
        directory, service, client = self._directory, request.service, request.client
        role = client.role
        if not service.available and not service.can_pass_on(request):
            if request.way is not None and request.way.addressed:
                return Drop.NO_BROKER
            if not request.options.wait:
                return Drop.NO_WORKER
        if service.name not in directory.services and not service.remotes:
            if len(directory.services) >= self._max_services:
                return Drop.TOO_MANY_SERVICES
            if client.named >= self._max_unserved:
                return Drop.TOO_MANY_UNSERVED
        if waiting - service.room >= self._max_queue:
            return Drop.QUEUE_FULL
        if role.accepted - role.ended - role.running >= role.max_queued:
            return Drop.ROLE_QUEUED
        return None


def _hops(remote: Remote) -> int:
    return remote.hops

"""Which requests the broker accepts: its limits, and those of the client's role."""

from ..limits import Limits
from .drops import Drop
from .registry import Registry, Request


class Admission:
    """Decides on new requests.

    A request for which a worker has credit need not wait, and so passes the limits on queues.  A connection may take as
    much memory as is left: one by itself half of it, two a third each, so that there is always some for others.
    """

    def __init__(self, limits: Limits, registry: Registry) -> None:
        self.draining = False
        self._registry = registry
        # Copies of the limits, which are checked for each request.
        self._max_queue, self._max_bytes = limits.max_queue, limits.max_request_bytes
        self._max_services, self._max_unserved = limits.max_services, limits.max_unserved

    def refusal(self, request: Request) -> Drop | None:
        """Return why `request` cannot be accepted, or None."""
        registry, service, client = self._registry, request.service, request.client
        role = client.role
        if self.draining:
            return Drop.DRAINING
        if role.accepted - role.ended >= role.max_outstanding:
            return Drop.ROLE_OUTSTANDING
        charge = request.charge if client.requests else request.charge + client.charge
        alone = not registry.proxies and isinstance(client.key, bytes)
        used = client.request_bytes if alone else registry.used_by(client)
        if registry.request_bytes + used + charge > self._max_bytes:
            return Drop.MEMORY_FULL
        if role.request_bytes + charge > role.max_request_bytes:
            return Drop.ROLE_MEMORY_FULL
        waiting, schedule = service.waiting, service.schedule
        way = request.way
        # What is not passed on to every other broker cannot count on the credit there.
        anywhere = client.link is None and (way is None or not way.pinned)
        if waiting < (schedule.room if anywhere else schedule.capacity):
            return None
        return self._refusal_to_wait(request, waiting)

    def _refusal_to_wait(self, request: Request, waiting: int) -> Drop | None:
        """Return why `request` cannot wait together with the `waiting` others, or None."""
        registry, service, client = self._registry, request.service, request.client
        schedule, role = service.schedule, client.role
        if not service.available and not schedule.can_pass_on(request):
            if request.way is not None and request.way.addressed:
                return Drop.NO_BROKER
            if not request.options.wait:
                return Drop.NO_WORKER
        if service.name not in registry.services and not schedule.remotes:
            if len(registry.services) >= self._max_services:
                return Drop.TOO_MANY_SERVICES
            if client.named >= self._max_unserved:
                return Drop.TOO_MANY_UNSERVED
        if waiting - schedule.room >= self._max_queue:
            return Drop.QUEUE_FULL
        if role.accepted - role.ended - role.running >= role.max_queued:
            return Drop.ROLE_QUEUED
        return None

"""Orders of operators: limits of services, and requests to cancel (`mmi.limit`, `mmi.cancel`)."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from ...service_limits import ServiceLimits
from ...wire.names import show
from ..core.drops import Drop
from ..core.requests import Requests
from ..core.state import Part, State
from .watch import Watch

MAX_NAMED: Final = 10_000
"""Maximum number of services whose limits are set by name."""


class Orders(Part):
    """The orders of one broker's operators.

    Limits by name win over those by pattern, from the access file, and both over those that workers declare.
    """

    def __init__(self, state: State, watch: Watch, requests: Requests) -> None:
        super().__init__(state)
        self._watch = watch
        self._requests = requests
        self._patterns: Mapping[str, ServiceLimits] = {}
        self._named: dict[bytes, ServiceLimits] = {}

    def limits_of(self, service: bytes) -> ServiceLimits | None:
        """Return the limits of a service; None if there are none."""
        named = self._named.get(service)
        if named is not None:
            return named
        name = show(service)
        for pattern, limits in self._patterns.items():
            if fnmatchcase(name, pattern):
                return limits
        return None

    def limit(self, patterns: Mapping[str, ServiceLimits], now: float) -> None:
        """Replace the limits by pattern: those of the first pattern that a service's name matches."""
        self._patterns = patterns
        for service in list(self._directory.services.values()):
            self._directory.limit(service, now)

    def limit_service(self, name: bytes, limits: ServiceLimits | None, now: float) -> bool:
        """Set the limits of one service; with None, those of the patterns or workers apply again.

        Return False if too many services have limits of their own.
        """
        if limits is None:
            self._named.pop(name, None)
        elif len(self._named) >= MAX_NAMED and name not in self._named:
            return False
        else:
            self._named[name] = limits
        service = self._directory.services.get(name)
        if service is not None:
            self._directory.limit(service, now)
        return True

    def cancel(self, id_: str, now: float) -> bool:
        """Cancel a request that was listed under that id.  Return whether it was in flight."""
        request = self._watch.find(id_)
        if request is None:
            return False
        self._requests.drop(request, Drop.CANCELLED, now)
        return True

"""The limits of services that the operator sets, which win over those that workers declare."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from ..service_limits import ServiceLimits
from ..wire.names import show

MAX_NAMED: Final = 10_000
"""Maximum number of services whose limits are set by name."""


class OperatorLimits:
    """Limits by pattern, from the access file, and by name (`mmi.limit`), which win over those."""

    def __init__(self) -> None:
        self.patterns: Mapping[str, ServiceLimits] = {}
        self._named: dict[bytes, ServiceLimits] = {}

    def limits_of(self, service: bytes) -> ServiceLimits | None:
        """Return the limits of a service; None if there are none."""
        named = self._named.get(service)
        if named is not None:
            return named
        name = show(service)
        for pattern, limits in self.patterns.items():
            if fnmatchcase(name, pattern):
                return limits
        return None

    def name(self, service: bytes, limits: ServiceLimits | None) -> bool:
        """Set the limits of one service; with None, those of the patterns or workers apply again.

        Return False if there are too many.
        """
        if limits is None:
            self._named.pop(service, None)
        elif len(self._named) >= MAX_NAMED and service not in self._named:
            return False
        else:
            self._named[service] = limits
        return True

"""The permissions of each role, and the requests that the broker holds for it (C45).

Every message reaches the machine with the role of its connection's key.  Peers and their requests belong to the role
that created them; messages of another role about them are dropped.
"""

from collections.abc import Mapping
from typing import Final

from ...security.access import Permissions
from ...wire import DESCRIBE, MMI, signature_of

NO_LIMIT: Final = 1 << 60
MAX_REMEMBERED: Final = 1000
"""Maximum number of service names per role whose permission is remembered."""
ASKED_BY_SERVICE: Final = frozenset({b"mmi.service", b"mmi.services", DESCRIBE})
"""The names that `mmi = "service"` allows."""
ADMINS_ONLY: Final = frozenset({b"mmi.cancel", b"mmi.failures", b"mmi.limit", b"mmi.tail"})
"""The names that only roles with `admin` may ask."""


class Role:
    """One role: its permissions, and the resources that its connections use.

    Without `permissions` it may do everything, as every peer may at a broker without access control.
    """

    def __init__(self, name: str = "", permissions: Permissions | None = None) -> None:
        self.name = name
        self.accepted = 0
        """Number of its requests that have been accepted."""
        self.ended = 0
        """Number of those that are finished; the others are outstanding."""
        self.running = 0
        """Number of those that workers hold; the others wait."""
        self.request_bytes = 0
        """Bytes charged for its outstanding requests."""
        self.failed = 0
        """Number of its requests that did not end with a FINAL, accepted or not."""
        self.restricted = False
        """Whether it may not do everything."""
        self.on_behalf = False
        self.link = True
        """Whether its connections may be links to other brokers."""
        self.signature = b""
        """Members of a JSON object that the broker adds to the options of its requests: they tell workers who asks."""
        self.max_outstanding = NO_LIMIT
        self.max_queued = NO_LIMIT
        self.max_request_bytes = NO_LIMIT
        self._permissions: Permissions | None = None
        self._mmi = "all"
        self._calls: dict[bytes, bool] = {}
        self._offers: dict[bytes, bool] = {}
        if permissions is not None:
            self.grant(permissions)

    def grant(self, permissions: Permissions) -> None:
        """Replace the permissions.  Requests accepted before go on."""
        self.restricted = True
        self.on_behalf = permissions.on_behalf
        self.link = permissions.link
        self.signature = signature_of(self.name, admin=permissions.admin)
        self.max_outstanding = _limit(permissions.outstanding)
        self.max_queued = _limit(permissions.queued_requests)
        self.max_request_bytes = _limit(permissions.request_bytes)
        self._permissions = permissions
        self._mmi = permissions.mmi
        self._calls.clear()
        self._offers.clear()

    def may_call(self, service: bytes) -> bool:
        """Return whether it may send requests for `service`, which may be an `mmi.*` name."""
        if self._permissions is None:
            return True
        allowed = self._calls.get(service)
        if allowed is None:
            allowed = self._may_ask(service) if service.startswith(MMI) else self._permissions.may_call(service)
            _remember(self._calls, service, allowed)
        return allowed

    def may_offer(self, service: bytes) -> bool:
        """Return whether its workers may offer `service`."""
        if self._permissions is None:
            return True
        allowed = self._offers.get(service)
        if allowed is None:
            allowed = self._permissions.may_offer(service)
            _remember(self._offers, service, allowed)
        return allowed

    def sees(self, service: bytes) -> bool:
        """Return whether `mmi.*` tells it about `service`."""
        return self._mmi == "all" or self.may_call(service) or self.may_offer(service)

    def _may_ask(self, name: bytes) -> bool:
        if name in ADMINS_ONLY:
            return self._permissions is None or self._permissions.admin
        return self._mmi == "all" or (self._mmi == "service" and name in ASKED_BY_SERVICE)


def _limit(given: int | None) -> int:
    return NO_LIMIT if given is None else given


def _remember(permitted: dict[bytes, bool], service: bytes, allowed: bool) -> None:
    if len(permitted) >= MAX_REMEMBERED:
        permitted.clear()
    permitted[service] = allowed


class Roles:
    """All roles of a broker.  Without access control there is one, `everyone`, which may do everything."""

    def __init__(self) -> None:
        self.everyone = Role()
        self._roles: dict[str, Role] = {}
        self.nobody = Role("(none)", Permissions(name="(none)"))
        """The role of connections that have no known role."""

    def named(self, name: str) -> Role:
        """Return the role of that name; one that may do nothing if there is none."""
        return self._roles.get(name, self.nobody)

    def all(self) -> list[Role]:
        """Return all roles that may do something."""
        return list(self._roles.values()) or [self.everyone]

    def grant(self, permissions: Mapping[str, Permissions]) -> None:
        """Replace the permissions of all roles.  A role that is not among them may do nothing from now on."""
        for name, role in self._roles.items():
            if name not in permissions:
                role.grant(Permissions(name=role.name))
        for name, granted in permissions.items():
            known = self._roles.get(name)
            if known is None:
                self._roles[name] = Role(name, granted)
            else:
                known.grant(granted)

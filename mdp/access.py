"""Who may do what at a broker: roles and their permissions."""

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class Mmi(StrEnum):
    """What a role may ask the broker about itself."""

    NONE = "none"
    SERVICE = "service"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What a role may do.  Limits are None for no limit."""

    name: str
    call: tuple[str, ...] = ()
    offer: tuple[str, ...] = ()
    mmi: Mmi = Mmi.NONE
    admin: bool = False
    on_behalf: bool = False
    outstanding: int | None = None
    queued_requests: int | None = None
    request_bytes: int | None = None
    connections: int | None = None

    def may_call(self, service: bytes) -> bool:
        return _matches(self.call, service)

    def may_offer(self, service: bytes) -> bool:
        return _matches(self.offer, service)


def _matches(patterns: tuple[str, ...], service: bytes) -> bool:
    name = service.decode("utf-8", "backslashreplace")
    return any(fnmatchcase(name, pattern) for pattern in patterns)

"""The state of a gateway for HTTP or agents: its client at the broker, its settings, callers and limits."""

import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from ..mdp.http.limits import ServerLimits
from ..mdp.http.problems import Problem
from ..mdp.limits import limit
from .access import Access, Caller
from .descriptions import Descriptions
from .upstream import Upstream

_ADDRESS: Final = re.compile(rb"(?:localhost|[0-9.]+|\[[0-9a-fA-F:.]+\])(?::\d+)?")
Scope = Any
"""An ASGI scope."""
LIST_SECONDS: Final = 3.0
"""How long the broker may take to list services: it does not wait for workers."""


@dataclass(frozen=True, kw_only=True)
class Settings(ServerLimits):
    """The settings of a gateway; the command line has the same names and defaults."""

    timeout: float = limit(15.0, "seconds", "How long a request may take, if it does not say.")
    max_timeout: float = limit(3600.0, "seconds", "Longest time that a request may ask for.")
    max_parts: int = limit(1000, "parts", "Maximum number of parts of a multipart body.")
    max_unread: int = limit(16 << 20, "bytes", "How much of a stream may wait for a slow reader before it ends.")
    max_outstanding: int = limit(10_000, "requests", "Maximum number of unanswered requests of all callers.")
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may use the gateway from a browser; `*` allows all."""


class Gateway:
    """The state of a gateway, which every part of it uses.

    Args:
        upstream: Its client at the broker.
        settings: Its limits.
        access: The access file; None if everybody may call everything.
        on_behalf: Whether requests are made on behalf of the callers' roles: the gateway has a key.
    """

    def __init__(
        self, upstream: Upstream, settings: Settings, access: Access | None = None, *, on_behalf: bool = False
    ) -> None:
        self.upstream = upstream
        self.descriptions = Descriptions(upstream.client)
        self.settings = settings
        self.access = access
        """A reload replaces it."""
        self.on_behalf = on_behalf
        self.accepted = 0
        """Requests that were not refused because of a limit."""
        self.outstanding = 0
        """Requests that have not been answered."""
        self.memory = 0
        """Bytes of their bodies, and of everything else that counts against `max_memory`."""

    # ── who calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def caller(self, scope: Scope) -> Caller:
        """Return the caller that the header Authorization identifies.

        Raises `Problem` if the caller is unknown, or for a page whose origin is not allowed.
        """
        given, origin, host = None, None, b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"origin":
                origin = value
            elif name == b"host":
                host = value
        if origin is not None:
            self.check_origin(origin, host)
        return Caller.anybody if self.access is None else self.access.identify(given)

    def check_origin(self, origin: bytes, host: bytes = b"") -> None:
        """Raise `Problem` unless pages of this origin may use the gateway: the gateway's own, at `host`, may.

        Browsers add the header Origin to every request that may change something.  Without this check, any website
        could call the services at 127.0.0.1.
        """
        allowed = self.settings.allow_origins
        if host and origin.partition(b"://")[2] == host and (self.access is not None or _is_address(host)):
            return
        if "*" not in allowed and origin.decode("latin-1") not in allowed:
            text = "pages of this origin may not use the gateway: it allows those named by --allow-origin"
            raise Problem("origin-not-allowed", text)

    def check_call(self, caller: Caller, service: bytes) -> None:
        """Raise `Problem` unless the gateway's access file lets `caller` call `service`.

        The broker checks its own access file.
        """
        if not caller.may_call(service):
            text = f"role {caller.role} may not call it: no pattern of `call` in the gateway's access file matches"
            raise Problem("not-allowed", text, service=service.decode())

    def options(self, caller: Caller) -> Mapping[str, Any] | None:
        """Return the options of requests that are made on behalf of `caller`; None if the gateway has no key."""
        return caller.options if self.on_behalf else None

    async def list_services(self, caller: Caller) -> dict[str, Any]:
        """Return the services that exist now and that `caller` may know of and call, as `mmi.services` describes them.

        Raises `Problem` if the caller may not know of any.
        """
        self.check_call(caller, b"mmi.services")
        with self.admit():
            reply = await self.upstream.client.request(
                "mmi.services", b"", timeout=LIST_SECONDS, options=self.options(caller)
            )
        found = json.loads(reply[0])
        if not isinstance(found, dict):
            raise Problem("not-allowed", "the broker's access file does not let this role know of services (mmi)")
        found["services"] = [row for row in found["services"] if caller.may_call(row["name"].encode())]
        return found

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def admit(self, size: int = 0) -> Generator[None]:
        """Count a request, with a body of `size` bytes, as outstanding.  Raises `Problem` if there are too many."""
        self.enter(size)
        try:
            yield
        finally:
            self.leave(size)

    def enter(self, size: int) -> None:
        """Count a request as outstanding, until `leave` is called.  Raises `Problem` if there are too many."""
        settings = self.settings
        if self.outstanding >= settings.max_outstanding:
            raise Problem("overloaded", f"{self.outstanding} requests (--max-outstanding) have not been answered yet")
        self.charge(size)
        self.outstanding += 1
        self.accepted += 1

    def leave(self, size: int) -> None:
        """Count a request as answered."""
        self.outstanding -= 1
        self.memory -= size

    def charge(self, size: int) -> None:
        """Count bytes that a request holds.  Raises `Problem` if they are too many; decrease `memory` afterwards."""
        if self.memory + size > self.settings.max_memory:
            raise Problem("overloaded", f"requests with {self.memory} bytes (--max-memory) have not been answered yet")
        self.memory += size


def _is_address(host: bytes) -> bool:
    """Return whether the host is an address.  A name can be another site's, which has it resolve to this machine."""
    return _ADDRESS.fullmatch(host) is not None

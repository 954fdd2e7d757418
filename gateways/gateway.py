"""What every part of the HTTP gateway shares: the broker's side, who may do what, and its limits."""

import asyncio
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ..mdp.http.problems import Problem
from .access import Access, Caller
from .descriptions import Descriptions
from .settings import Settings
from .upstream import Upstream

_ADDRESS: Final = re.compile(rb"(?:localhost|[0-9.]+|\[[0-9a-fA-F:.]+\])(?::\d+)?")
Scope = Any
"""An ASGI scope."""


class Gateway:
    """The gateway: `jobs.py` and `openapi.py` get it, and use what is public here."""

    def __init__(
        self, upstream: Upstream, settings: Settings, access: Access | None = None, *, on_behalf: bool = False
    ) -> None:
        self.upstream = upstream
        self.descriptions = Descriptions(upstream.client)
        self.settings = settings
        self.access = access
        """Who may do what; None if everybody may do everything.  A reload replaces it."""
        self.on_behalf = on_behalf
        """Whether requests are made on behalf of the callers' roles: the gateway has a key."""
        self.accepted = 0
        """Requests that were not refused because of a limit."""
        self.outstanding = 0
        """Requests that have not been answered."""
        self.memory = 0
        """Bytes of their bodies, and whatever else counts against `max_memory`."""

    # ── who calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def caller(self, scope: Scope) -> Caller:
        """Return who makes a request: by the header Authorization.

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

        Browsers add the header Origin to every request that changes something.  Without this check, any page that
        somebody visits could call the services at 127.0.0.1.
        """
        allowed = self.settings.allow_origins
        if host and origin.partition(b"://")[2] == host and (self.access is not None or _is_address(host)):
            return
        if "*" not in allowed and origin.decode("latin-1") not in allowed:
            text = "pages of this origin may not use the gateway: it allows those named by --allow-origin"
            raise Problem("origin-not-allowed", text)

    def check_call(self, caller: Caller, service: bytes) -> None:
        """Raise `Problem` unless the gateway's access file lets `caller` call `service`.

        What the broker's access file says about the role is checked by the broker.
        """
        if not caller.may_call(service):
            text = f"role {caller.role} may not call it: no pattern of `call` in the gateway's access file matches"
            raise Problem("not-allowed", text, service=service.decode())

    def options(self, caller: Caller) -> Mapping[str, Any] | None:
        """Return the options with which requests of `caller` are made at the broker."""
        return caller.options if self.on_behalf else None

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
    """Return whether no other site can have this name: others can let their names stand for this computer as well."""
    return _ADDRESS.fullmatch(host) is not None


@contextmanager
def on_disconnect(receive: Any, then: Callable[[], None]) -> Generator[None]:
    """Within this context, call `then` once the client of a request disconnects, whose body has been read."""
    watching = asyncio.ensure_future(_watch(receive, then))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(receive: Any, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()

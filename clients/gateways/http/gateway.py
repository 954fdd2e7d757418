"""What every part of the HTTP gateway shares: its settings, the broker's side, who may do what, and its limits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from ..upstream import Upstream
from .access import Access, Caller
from .problems import Problem

Scope = Any
"""An ASGI scope."""
CONNECTION: Final = "zmdp.connection"
"""The scope's key of the `Connection` (connection.py) over which a request came."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of the gateway."""

    timeout: float = 15.0
    """Seconds that a request may take, if it does not say."""
    max_timeout: float = 3600.0
    """Maximum number of seconds that a request may ask for."""
    max_body: int = 16 << 20
    """Bytes of one request's body."""
    max_parts: int = 1000
    """Frames in the body of a request."""
    max_memory: int = 512 << 20
    """Bytes of the bodies of all requests that have not been answered."""
    max_unread: int = 4 << 20
    """Bytes of a reply that its reader may leave unread."""
    max_connections: int = 1000
    max_outstanding: int = 10_000
    """Requests that have not been answered, over all connections."""
    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    header_timeout: float = 10.0
    """Seconds within which the headers of a request must have arrived."""
    body_timeout: float = 30.0
    """Seconds within which more of a request's body must arrive, or more of a reply must be read."""
    keep_alive: float = 60.0
    """Seconds that a connection may be idle between requests."""
    drain_timeout: float = 10.0
    """Seconds that requests may take to finish after SIGTERM."""
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may use the gateway from a browser; `*` allows all."""


class Gateway:
    """The gateway: `jobs.py`, `openapi.py` and `websocket.py` get it, and use what is public here."""

    def __init__(
        self, upstream: Upstream, settings: Settings, access: Access | None = None, *, on_behalf: bool = False
    ) -> None:
        self.upstream = upstream
        self.settings = settings
        self.access = access
        """Who may do what; None if everybody may do everything.  A reload replaces it."""
        self.on_behalf = on_behalf
        """Whether requests are made on behalf of the callers' roles: the gateway has a key."""
        self.outstanding = 0
        """Requests that have not been answered."""
        self.memory = 0
        """Bytes of their bodies."""

    # ── who calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def caller(self, scope: Scope, token: str | None = None) -> Caller:
        """Return who makes a request: by `token`, by the header Authorization, or by the client's certificate.

        Raises `Problem` if the caller is unknown, or for a page whose origin is not allowed.
        """
        given, origin = None, None
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"origin":
                origin = value
        if origin is not None:
            self.check_origin(origin)
        connection = scope.get(CONNECTION)
        certificate = () if connection is None else connection.certificate
        if token is not None:
            given = b"Bearer " + token.encode(errors="replace")
        return self.identify(given, certificate)

    def identify(self, authorization: bytes | None, certificate: tuple[str, ...] = ()) -> Caller:
        """Return the caller with this Authorization header and certificate.  Raises `Problem`."""
        if self.access is None:
            return Caller.anybody
        return self.access.identify(authorization, certificate)

    def check_origin(self, origin: bytes) -> None:
        """Raise `Problem` unless pages of this origin may use the gateway.

        Browsers add the header Origin to every request that changes something.  Without this check, any page that
        somebody visits could call the services at 127.0.0.1.
        """
        allowed = self.settings.allow_origins
        if "*" not in allowed and origin.decode("latin-1") not in allowed:
            text = "pages of this origin may not use the gateway: it allows those named by --allow-origin"
            raise Problem("origin-not-allowed", text)

    def check_call(self, caller: Caller, service: str) -> None:
        """Raise `Problem` unless the gateway's access file lets `caller` call `service`.

        What the broker's access file says about the role is checked by the broker.
        """
        if not caller.may_call(service):
            text = f"role {caller.role} may not call it: no pattern of `call` in the gateway's access file matches"
            raise Problem("not-allowed", text, service=service)

    def options(self, caller: Caller) -> Mapping[str, Any] | None:
        """Return the options with which requests of `caller` are made at the broker."""
        return caller.options if self.on_behalf else None

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def admit(self, size: int = 0) -> Iterator[None]:
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

    def leave(self, size: int) -> None:
        """Count a request as answered."""
        self.outstanding -= 1
        self.memory -= size

    def charge(self, size: int) -> None:
        """Count bytes that a request holds.  Raises `Problem` if they are too many; decrease `memory` afterwards."""
        if self.memory + size > self.settings.max_memory:
            raise Problem("overloaded", f"requests with {self.memory} bytes (--max-memory) have not been answered yet")
        self.memory += size

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def on_disconnect(scope: Scope, then: Any) -> None:
        """Call `then` once if the client disconnects before the response is complete; None forgets the last one."""
        scope[CONNECTION].on_disconnect = then

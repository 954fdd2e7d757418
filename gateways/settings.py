"""The settings of the HTTP gateway."""

from dataclasses import dataclass

from ..mdp.http.limits import ServerLimits, limit


@dataclass(frozen=True, kw_only=True)
class Settings(ServerLimits):
    """The gateway's settings; the command line has the same names and defaults."""

    timeout: float = limit(15.0, "seconds", "How long a request may take, if it does not say.")
    max_timeout: float = limit(3600.0, "seconds", "Longest time that a request may ask for.")
    max_parts: int = limit(1000, "parts", "Maximum number of parts of a multipart body.")
    max_unread: int = limit(16 << 20, "bytes", "How much of a stream may wait for a slow reader before it ends.")
    max_outstanding: int = limit(10_000, "requests", "Maximum number of unanswered requests of all callers.")
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may use the gateway from a browser; `*` allows all."""

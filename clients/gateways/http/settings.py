"""The limits of the HTTP gateway."""

from dataclasses import dataclass, field
from typing import Any


def _setting(default: Any, unit: str, text: str) -> Any:
    return field(default=default, metadata={"unit": unit, "help": text})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The gateway's settings; the command line has the same names and defaults."""

    timeout: float = _setting(15.0, "seconds", "How long a request may take, if it does not say.")
    max_timeout: float = _setting(3600.0, "seconds", "Longest time that a request may ask for.")
    max_body: int = _setting(16 << 20, "bytes", "Maximum size of a request's body.")
    max_parts: int = _setting(1000, "parts", "Maximum number of parts of a multipart body.")
    max_memory: int = _setting(
        512 << 20, "bytes", "Maximum size of all bodies of unanswered requests and unread streams together."
    )
    max_unread: int = _setting(16 << 20, "bytes", "How much of a stream may wait for a slow reader before it ends.")
    max_connections: int = _setting(1000, "connections", "Maximum number of open connections.")
    max_outstanding: int = _setting(10_000, "requests", "Maximum number of unanswered requests of all callers.")
    max_header_bytes: int = _setting(64 << 10, "bytes", "Maximum size of the headers of a request.")
    max_headers: int = _setting(100, "headers", "Maximum number of the headers of a request.")
    header_timeout: float = _setting(10.0, "seconds", "How long the headers of a request may take to arrive.")
    body_timeout: float = _setting(
        30.0, "seconds", "How long a client may send nothing of a body that it has begun, or read nothing of a reply."
    )
    min_body_rate: int = _setting(
        1000, "bytes", "How much of a body must arrive each second, on average, once --body-timeout has passed."
    )
    keep_alive: float = _setting(60.0, "seconds", "How long a connection may be idle between requests.")
    drain_timeout: float = _setting(10.0, "seconds", "How long requests may take to finish after SIGTERM.")
    hosts: frozenset[str] | None = None
    """Names, without ports, by which clients may address the gateway (the header Host); None allows all."""
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may use the gateway from a browser; `*` allows all."""

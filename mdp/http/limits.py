"""What a client may do to a server."""

from dataclasses import dataclass, field
from typing import Any


def limit(default: Any, unit: str, text: str) -> Any:
    """Return a field with what a command line needs for an option."""
    return field(default=default, metadata={"unit": unit, "help": text})


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of a server."""

    max_body: int = limit(16 << 20, "bytes", "Maximum size of a request's body.")
    max_memory: int = limit(
        512 << 20, "bytes", "Maximum size of all bodies of unanswered requests and unread streams together."
    )
    max_connections: int = limit(4000, "connections", "Answer requests with 503 while so many connections are open.")
    max_header_bytes: int = limit(64 << 10, "bytes", "Maximum size of the headers of a request.")
    body_timeout: float = limit(
        30.0, "seconds", "How long a client may send nothing of a body that it has begun, or read nothing of a reply."
    )
    min_body_rate: int = limit(
        1000, "bytes", "How much of a body must arrive each second, on average, once --body-timeout has passed."
    )
    keep_alive: float = limit(60.0, "seconds", "How long a connection may be idle between requests.")
    drain_timeout: float = limit(10.0, "seconds", "How long requests may take to finish after SIGTERM or Ctrl-C.")
    hosts: frozenset[str] | None = None
    """Names, without ports, by which clients may address the server (the header Host), besides those of this machine;
    None allows all."""

    @property
    def max_unfinished(self) -> int:
        """Maximum number of bytes of all bodies that have not arrived completely."""
        return self.max_memory // 2

"""The limits of an HTTP server, and the checks of each request's headers."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from ..limits import limit
from ..transport.listening import is_loopback
from .problems import Problem, RawHeaders

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")


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


def host_of(value: bytes | str) -> str:
    """Return the name or address in a header Host, without the port, in lower case; empty if the header is invalid."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    match = _HOST.fullmatch(text.lower())
    return match[1] if match else ""


def check_request(scope: Any, allowed: Collection[str] | None) -> None:
    """Raise `Problem` if a request is ambiguous, or addressed to another name.

    `allowed` are the names of the server besides those of this machine; None allows all.
    """
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        # A proxy in front may have used the other one (request smuggling).
        raise Problem("invalid", "a request with Transfer-Encoding has no Content-Length, and is not of HTTP/1.0")
    if allowed is None:
        return
    for host in (value for name, value in scope["headers"] if name == b"host"):
        if not _is_known(host_of(host), allowed):
            # Otherwise a website could read this server by having its own name resolve to 127.0.0.1 (DNS rebinding).
            shown = host.decode("latin-1")
            text = f"{shown!r} is not a name of this server: use the address that it printed, or --allow-host"
            raise Problem("unknown-host", text)


def _is_known(name: str, names: Collection[str]) -> bool:
    return name in names or name.endswith(".localhost") or is_loopback(name)


def length_of(headers: RawHeaders) -> int | None:
    """Return the length of the body of a request with these headers; None if unknown."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            return int(value)
    return 0

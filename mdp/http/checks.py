"""What a request must not be."""

import re
from collections.abc import Collection
from typing import Any, Final

from ..transport.listening import is_loopback
from .problems import Problem, RawHeaders

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")


def host_of(value: bytes | str) -> str:
    """Return the name or address in a header Host, without the port, in lower case; empty if the header is invalid."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    match = _HOST.fullmatch(text.lower())
    return match[1] if match else ""


def check_request(scope: Any, allowed: Collection[str] | None) -> None:
    """Raise `Problem` if the server does not answer such a request, whatever it is about.

    `allowed` are the names of the server besides those of this machine; None allows all.
    """
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        # A proxy may have taken the other one for the length of the body.
        raise Problem("invalid", "a request with Transfer-Encoding has no Content-Length, and is not of HTTP/1.0")
    if allowed is None:
        return
    for host in (value for name, value in scope["headers"] if name == b"host"):
        if not _is_known(host_of(host), allowed):
            # Otherwise a web page could read what is at 127.0.0.1, by letting its own name resolve to that ("DNS
            # rebinding").
            shown = host.decode("latin-1")
            text = f"{shown!r} is not a name of this server: use the address that it printed, or --allow-host"
            raise Problem("unknown-host", text)


def _is_known(name: str, names: Collection[str]) -> bool:
    return name in names or name.endswith(".localhost") or is_loopback(name)


def length_of(headers: RawHeaders) -> int | None:
    """Return the length of the body of a request with these headers; None if they do not tell."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            return int(value)
    return 0

"""What a request must not be, and the problems that say so."""

from typing import Any

import httptools

from .limits import ConnectionLimits
from .problems import Problem, RawHeaders


class Refused(Exception):
    """Ends the parser; its argument is a `Problem`, or None to only close the connection."""


def check_opening(method: bytes, headers: RawHeaders) -> None:
    """Refuse to open a WebSocket with anything but a GET without a body.  Raises `Refused`."""
    if method != b"GET":
        raise Refused(Problem("invalid", "a WebSocket is opened with GET"))
    if any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers):
        raise Refused(Problem("invalid", "the request that opens a WebSocket has no body"))


def check_version(version: str, hosts: int, headers: RawHeaders) -> None:
    """Refuse what is not HTTP/1.1, or HTTP/1.0 as it should be; `hosts` headers are Host.  Raises `Refused`."""
    if hosts > 1 or (version == "1.1" and not hosts):
        raise Refused(Problem("invalid", f"the request has {hosts} headers Host: it must have one"))
    if version not in {"1.0", "1.1"}:
        raise Refused(Problem("invalid", f"this is a request of HTTP/{version}: use HTTP/1.1"))
    if version == "1.0" and any(name == b"transfer-encoding" for name, _ in headers):
        raise Refused(Problem("invalid", "HTTP/1.0 has no Transfer-Encoding"))


def malformed(error: httptools.HttpParserError) -> Problem:
    """Return the problem of a request that cannot be parsed."""
    text = str(error) if isinstance(error, httptools.HttpParserInvalidMethodError) else str(error.__context__ or error)
    return Problem("invalid", f"this is not a valid HTTP request: {text}")


def too_many_headers(limits: ConnectionLimits) -> Problem:
    """Return the problem of a request with too many or too large headers."""
    return Problem(
        "headers-too-large",
        f"a request may have {limits.max_headers} headers with {limits.max_header_bytes} bytes in all",
    )


def without_port(host: bytes) -> str:
    """Return the name or address in a header Host."""
    text = host.decode("latin-1").lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]


def unknown_host(host: bytes) -> Problem:
    """Return the problem of a request to a name that the server does not have."""
    # Otherwise a web page could read what is at 127.0.0.1, by letting its own name resolve to that ("DNS rebinding").
    shown = host.decode("latin-1")
    return Problem("unknown-host", f"{shown!r} is not the name of this server: --allow-host allows further names")


def certificate_names(certificate: Any) -> tuple[str, ...]:
    """Return the names in a certificate as `SSLSocket.getpeercert` returns it: its common name, and others."""
    if not certificate:
        return ()
    common = [value for pairs in certificate.get("subject", ()) for name, value in pairs if name == "commonName"]
    others = [value for kind, value in certificate.get("subjectAltName", ()) if kind in {"DNS", "URI", "email"}]
    return (*common, *others)

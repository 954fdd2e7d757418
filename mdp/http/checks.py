"""What a request must not be."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from ..transport.tcp import is_loopback
from .limits import ConnectionLimits
from .problems import Problem, RawHeaders

_FRAMING: Final = len("  HTTP/1.1\r\n?\r\n")
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")


def host_of(value: bytes | str) -> str:
    """Return the name or address in a header Host, without the port, in lower case; empty if the header is invalid."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    match = _HOST.fullmatch(text.lower())
    return match[1] if match else ""


def check_request(scope: Any, first_line: bytes, limits: ConnectionLimits) -> None:
    """Raise `Problem` if the server does not answer such a request, whatever it is about.

    `first_line` is the beginning of the request, as far as known: an ASGI scope says nothing of the authority in it.
    """
    headers, version = scope["headers"], scope["http_version"]
    if len(headers) > limits.max_headers or header_bytes_of(scope) > limits.max_header_bytes:
        raise too_many_headers(limits)
    if version not in {"1.0", "1.1"}:
        raise Problem("invalid", f"this is a request of HTTP/{version}: use HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        raise Problem("invalid", f"the request has {len(hosts)} headers Host: it must have one")
    for host in hosts:
        if limits.hosts is not None and not _is_known(host_of(host), limits.hosts):
            # Otherwise a web page could read what is at 127.0.0.1, by letting its own name resolve to that ("DNS
            # rebinding").
            shown = host.decode("latin-1")
            text = f"{shown!r} is not a name of this server: use the address that it printed, or --allow-host"
            raise Problem("unknown-host", text)
    _check_target(first_line, hosts)
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        raise Problem("invalid", "the only transfer coding known is chunked, once")
    if codings and version == "1.0":
        raise Problem("invalid", "HTTP/1.0 has no Transfer-Encoding")
    if any(name == b"upgrade" for name, _ in headers) and scope["type"] == "http" and has_body(headers):
        raise Problem("invalid", "a request that offers to upgrade the connection has no body")
    if any(name == b"expect" and value.lower() != b"100-continue" for name, value in headers):
        raise Problem("expectation-failed", "the only expectation known is 100-continue")


def _is_known(name: str, names: Collection[str]) -> bool:
    return name in names or name.endswith(".localhost") or is_loopback(name)


def header_bytes_of(scope: Any) -> int:
    """Return the size of a request without its body."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return len(scope.get("method", "GET")) + len(scope["raw_path"]) + len(scope["query_string"]) + fields + _FRAMING


def has_body(headers: RawHeaders) -> bool:
    """Return whether a request with these headers may have a body."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0")):
            return True
    return False


def _check_target(first_line: bytes, hosts: Sequence[bytes]) -> None:
    """Raise `Problem` if the request is for another host than it says in the header Host."""
    words = first_line.split(b" ", 2)
    scheme, separator, rest = words[1].partition(b"://") if len(words) > 1 else (b"", b"", b"")
    authority = rest.partition(b"/")[0].partition(b"?")[0]
    if separator and scheme.lower() in {b"http", b"https"} and [authority.lower()] != [host.lower() for host in hosts]:
        raise Problem("invalid", "the target of the request and its header Host name different hosts")


def too_many_headers(limits: ConnectionLimits) -> Problem:
    """Return the problem of a request with too many or too large headers."""
    return Problem(
        "headers-too-large",
        f"a request may have {limits.max_headers} headers with {limits.max_header_bytes} bytes in all",
    )


def certificate_names(certificate: Any) -> tuple[str, ...]:
    """Return the names in a certificate as `SSLSocket.getpeercert` returns it: its common name, and others."""
    if not certificate:
        return ()
    common = [value for pairs in certificate.get("subject", ()) for name, value in pairs if name == "commonName"]
    others = [value for kind, value in certificate.get("subjectAltName", ()) if kind in {"DNS", "URI", "email"}]
    return (*common, *others)

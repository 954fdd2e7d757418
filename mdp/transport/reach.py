"""Explain why no broker can be reached at an endpoint."""

import socket as sockets
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from ..errors import BrokerUnreachable

PROBE_SECONDS: Final = 1.0
"""How long a program may take to accept a connection, and then to send the first byte."""
GREETING: Final = b"\xff"
"""The first byte that a ZeroMQ socket sends over a new connection."""


def why_unreachable(endpoint: str) -> str | None:
    """Return why a connection to `endpoint` fails and what to do about it, or None if it succeeds or is unclear."""
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            with sockets.create_connection((parts.hostname, parts.port), timeout=PROBE_SECONDS) as probe:
                return _why_not_a_broker(probe)
        if parts.scheme == "ipc" and not endpoint.startswith("ipc://@"):
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.settimeout(PROBE_SECONDS)
                probe.connect(endpoint.removeprefix("ipc://"))
                return _why_not_a_broker(probe)
    except (ConnectionRefusedError, FileNotFoundError):
        return f"nothing is listening there. Is the broker running? `mdp-broker --bind {endpoint}` starts one"
    except (PermissionError, sockets.gaierror) as error:
        return error.strerror
    except (OSError, ValueError):
        return None
    return None


def _why_not_a_broker(probe: sockets.socket) -> str | None:
    """Return why the program at the other end of a new connection cannot be a broker, or None."""
    try:
        greeting = probe.recv(1)
    except TimeoutError:
        greeting = b""
    if greeting != GREETING:
        return "a program listens there, but it does not answer like a broker: is the port right?"
    return None


def check_listening(broker: Sequence[str]) -> None:
    """Raise `BrokerUnreachable` if no broker can be listening at any of these endpoints: retries would be wasted."""
    reasons = [why_unreachable(endpoint) for endpoint in broker]
    if all(reasons):
        each = (f"{endpoint}: {reason}" for endpoint, reason in zip(broker, reasons, strict=True))
        raise BrokerUnreachable(f"cannot reach a broker at {'; '.join(each)}")

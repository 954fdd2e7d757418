"""Explain why no broker can be reached at an endpoint."""

import socket as sockets
from collections.abc import Sequence
from urllib.parse import urlsplit

from ..errors import BrokerUnreachable


def why_unreachable(endpoint: str) -> str | None:
    """Return why a connection to `endpoint` fails and what to do about it, or None if it succeeds or is unclear."""
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            sockets.create_connection((parts.hostname, parts.port), timeout=1).close()
        elif parts.scheme == "ipc" and not endpoint.startswith("ipc://@"):
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.connect(endpoint.removeprefix("ipc://"))
    except (ConnectionRefusedError, FileNotFoundError):
        return f"nothing is listening there. Is the broker running? `mdp-broker --bind {endpoint}` starts one"
    except (PermissionError, sockets.gaierror) as error:
        return error.strerror
    except (OSError, ValueError):
        return None
    return None


def check_listening(broker: Sequence[str]) -> None:
    """Raise `BrokerUnreachable` if nothing is listening at any of these endpoints, so that no retries are wasted."""
    reasons = [why_unreachable(endpoint) for endpoint in broker]
    if all(reasons):
        each = (f"{endpoint}: {reason}" for endpoint, reason in zip(broker, reasons, strict=True))
        raise BrokerUnreachable(f"cannot reach a broker at {'; '.join(each)}")

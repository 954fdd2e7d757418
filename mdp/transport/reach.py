"""Why nobody can be reached at an endpoint, in words that help."""

import socket as sockets
from collections.abc import Sequence
from urllib.parse import urlsplit

from ..errors import BrokerUnreachable


def why_unreachable(endpoint: str) -> str | None:
    """What a connection to `endpoint` fails with and what to do about it; None if it works or cannot be told."""
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            sockets.create_connection((parts.hostname, parts.port), timeout=1).close()
        elif parts.scheme == "ipc" and not endpoint.startswith("ipc://@"):
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.connect(endpoint.removeprefix("ipc://"))
    except (ConnectionRefusedError, FileNotFoundError):
        return f"nobody listens there. Is the broker running? `mdp-broker --bind {endpoint}` starts one"
    except (PermissionError, sockets.gaierror) as error:
        return error.strerror
    except (OSError, ValueError):
        return None
    return None


def check_listening(broker: Sequence[str]) -> None:
    """Tell at once that nobody listens at any of these endpoints, rather than after every retry.

    Raises `BrokerUnreachable`.
    """
    reasons = [why_unreachable(endpoint) for endpoint in broker]
    if all(reasons):
        each = (f"{endpoint}: {reason}" for endpoint, reason in zip(broker, reasons, strict=True))
        raise BrokerUnreachable(f"cannot reach a broker at {'; '.join(each)}")

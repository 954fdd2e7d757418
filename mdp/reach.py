"""Why nobody can be reached at an endpoint, in words that help."""

import socket as sockets
from urllib.parse import urlsplit


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

"""How a worker's session talks to its broker."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..mdp.defaults import DEFAULT_ENDPOINT


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a worker's session talks to its broker."""

    protocol: str = "X1"
    heartbeat: float = 1.0
    """In seconds; like `liveness`, it should be the broker's (see `Heartbeats`)."""
    liveness: int = 5
    """In heartbeat intervals."""
    handler_timeout: float | None = None
    """Seconds after which a handler that has neither ended nor sent a PARTIAL is given up."""
    options: bytes = b""
    """The options of READY (X1)."""
    endpoints: Sequence[str] = (DEFAULT_ENDPOINT,)
    """Those of the brokers, of which each may be tried without delay before there is a backoff."""

"""How a worker's session talks to its broker."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...mdp.errors import SettingError
from ...mdp.limits import DEFAULT_ENDPOINT, check_number


@dataclass(frozen=True)
class SessionSettings:
    """How a worker's session talks to its broker.  Raises `SettingError` if a setting is invalid."""

    protocol: str = "X1"
    heartbeat: float = 1.0
    """Seconds; like `liveness`, it should be the broker's (see `Heartbeats`)."""
    liveness: int = 5
    """Silent heartbeat intervals after which the broker is considered dead."""
    handler_timeout: float | None = None
    """Seconds after which a handler that has neither ended nor sent a PARTIAL is given up."""
    endpoints: Sequence[str] = (DEFAULT_ENDPOINT,)
    """The brokers' endpoints.  Each may be tried without delay before there is a backoff."""

    def __post_init__(self) -> None:
        check_number("heartbeat", self.heartbeat)
        check_number("liveness", self.liveness, whole=True)
        timeout = self.handler_timeout
        if timeout is None:
            return
        check_number("handler_timeout", timeout)
        if not timeout > 0:
            raise SettingError(f"handler_timeout is {timeout!r}: it must be a number of seconds above 0, or None")

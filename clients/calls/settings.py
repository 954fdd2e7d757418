"""How a client connects: the keyword arguments that `Client` and `AsyncClient` share, and the settings they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TypedDict

from ...mdp.limits import check_number
from ...mdp.program.arguments import spelling_hint
from ...mdp.security.keys import BrokerKey, ClientKeys, Key
from ...mdp.transport.endpoints import checked_brokers
from ...mdp.transport.sockets import Context, end, own_context
from .arguments import DEFAULT_HEARTBEAT, DEFAULT_LIVENESS, MAX_OUTSTANDING, checked_max_outstanding, checked_protocol


class ConnectionArguments(TypedDict, total=False):
    """Keyword arguments of `Client` and `AsyncClient`; `Client` describes them."""

    protocol: str
    envelope: bool
    heartbeat: float
    liveness: int
    max_outstanding: int
    key: Key | None
    broker_key: BrokerKey | None
    context: Context | None


_KNOWN: Final = ("timeout", "retries", "codec", "retry", "middleware", *ConnectionArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How a client connects.  Every argument is checked, and every default filled in."""

    endpoints: Sequence[str]
    protocol: str
    envelope: bool
    heartbeat: float
    liveness: int
    max_outstanding: int
    keys: ClientKeys | None
    context: Context
    owns_context: bool
    """Whether the client made the context, and so ends it."""

    @classmethod
    def checked(
        cls,
        broker: str | Sequence[str] | None,
        *,
        protocol: str = "X1",
        envelope: bool = False,
        heartbeat: float = DEFAULT_HEARTBEAT,
        liveness: int = DEFAULT_LIVENESS,
        max_outstanding: int = MAX_OUTSTANDING,
        key: Key | None = None,
        broker_key: BrokerKey | None = None,
        context: Context | None = None,
        **unknown: object,
    ) -> Self:
        """Return the settings for these arguments.  Raises `SettingError` if one is invalid, `TypeError` if unknown."""
        for name in unknown:
            raise TypeError(f"a client has no argument {name!r}: {spelling_hint(name, _KNOWN)}")
        endpoints, keys = checked_brokers(broker, key, broker_key)
        checked_protocol(protocol)
        checked_max_outstanding(max_outstanding)
        check_number("heartbeat", heartbeat)
        check_number("liveness", liveness, whole=True)
        return cls(
            endpoints, protocol, envelope, heartbeat, liveness, max_outstanding, keys,
            own_context() if context is None else context, owns_context=context is None,
        )  # fmt: skip

    def end_context(self) -> None:
        """End the context if the client made it, once the last messages are sent."""
        if self.owns_context:
            end(self.context)

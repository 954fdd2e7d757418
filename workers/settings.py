"""The keyword arguments that all workers share, and the settings that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

from ..mdp.codecs import Codec
from ..mdp.errors import SettingError
from ..mdp.limits import check_number
from ..mdp.security.keys import BrokerKey, ClientKeys, Key
from ..mdp.service_limits import NO_LIMIT, Limit, ServiceLimits
from ..mdp.transport.endpoints import checked_brokers
from ..mdp.transport.sockets import Context
from .session.states import SessionSettings


class HandlerArguments(TypedDict, total=False):
    """Keyword arguments of all workers, with a broker or without; `Worker` describes them."""

    concurrency: int | None
    codec: str | Codec | None
    name: str
    context: Context | None


class WorkerArguments(HandlerArguments, total=False):
    """Keyword arguments of `Worker` and `AsyncWorker`; `Worker` describes them."""

    heartbeat: float
    liveness: int
    handler_timeout: float | None
    protocol: str
    dialect: bool
    about: Mapping[str, Any] | None
    limit: Limit | None
    per_group: Limit | None
    key: Key | None
    broker_key: BrokerKey | None


@dataclass(frozen=True)
class WorkerSettings(SessionSettings):
    """A worker's settings.  Raises `SettingError` if one is invalid."""

    concurrency: int = 1
    codec: str | Codec | None = None
    name: str = ""
    dialect: bool = False
    about: Mapping[str, Any] | None = None
    limit: Limit | None = None
    per_group: Limit | None = None
    keys: ClientKeys | None = None
    """Its own key and its broker's, or None."""
    context: Context | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.name
        if not isinstance(given, str):
            raise SettingError(f"name is {given!r:.100}: it must be a text")
        for limit in (self.limit, self.per_group):
            if limit is not None and not isinstance(limit, Limit):
                raise SettingError(f"limit is {limit!r:.100}: it must be a Limit, such as Limit(concurrency=8)")
        if self.limits and self.protocol != "X1":
            raise SettingError("limit and per_group require protocol X1: MDP/0.2 and 0.1 cannot carry them")
        check_number("concurrency", self.concurrency, whole=True)
        if self.concurrency < 1:
            raise SettingError(f"concurrency is {self.concurrency!r}: it must be 1 or more")

    @property
    def limits(self) -> ServiceLimits:
        """The limits that it declares for its service."""
        return ServiceLimits(self.limit or NO_LIMIT, self.per_group or NO_LIMIT)

    @classmethod
    def of(cls, broker: str | Sequence[str] | None, arguments: WorkerArguments, *, default_concurrency: int) -> Self:
        """Return the settings for the arguments of a worker."""
        given: dict[str, Any] = dict(arguments)
        endpoints, keys = checked_brokers(broker, given.pop("key", None), given.pop("broker_key", None))
        if given.get("concurrency") is None:
            given["concurrency"] = default_concurrency
        return cls(endpoints=endpoints, keys=keys, **given)

    def at(self, broker: str | Sequence[str]) -> Self:
        """Return the same settings for another broker."""
        endpoints, keys = checked_brokers(broker, "" if self.keys is None else self.keys)
        return replace(self, endpoints=endpoints, keys=keys)

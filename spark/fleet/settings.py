"""A fleet's service, handler, brokers and limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ...mdp import wire
from ...mdp.errors import SettingError
from ...mdp.limits import DEFAULT_ENDPOINT
from ...mdp.program.control_services import SPARK, validate_name
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.endpoints import checked_endpoints

DEFAULT_LEASE_SECONDS: Final = 30.0
DEFAULT_IDLE_SECONDS: Final = 60.0


@dataclass(frozen=True)
class FleetSettings:
    """A fleet's service, handler, brokers and limits.  Times are in seconds.

    Args:
        handler: MODULE:FUNCTION that handles requests.
        service: name of the service.
        name: name of the fleet, for `mdp-spark status` and `drain`.
        broker: endpoint of the broker, or several in order of preference.
        executors_broker: the endpoints that executors use, if they differ.
        minimum, maximum: bounds on the number of slots; a maximum of None means all cores.
        reserve: cores that slots never use.
        concurrency: requests that a slot handles at once; None means the default of `Worker` or `AsyncWorker`.
        lease: how long a slot serves in one Spark job.
        idle: how long a slot must not have been needed before it is released.
        codec: encoding of requests and replies; None means frames of bytes.
        handler_timeout: as for `Worker`.
        keys: keys of the driver and of its executors, for brokers that require them.
    """

    handler: str
    service: str
    name: str
    broker: str | Sequence[str] = DEFAULT_ENDPOINT
    executors_broker: str | Sequence[str] = ()
    minimum: int = 1
    maximum: int | None = None
    reserve: int = 1
    concurrency: int | None = None
    lease: float = DEFAULT_LEASE_SECONDS
    idle: float = DEFAULT_IDLE_SECONDS
    codec: str | None = None
    heartbeat: float = 1.0
    liveness: int = 5
    handler_timeout: float | None = None
    log_level: str = "INFO"
    log_format: str = "text"
    keys: ClientKeys | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        module, _, name = self.handler.partition(":")
        if not (module and name):
            raise SettingError(f"{self.handler!r}: expected MODULE:FUNCTION, for example zmdp.workers.examples:repeat")
        if wire.service_name(self.service).startswith((wire.MMI, SPARK.encode())):
            raise SettingError(f"{self.service!r} is a reserved name; choose another name for the service")
        validate_name(self.name)
        if self.maximum is not None and self.maximum < max(1, self.minimum):
            raise SettingError(
                f"--min {self.minimum} --max {self.maximum}: --max must be at least 1 and no less than --min"
            )

    @property
    def brokers(self) -> tuple[str, ...]:
        """Return the brokers' endpoints for the driver."""
        return tuple(checked_endpoints(self.broker))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the brokers' endpoints for executors."""
        return tuple(checked_endpoints(self.executors_broker or self.broker))

"""How a batch reaches its broker, and the names under which it serves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ...mdp.limits import DEFAULT_ENDPOINT
from ...mdp.security.keys import ClientKeys

DEFAULT_QUERY_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class BatchSettings:
    """How a batch reaches its broker, and the names under which it serves.

    Args:
        name: the driver's name, for `mdp-spark status` and `drain`.
        broker: endpoint of the broker, or several in order of preference.
        prefix: first part of the services' names.
        concurrency: maximum number of concurrent requests of each service.
        max_query: maximum number of bytes of a query and its settings: Spark plans a query without interruption.
        master: the Spark master, which `mdp-spark status` shows.
        heartbeat: interval in seconds.
        liveness: silent heartbeat intervals after which the broker is considered dead.
        keys: the driver's keys, for brokers that require them.
    """

    name: str
    broker: str | Sequence[str] = DEFAULT_ENDPOINT
    prefix: str = "spark"
    concurrency: int = 4
    max_query: int = DEFAULT_QUERY_BYTES
    master: str = ""
    heartbeat: float = 1.0
    liveness: int = 5
    keys: ClientKeys | None = field(default=None, repr=False)

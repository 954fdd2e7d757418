"""What the driver decides about the calls of a plan; Spark ships it to executors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...clients import AsyncClient
from ...clients.rows import Caller, RowSettings
from ...mdp.security.keys import ClientKeys
from ...titanic.api.keyed import KeyedRows


@dataclass(frozen=True, kw_only=True)
class CallSettings(RowSettings):
    """How to send rows, and where to.  Times are in seconds."""

    broker: str | Sequence[str]
    keep: float = 86400.0
    result: str = "string"
    """`string` and `binary`: the single frame that replies to a row; `frames`: the list of all frames."""
    keys: ClientKeys | None = field(default=None, repr=False)

    def connect(self) -> AsyncClient:
        """Return a client."""
        return AsyncClient(self.broker, timeout=self.timeout, key=self.keys)

    def through_titanic(self, client: Caller) -> KeyedRows:
        """Return what sends rows with keys over `client`."""
        return KeyedRows(client, self.headers, self.keep)

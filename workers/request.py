"""What a handler gets."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..mdp import wire


class Request(list[bytes]):
    """The body frames of a request, and what there is to know of it.

    `service` is the service it is for, `client` the address it came from.  `deadline` is the reading of
    `time.monotonic()` at which its time has passed, None if it has no end.  `attempt` is 1, and one more for each
    worker that had it before and was lost.  `cancelled` becomes True when nobody waits for the reply any more: because
    the client cancelled it, or is gone, or the time has passed, or the connection was lost.  A handler that looks at
    it now and then, and ends early, is soon free for others.
    """

    __slots__ = ("_options", "_values", "cancelled", "client", "deadline", "service")

    def __init__(
        self,
        frames: Iterable[bytes],
        *,
        service: str,
        client: bytes,
        options: wire.Options = wire.NO_OPTIONS,
        deadline: float | None = None,
    ) -> None:
        super().__init__(frames)
        self.service = service
        self.client = client
        self.deadline = deadline
        self.cancelled = False
        self._options = options
        self._values: dict[str, Any] | None = None

    @property
    def body(self) -> list[bytes]:
        """The frames of the body, which this list itself has as well."""
        return self

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that the client sent, read-only."""
        return MappingProxyType(self.options.get("headers", {}))

    @property
    def options(self) -> Mapping[str, Any]:
        """All options of the request, those of the service itself included, read-only."""
        if self._values is None:
            self._values = self._options.values()
        return MappingProxyType(self._values)

    @property
    def attempt(self) -> int:
        """1, and one more for each worker that had the request before and was lost."""
        attempt = self.options.get("attempt", 1) if self._options.raw else 1
        return attempt if type(attempt) is int else 1

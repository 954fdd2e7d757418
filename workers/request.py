"""What a handler gets."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..mdp import wire


class Request(list[bytes]):
    """The body frames of a request, and what is known of it.

    `service` is the service that was asked.  `deadline` is the reading of `time.monotonic()` at which the request
    expires, or None.  `cancelled` becomes True when nobody waits for the reply any more: because the client cancelled
    it, or is gone, or the deadline has passed, or the connection was lost.  A handler that checks it now and then, and
    ends early, is soon free for others.
    """

    __slots__ = ("_attempt", "_options", "_values", "address", "cancelled", "deadline", "service")

    def __init__(
        self,
        frames: Iterable[bytes],
        *,
        service: str,
        client: wire.Address,
        options: wire.Options = wire.NO_OPTIONS,
        deadline: float | None = None,
        attempt: int = 0,
    ) -> None:
        list.__init__(self, frames)  # one is made for every request: faster than super()
        self.service = service
        self.address = client
        self.deadline = deadline
        self.cancelled = False
        self._options = options
        self._values: dict[str, Any] | None = None
        self._attempt = attempt

    @property
    def body(self) -> list[bytes]:
        """The frames of the body: this list itself."""
        return self

    @property
    def client(self) -> bytes:
        """The address to which the reply goes."""
        return wire.frame_of(self.address)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that the client sent, read-only."""
        return MappingProxyType(self.options.get("headers", {}))

    @property
    def options(self) -> Mapping[str, Any]:
        """All options of the request, including those that the service defines, read-only."""
        if self._values is None:
            self._values = self._options.values()
        return MappingProxyType(self._values)

    @property
    def attempt(self) -> int:
        """1, and one more for each worker that had the request before and was lost."""
        if self._attempt:
            return self._attempt
        attempt = self.options.get("attempt", 1) if self._options.raw else 1
        return attempt if type(attempt) is int else 1

"""A request that has been made for a Flux program."""

from collections.abc import Callable
from typing import Any

from ...clients.calls.reply import Outcome
from .wire.messages import FluxRequest


class Pending:
    """Where a request of the program is tried, and who takes what comes of it."""

    __slots__ = ("at", "attempts", "body", "options", "rank", "request", "then", "wait")

    def __init__(self, request: FluxRequest, then: "Callable[[int, Pending, Outcome], None]") -> None:
        self.request = request
        self.then = then
        """Takes the outcomes."""
        self.attempts: list[tuple[str, str | None]] = []
        """The services, and their brokers, to try."""
        self.at = 0
        """The current attempt."""
        self.body = b""
        self.options: dict[str, Any] = {}
        self.rank = 0
        """The rank that a ping reaches."""
        self.wait: float | None = None
        """Seconds for which it may wait for the service; None if it must not wait."""

"""The reply to a request."""

from collections.abc import Iterable


class Reply(list[bytes]):
    """The body frames of a reply, or of a part of one, from `service`.

    `final` is False for a PARTIAL, which more parts follow, and True for a FINAL.
    """

    __slots__ = ("collected", "failure", "final", "service")

    def __init__(self, frames: Iterable[bytes], *, service: str, final: bool) -> None:
        self += frames  # faster than list's __init__
        self.failure: tuple[int, str] | None = None
        """Code and text, if this is a 0.2 or 0.1 worker's FINAL that reports a failure; the dialog raises them."""
        self.collected = 0
        """How many of the frames arrived as PARTIALs, before those of the FINAL."""
        self.service = service
        self.final = final

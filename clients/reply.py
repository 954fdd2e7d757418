"""What a request brings."""

from collections.abc import Iterable


class Reply(list[bytes]):
    """The body frames of a reply or of a part of one, with the `service` it came from.

    `final` is False for a PARTIAL, after which more follows, and True for a FINAL.
    """

    __slots__ = ("collected", "failure", "final", "service")

    def __init__(self, frames: Iterable[bytes], *, service: str, final: bool) -> None:
        self += frames  # quicker than list's __init__
        self.failure: tuple[int, str] | None = None
        """Code and text, if it is a 0.2 worker's FINAL that tells of a failure; the shell raises it."""
        self.collected = 0
        """How many of the frames came as PARTIALs, before those of the FINAL."""
        self.service = service
        self.final = final

"""The reply to a request."""

from collections.abc import Iterable, Sequence

from ...mdp.codes import Code
from ...mdp.errors import RequestRejected
from ...mdp.wire.names import show


class Reply(list[bytes]):
    """The body frames of a reply, or of a part of one, from `service`.

        reply = client.request("echo", b"hello")
        reply[0], reply.service, reply.final                    # b'hello', 'echo', True

    `final` is False for a PARTIAL, which more parts follow, and True for a FINAL.

    Args:
        frames: The frames.
        service: The name of the service.
        final: Whether it is the end of the reply.
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


def is_available(reply: Sequence[bytes], service: str | bytes) -> bool:
    """Return what an answer to `mmi.service` says.  Raises `RequestRejected` if this client may not know."""
    if reply == [b"403"]:
        name = service if isinstance(service, str) else show(service)
        text = f"this client's role may neither call nor offer {name!r}, and so does not learn whether it is available"
        raise RequestRejected(text, service=name, code=Code.NOT_ALLOWED.value)
    return reply == [b"200"]

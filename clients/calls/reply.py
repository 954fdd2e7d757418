"""The outcomes of a request, replies, parts and errors, and the inboxes in which they wait until they are read."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Final

from ...mdp.codes import Code
from ...mdp.errors import ClosedError, RequestRejected, StreamInterrupted, ZmdpError
from ...mdp.limits import Limits
from ...mdp.wire.names import show

FRAME_OVERHEAD_BYTES: Final = 100
"""Memory charged for each frame that is kept, in addition to its content."""
MAX_REPLY_BYTES: int = Limits().max_message
"""Maximum size of the collected PARTIALs of one reply; a stream has no limit."""
MAX_UNREAD_BYTES: Final = 64 << 20
"""Maximum size of the parts of a stream that have arrived and have not been taken."""


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
        self += frames  # with super().__init__(frames), a request of an AsyncClient takes 4 % longer
        self.failure: tuple[int, str] | None = None
        """Code and text, if this is a 0.2 or 0.1 worker's FINAL that reports a failure; the dialog raises them."""
        self.collected = 0
        """How many of the frames arrived as PARTIALs, before those of the FINAL."""
        self.service = service
        self.final = final


Outcome = Reply | ZmdpError
"""A part of a reply, the reply, or the error with which a request ends."""


def size_to_keep(body: Sequence[bytes]) -> int:
    """Return the memory charged for a body that is kept."""
    return sum(map(len, body)) + FRAME_OVERHEAD_BYTES * len(body)


def overlong(service: str, most: int) -> RequestRejected:
    """Return the exception of a request whose PARTIALs together have more than `most` bytes."""
    text = f"the parts of the reply of service {service!r} exceed {most} bytes: use stream()"
    return RequestRejected(text, service=service, code=Code.TOO_LARGE)


def closed_error() -> ClosedError:
    """Return the exception of requests of a client that was closed."""
    return ClosedError("this client was closed")


def is_available(reply: Sequence[bytes], service: str | bytes) -> bool:
    """Return whether an answer to `mmi.service` says that the service is available.

    Raises `RequestRejected` if this client may not know.
    """
    if reply == [b"403"]:
        name = service if isinstance(service, str) else show(service)
        text = f"this client's role may neither call nor offer {name!r}, and so does not learn whether it is available"
        raise RequestRejected(text, service=name, code=Code.NOT_ALLOWED.value)
    return reply == [b"200"]


class Inbox:
    """The outcomes of one request, in order.  A stream that is read too slowly ends with `StreamInterrupted`."""

    def __init__(self) -> None:
        self.call: Any = None
        """The request, once it has begun."""
        self._outcomes: deque[Outcome] = deque()
        # Each counter is written by one thread only: the one that receives, the one that reads.
        self._arrived_bytes = 0
        self._taken_bytes = 0
        self.full = False
        """Too much has arrived: further parts are discarded."""

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome.  Return False if it is discarded."""
        if self.full:
            return False
        if isinstance(outcome, Reply):
            self._arrived_bytes += size_to_keep(outcome) + FRAME_OVERHEAD_BYTES
            unread = self._arrived_bytes - self._taken_bytes
            if unread > MAX_UNREAD_BYTES and not outcome.final:
                self.full = True
                text = (
                    f"the stream of service {outcome.service!r} arrives faster than it is read ({unread} bytes unread)"
                )
                outcome = StreamInterrupted(text, service=outcome.service)
        self._outcomes.append(outcome)
        return True

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def take(self) -> Reply:
        """Return the next part or reply.  Raises the request's error, or `IndexError` if the inbox is empty."""
        outcome = self._outcomes.popleft()
        if isinstance(outcome, ZmdpError):
            try:
                raise outcome
            finally:
                del outcome  # the error's traceback refers to this frame: see `test_nothing_is_left_of_a_request`
        self._taken_bytes += size_to_keep(outcome) + FRAME_OVERHEAD_BYTES
        return outcome


class ThreadInbox(Inbox):
    """An inbox for which a thread waits, while another fills it."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived: SimpleQueue[None] = SimpleQueue()

    def put(self, outcome: Outcome) -> None:
        """Add an outcome, and wake the thread."""
        if self.add(outcome):
            self._arrived.put(None)

    def get(self) -> Reply:
        """Wait for the next part or reply.  Raises the request's error."""
        self._arrived.get()
        return self.take()


class AsyncInbox(Inbox):
    """An inbox for which a task waits."""

    def __init__(self) -> None:
        super().__init__()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, outcome: Outcome) -> None:
        """Add an outcome, and wake the task."""
        self.add(outcome)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Reply:
        """Wait for the next part or reply.  Raises the request's error."""
        while not self:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take()

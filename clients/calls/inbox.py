"""The outcomes of a request that its caller has not taken yet."""

import asyncio
from collections import deque
from queue import SimpleQueue
from typing import Any, Final

from ...mdp.errors import StreamInterrupted, ZmdpError
from .call import FRAME_OVERHEAD_BYTES, Outcome
from .reply import Reply

MAX_UNREAD_BYTES: Final = 64 << 20
"""Maximum size of the parts of a stream that have arrived and have not been taken."""


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
        """More has arrived than may be kept: the rest is discarded."""

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome.  Return False if it is discarded."""
        if self.full:
            return False
        if isinstance(outcome, Reply):
            self._arrived_bytes += _size(outcome)
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
        self._taken_bytes += _size(outcome)
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


def _size(reply: Reply) -> int:
    return sum(map(len, reply)) + FRAME_OVERHEAD_BYTES * (len(reply) + 1)

"""The outcomes of a request that its caller has not taken yet."""

from collections import deque
from typing import Final

from ..mdp.errors import StreamInterrupted, ZmdpError
from .call import FRAME_OVERHEAD_BYTES, Outcome
from .reply import Reply

MAX_UNREAD_BYTES: Final = 64 << 20
"""Maximum size of the parts of a stream that have arrived and have not been taken."""


class Inbox:
    """The outcomes of one request, in order.  A stream that is read too slowly ends with `StreamInterrupted`."""

    def __init__(self) -> None:
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


def _size(reply: Reply) -> int:
    return sum(map(len, reply)) + FRAME_OVERHEAD_BYTES * (len(reply) + 1)

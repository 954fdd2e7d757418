"""The outcomes of a request that its caller has not taken yet."""

from collections import deque
from typing import Final

from ..mdp.errors import StreamInterrupted, ZmdpError
from .reply import Reply
from .session import FRAME_OVERHEAD, Outcome

MAX_UNREAD: Final = 64 << 20
"""Maximum bytes of a stream that have arrived and have not been taken."""


class Inbox:
    """The outcomes of one request, in order.  A stream that is read too slowly ends with an error, within bounds."""

    def __init__(self) -> None:
        self._outcomes: deque[Outcome] = deque()
        # Bytes.  Each is written by one thread only: the one that receives, the one that reads.
        self._came = 0
        self._taken = 0
        self.full = False
        """More has arrived than may wait: the rest is left out."""

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome.  Return False if it is left out."""
        if self.full:
            return False
        if isinstance(outcome, Reply):
            self._came += _size(outcome)
            unread = self._came - self._taken
            if unread > MAX_UNREAD and not outcome.final:
                self.full = True
                text = f"the stream of service {outcome.service!r} comes faster than it is read: {unread} bytes wait"
                outcome = StreamInterrupted(text, service=outcome.service)
        self._outcomes.append(outcome)
        return True

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def take(self) -> Reply:
        """The next part or reply.  Raises what the request failed with; `IndexError` if there is nothing."""
        outcome = self._outcomes.popleft()
        if isinstance(outcome, ZmdpError):
            raise outcome
        self._taken += _size(outcome)
        return outcome


def _size(reply: Reply) -> int:
    return sum(map(len, reply)) + FRAME_OVERHEAD * (len(reply) + 1)

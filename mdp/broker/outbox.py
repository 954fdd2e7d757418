"""Messages for peers that read too slowly, kept in order and within limits until they can be sent."""

from collections import deque
from collections.abc import Callable, Iterator
from errno import EAGAIN

from ..limits import Limits
from ..wire import Message


class Outbox:
    """A queue for each slow peer; empty while all peers keep up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[bytes, deque[tuple[Message, int]]] = {}
        self._bytes = 0

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def peers(self) -> list[bytes]:
        """The peers that have messages here."""
        return list(self._queues)

    def add(self, message: Message, turn: int) -> bool:
        """Keep `message`, which the broker created in `turn`, after the others for its peer.

        Return False if the limits are exceeded.
        """
        queue = self._queues.setdefault(message[0], deque())
        queue.append((message, turn))
        self._bytes += _size(message)
        return len(queue) <= self._limits.max_outbox and self._bytes <= self._limits.max_outbox_bytes

    def discard(self, peer: bytes) -> None:
        """Discard the messages for `peer`."""
        self._bytes -= sum(_size(message) for message, _ in self._queues.pop(peer, ()))

    def flush(self, send: Callable[[Message], int]) -> Iterator[tuple[bytes, int]]:
        """Send what the peers accept now.

        Yield each peer that turned out to be gone, with the turn of the first message that it did not receive.  `send`
        returns 0 if it sent the message, EAGAIN if the peer is still slow, or another error if the peer is gone.
        """
        for peer in list(self._queues):
            queue = self._queues.get(peer)
            if queue is None:
                continue  # discarded meanwhile, because of another peer that is gone
            while queue:
                message, turn = queue[0]
                errno = send(message)
                if errno == EAGAIN:
                    break
                queue.popleft()
                self._bytes -= _size(message)
                if errno:
                    self.discard(peer)
                    yield peer, turn
                    break
            else:
                del self._queues[peer]


def _size(message: Message) -> int:
    return sum(map(len, message))

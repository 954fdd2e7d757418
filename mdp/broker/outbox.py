"""Messages for peers that read too slowly: kept in order until the peer takes them, within bounds."""

from collections import deque
from collections.abc import Callable, Iterator
from errno import EAGAIN

from ..limits import Limits
from ..wire import Message


class Outbox:
    """A queue for each slow peer.  Empty as long as all keep up."""

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
        """The peers for which something is kept."""
        return list(self._queues)

    def add(self, message: Message, turn: int) -> bool:
        """Keep `message`, which the broker made in `turn`, behind what its peer has not taken yet.

        False if that is more than may be kept.
        """
        queue = self._queues.setdefault(message[0], deque())
        queue.append((message, turn))
        self._bytes += _size(message)
        return len(queue) <= self._limits.max_outbox and self._bytes <= self._limits.max_outbox_bytes

    def discard(self, peer: bytes) -> None:
        """Forget what is kept for `peer`."""
        self._bytes -= sum(_size(message) for message, _ in self._queues.pop(peer, ()))

    def flush(self, send: Callable[[Message], int]) -> Iterator[tuple[bytes, int]]:
        """Send what the peers take now; yields each peer that turned out to be gone, and the turn of the first message
        that it has not received.

        `send` returns 0 for sent, EAGAIN for later, anything else for gone.
        """
        for peer in list(self._queues):
            queue = self._queues.get(peer)
            if queue is None:
                continue  # discarded meanwhile, by what follows from another that is gone
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

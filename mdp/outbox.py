"""Messages for peers that read too slowly: kept in order until the peer takes them, within bounds."""

from collections import deque
from collections.abc import Callable, Iterator
from errno import EAGAIN

from .limits import Limits
from .wire import Message


class Outbox:
    """A queue for each slow peer.  Empty as long as all keep up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[bytes, deque[Message]] = {}
        self._bytes = 0

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, message: Message) -> bool:
        """Keep `message` behind what its peer has not taken yet.  False if that is more than may be kept."""
        queue = self._queues.setdefault(message[0], deque())
        queue.append(message)
        self._bytes += _size(message)
        return len(queue) <= self._limits.max_outbox and self._bytes <= self._limits.max_outbox_bytes

    def discard(self, peer: bytes) -> None:
        """Forget what is kept for `peer`."""
        self._bytes -= sum(map(_size, self._queues.pop(peer, ())))

    def flush(self, send: Callable[[Message], int]) -> Iterator[Message]:
        """Send what the peers take now; yields each message whose peer turned out to be gone (`send` gave an errno).

        `send` returns 0 for sent, EAGAIN for later, anything else for gone.
        """
        for peer in list(self._queues):
            queue = self._queues.get(peer)
            if queue is None:
                continue  # discarded meanwhile, by what follows from another that is gone
            while queue:
                errno = send(queue[0])
                if errno == EAGAIN:
                    break
                message = queue.popleft()
                self._bytes -= _size(message)
                if errno:
                    self.discard(peer)
                    yield message
                    break
            else:
                del self._queues[peer]


def _size(message: Message) -> int:
    return sum(map(len, message))

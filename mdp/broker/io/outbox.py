"""Messages that wait for peers that read too slowly, kept in order and within limits until they can be sent.

Most wait in libzmq, which takes up to 1000 for each peer; only the others are kept here.  The limits hold for
both together.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from errno import EAGAIN
from typing import Final

from ...limits import Limits
from ...transport.multipart import cost_of
from ...wire import C01, C02, CX1, EMPTY, Message, Route
from .ports import MAIN, PREFIX_BYTES, Port

TO_CLIENTS: Final = frozenset({C01, C02, CX1, EMPTY})
"""The frames after the route of a worker that show a message to be for a client on the same connection."""
CONGESTED_BYTES: Final = 1 << 20
"""Messages pile up for a peer for which more than this waits, or a quarter of the limit for all peers."""


class Outbox:
    """A queue for each slow peer; empty while libzmq takes everything.

    `ports` are the broker's sockets, by prefix.
    """

    def __init__(self, limits: Limits, ports: Mapping[bytes, Port]) -> None:
        self._ports = ports
        self._limits = limits
        self._queues: dict[bytes, _Queue] = {}
        self._bytes = 0
        self._most = min(CONGESTED_BYTES, limits.max_outbox_bytes // 4)
        """Messages pile up for a peer for which more bytes than this wait."""

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, message: Message, turn: int) -> bool:
        """Keep `message`, which the broker created in `turn`, after the others for its peer.

        Return False if too many messages wait for that peer.
        """
        queue = self._queues.get(message[0])
        if queue is None:
            queue = self._queues[message[0]] = _Queue()
        size = cost_of(message)
        queue.messages.append((message, turn, size))
        queue.bytes += size
        self._bytes += size
        return len(queue.messages) <= self._limits.max_outbox

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait for slow peers, here and in libzmq; or fewer."""
        return self._bytes + self._held()

    def overfull(self) -> bytes | None:
        """Return the peer for which most bytes wait, if all peers' exceed the limit; otherwise None."""
        limit = self._limits.max_outbox_bytes
        if self.waiting_bytes <= limit:
            return None
        self._settle()
        if self.waiting_bytes <= limit:
            return None
        waiting = self._waiting()
        for peer, queue in self._queues.items():
            waiting[peer] = waiting.get(peer, 0) + queue.bytes
        return max(waiting, key=lambda peer: waiting[peer])

    @property
    def piles_up(self) -> bool:
        """Whether there may be peers for which messages pile up."""
        return bool(self._queues) or self._held() > self._most

    def congested(self) -> set[bytes]:
        """Return the peers for which messages pile up, here or in libzmq."""
        self._settle()
        # If much waits for all together, each has to read before it gets more.
        most = self._most if self.waiting_bytes <= self._limits.max_outbox_bytes // 2 else 0
        return {*self._queues, *(peer for peer, size in self._waiting().items() if size > most)}

    def _settle(self) -> None:
        for port in self._ports.values():
            port.unsent.settle()

    def _waiting(self) -> dict[bytes, int]:
        """Return how many bytes libzmq holds for each peer."""
        waiting: dict[bytes, int] = {}
        for port in self._ports.values():
            waiting.update(port.waiting())
        return waiting

    def _held(self) -> int:
        """Return how many bytes libzmq holds, or more."""
        held = 0
        for port in self._ports.values():
            held += port.unsent.bytes
        return held

    def forget(self, peer: bytes) -> None:
        """Discard the messages for `peer`, and stop counting those that libzmq holds: its connection ends."""
        self.discard(peer)
        (self._ports.get(peer[:PREFIX_BYTES]) or self._ports[MAIN]).forget_unsent(peer)

    def discard(self, peer: bytes) -> None:
        """Discard the messages for `peer`."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self._bytes -= queue.bytes

    def discard_before(self, route: Route, turn: int) -> None:
        """Discard the messages for the worker with that route that were created before `turn`.

        A client may have the same one: its messages continue with a header of clients, or with an empty frame.
        """
        peer, size = route[0], len(route)
        before = self._queues[peer].messages
        self.discard(peer)
        for message, created, _ in before:
            # Peers choose the rest of their route: that of one may be a whole message for another.
            is_longer = len(message) > size and tuple(message[:size]) == route
            if created >= turn or not is_longer or message[size] in TO_CLIENTS:
                self.add(message, created)

    def flush(self, send: Callable[[Message], int]) -> Iterator[tuple[bytes, int]]:
        """Send the messages that the peers accept now.

        Yield each peer that turned out to be gone, with the turn of the first message that it did not receive.  `send`
        returns 0 if it sent the message, EAGAIN if the peer is still slow, or another error if the peer is gone.
        """
        for peer in list(self._queues):
            queue = self._queues.get(peer)
            if queue is None:
                continue  # discarded meanwhile, because of another peer that is gone
            while queue.messages:
                message, turn, size = queue.messages[0]
                errno = send(message)
                if errno == EAGAIN:
                    break
                if errno:
                    self.discard(peer)
                    yield peer, turn
                    break
                queue.messages.popleft()
                queue.bytes -= size
                self._bytes -= size
            else:
                del self._queues[peer]


class _Queue:
    """The messages for one peer, each with its turn and size."""

    def __init__(self) -> None:
        self.messages: deque[tuple[Message, int, int]] = deque()
        self.bytes = 0

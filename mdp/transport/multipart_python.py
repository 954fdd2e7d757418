"""`receive` and `send` in pure Python (see `multipart`)."""

from collections.abc import Callable
from errno import EAGAIN, EHOSTUNREACH
from typing import Any, Final

import zmq
from zmq.backend import Socket as _Backend

from ..wire import SHARED, Message

ZERO_COPY_BYTES: Final = 65536
"""Frame size in bytes from which on pyzmq is faster without copying."""
FRAME_COST: Final = 112
"""Memory in bytes that a frame takes beside its content, as measured: 64 to 107 in libzmq, 55 to 60 in Python; a shared
one about 450, but it has 8 kB or more."""
MESSAGE_COST: Final = 192
"""Memory in bytes that a message takes beside its frames: none in libzmq, about 180 in Python."""
COUNTED_BYTES: Final = 16384
"""`Unsent` learns of every so many bytes to a peer that libzmq has sent them; a larger message counts by itself."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Not the methods of zmq.Socket, which first check their arguments.
_recv: Final[Callable[..., Any]] = _Backend.recv
_send: Final[Callable[..., Any]] = _Backend.send


def receive(socket: zmq.Socket[bytes], share: bool = False, sources: Any = None) -> Message | None:
    """Return the next message that has arrived on `socket`, or None."""
    message: Message = []
    try:
        while True:
            # A Frame object knows whether more frames follow; for bytes, the socket would have to be asked.
            frame = _recv(socket, _NOBLOCK, False)
            if sources is not None:
                if not message:
                    if sources.secured:
                        sources.user = _user(frame)
                    if frame.bytes not in sources.known and frame.more:
                        message.append(frame.bytes)
                        frame = _recv(socket, _NOBLOCK, False)  # the ROUTER itself added the first frame
                        sources.add(message[0], _descriptor(frame))
                elif len(message) > sources.max_frames:
                    sources.offender(_descriptor(frame))
                    _discard(socket, frame)
                    return message
            # A frame's buffer is writable for Python, but nobody else uses it.
            message.append(frame.buffer.toreadonly() if share and len(frame) >= SHARED else frame.bytes)
            if not frame.more:
                return message
    except zmq.Again:
        return None


def _user(frame: Any) -> bytes:
    """Return the user id that ZAP gave the connection that `frame` arrived on; empty if there is none."""
    try:
        user: str = frame.get("User-Id")
    except zmq.ZMQError:
        return b""
    return user.encode()


def _descriptor(frame: Any) -> int:
    """Return the descriptor of the connection that `frame` arrived on, or -1."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _discard(socket: zmq.Socket[bytes], frame: Any) -> None:
    """Discard the frames of a message that follow `frame`."""
    while frame.more:
        frame = _recv(socket, _NOBLOCK, False)


class Unsent:
    """What libzmq holds of the messages that `send` gave it, per peer of a ROUTER: up to SNDHWM messages of any size.

    The last frame of a message of `COUNTED_BYTES` or more, or of as many messages together, reports when libzmq has
    sent it, and with it all frames before it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """Upper bound of the bytes that wait, apart from the message that is being sent to each peer.

        `settle` makes it exact."""
        self._peers: dict[bytes, _Peer] = {}
        self._settle_at = SETTLE_PEERS

    def settle(self) -> None:
        """Subtract from `bytes` what libzmq has sent meanwhile."""
        for identity, peer in list(self._peers.items()):
            peer.settle()
            if not peer.held:
                del self._peers[identity]
        self.bytes = sum(peer.waiting for peer in self._peers.values())
        self._settle_at = 2 * len(self._peers) + SETTLE_PEERS

    def waiting(self) -> dict[bytes, int]:
        """Return each peer's part of `bytes`."""
        return {identity: peer.waiting for identity, peer in self._peers.items() if peer.waiting}

    def forget(self, identity: bytes) -> None:
        """Stop counting what libzmq holds for a peer: its connection ends."""
        peer = self._peers.pop(identity, None)
        if peer is not None:
            self.bytes -= peer.waiting

    def peer(self, identity: bytes) -> "_Peer":
        """Return what is known of a peer."""
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._settle_at:  # the peers may be gone
                self.settle()
            peer = self._peers[identity] = _Peer()
        return peer


SETTLE_PEERS: Final = 1000
"""Number of new peers after which `Unsent` forgets those for which nothing waits."""


class _Peer:
    """What libzmq holds for one peer."""

    __slots__ = ("_largest", "_reports", "held", "uncounted", "waiting")

    def __init__(self) -> None:
        self.uncounted = 0
        """The bytes sent since the last frame that reports."""
        self.held = 0
        self.waiting = 0
        """`held` without the message that is being sent."""
        self._largest = 0
        self._reports: list[tuple[zmq.MessageTracker, int]] = []

    def add(self, report: zmq.MessageTracker) -> None:
        """Count the bytes that `report` stands for."""
        size, self.uncounted = self.uncounted, 0
        self.settle()
        self._largest = max(self._largest, size) if self.held else size
        self.held += size
        self.waiting = self.held - self._largest
        self._reports.append((report, size))

    def settle(self) -> None:
        """Subtract what has been sent."""
        while self._reports and self._reports[0][0].done:
            self.held -= self._reports.pop(0)[1]
        self.waiting = max(0, self.held - self._largest)


def cost_of(message: Message) -> int:
    """Return the memory in bytes that `message` takes while it waits, in libzmq or here."""
    return MESSAGE_COST + FRAME_COST * len(message) + sum(map(len, message))


def send(socket: zmq.Socket[bytes], message: Message, unsent: Unsent | None = None) -> int:
    """Send all of `message` or nothing.  Return 0, EAGAIN or EHOSTUNREACH."""
    peer = None
    if unsent is not None:
        peer = unsent.peer(message[0])
        size = cost_of(message)
        peer.uncounted += size
    try:
        for frame in message[:-1]:
            if len(frame) < SHARED:
                _send(socket, frame, _MORE)
            else:
                _send_large(socket, frame, _MORE)
        last = message[-1]
        if unsent is not None and peer is not None and peer.uncounted >= COUNTED_BYTES:
            report = _send(socket, zmq.Frame(last, track=True, copy=False), _NOBLOCK, False, True)
            before = peer.waiting
            peer.add(report)
            unsent.bytes += peer.waiting - before
        elif len(last) < SHARED:
            _send(socket, last, _NOBLOCK)
        else:
            _send_large(socket, last, _NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in {EAGAIN, EHOSTUNREACH}:
            if peer is not None:
                peer.uncounted -= size
            return int(error.errno)
        raise
    return 0


def _send_large(socket: zmq.Socket[bytes], frame: Any, flags: int) -> None:
    """Send a frame of `SHARED` bytes or more, without copying it if it was shared by `receive` or is large."""
    owner = getattr(frame, "obj", None)
    if isinstance(owner, zmq.Frame) and len(owner) == len(frame):
        _send(socket, owner, flags, False)
    else:
        _send(socket, frame, flags, len(frame) < ZERO_COPY_BYTES)

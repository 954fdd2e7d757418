"""`receive` and `send` in pure Python (see `multipart`)."""

from collections.abc import Callable
from errno import EAGAIN, EHOSTUNREACH
from typing import Any, Final

import zmq
from zmq.backend import Socket as _Backend

from ..wire import SHARED, Message

ZERO_COPY_BYTES: Final = 65536
"""Frame size in bytes from which on pyzmq is faster without copying."""

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
            if sources is not None and not message and frame.bytes not in sources.known and frame.more:
                message.append(frame.bytes)
                frame = _recv(socket, _NOBLOCK, False)  # the ROUTER itself added the first frame
                sources.add(message[0], _descriptor(frame))
            # A frame's buffer is writable for Python, but nobody else uses it.
            message.append(frame.buffer.toreadonly() if share and len(frame) >= SHARED else frame.bytes)
            if not frame.more:
                return message
    except zmq.Again:
        return None


def _descriptor(frame: Any) -> int:
    """Return the descriptor of the connection that `frame` arrived on, or -1."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def send(socket: zmq.Socket[bytes], message: Message) -> int:
    """Send all of `message` or nothing.  Return 0, EAGAIN or EHOSTUNREACH."""
    try:
        for frame in message[:-1]:
            if len(frame) < SHARED:
                _send(socket, frame, _MORE)
            else:
                _send_large(socket, frame, _MORE)
        if len(message[-1]) < SHARED:
            _send(socket, message[-1], _NOBLOCK)
        else:
            _send_large(socket, message[-1], _NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in {EAGAIN, EHOSTUNREACH}:
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

"""`receive` and `send` of a whole message in Python alone (see `multipart`)."""

from collections.abc import Callable
from errno import EAGAIN, EHOSTUNREACH
from typing import Any, Final

import zmq
from zmq.backend import Socket as _Backend

from ..wire import SHARED, Message

LARGE: Final = 65536
"""Bytes from which pyzmq takes less to have a frame sent without a copy than with one."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Not the methods of zmq.Socket, which look at their arguments first.
_recv: Final[Callable[..., Any]] = _Backend.recv
_send: Final[Callable[..., Any]] = _Backend.send


def receive(socket: zmq.Socket[bytes], share: bool = False, sources: Any = None) -> Message | None:
    """The next message that has arrived on `socket`, or None."""
    message: Message = []
    try:
        while True:
            # A frame knows whether more follow; a copy would have to ask the socket.
            frame = _recv(socket, _NOBLOCK, False)
            if sources is not None and not message and frame.bytes not in sources.known and frame.more:
                message.append(frame.bytes)
                frame = _recv(socket, _NOBLOCK, False)  # the ROUTER made up the first one
                sources.add(message[0], _descriptor(frame))
            # The buffer of a frame is writable, as far as Python knows; nobody else has it.
            message.append(frame.buffer.toreadonly() if share and len(frame) >= SHARED else frame.bytes)
            if not frame.more:
                return message
    except zmq.Again:
        return None


def _descriptor(frame: Any) -> int:
    """The descriptor of the connection that `frame` came through; -1 if there is none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def send(socket: zmq.Socket[bytes], message: Message) -> int:
    """Send `message`, or nothing of it.  0, EAGAIN or EHOSTUNREACH."""
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
    """Send a frame of `SHARED` bytes or more; without a copy if it was received so, or if it is large."""
    owner = getattr(frame, "obj", None)
    if isinstance(owner, zmq.Frame) and len(owner) == len(frame):
        _send(socket, owner, flags, False)
    else:
        _send(socket, frame, flags, len(frame) < LARGE)

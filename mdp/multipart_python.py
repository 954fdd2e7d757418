"""`receive` and `send` of a whole message in Python alone (see `multipart`)."""

from collections.abc import Callable
from errno import EAGAIN, EHOSTUNREACH
from typing import Any, Final

import zmq
from zmq.backend import Socket as _Backend

from .wire import Message

LARGE: Final = 65537
"""Bytes from which a frame is not copied: more than any frame may have that is not a body's."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Not the methods of zmq.Socket, which look at their arguments first.
_recv: Final[Callable[..., Any]] = _Backend.recv
_send: Final[Callable[..., Any]] = _Backend.send


def receive(socket: zmq.Socket[bytes], share: bool = False) -> Message | None:
    """The next message that has arrived on `socket`, or None."""
    message: Message = []
    try:
        while True:
            # A frame knows whether more follow; a copy would have to ask the socket.
            frame = _recv(socket, _NOBLOCK, False)
            # The buffer of a frame is writable, as far as Python knows; nobody else has it.
            message.append(frame.buffer.toreadonly() if share and len(frame) >= LARGE else frame.bytes)
            if not frame.more:
                return message
    except zmq.Again:
        return None


def send(socket: zmq.Socket[bytes], message: Message) -> int:
    """Send `message`, or nothing of it.  0, EAGAIN or EHOSTUNREACH."""
    try:
        for frame in message[:-1]:
            _send(socket, frame, _MORE, len(frame) < LARGE)
        _send(socket, message[-1], _NOBLOCK, len(message[-1]) < LARGE)
    except zmq.ZMQError as error:
        if error.errno in {EAGAIN, EHOSTUNREACH}:
            return int(error.errno)
        raise
    return 0

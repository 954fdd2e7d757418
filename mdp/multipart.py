"""One whole message in, one whole message out, never blocking.

The two functions everything here receives and sends with.  They go past pyzmq's conveniences for each frame: a broker
handles four messages of some five frames for every request.
"""

import math
from collections.abc import Callable
from errno import EAGAIN, EHOSTUNREACH
from typing import Final

import zmq
from zmq.backend import Socket as _Backend

from .wire import Message

LARGE: Final = 65536
"""Bytes from which a frame is handed to libzmq without copying it."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_send: Callable[[zmq.Socket[bytes], bytes, int, bool], object] = _Backend.send  # type: ignore[assignment]  # overloads


def milliseconds(seconds: float) -> int:
    """A poll's timeout: not negative, rounded up, and at most an hour, which a C int holds and every loop survives."""
    return math.ceil(min(max(0.0, seconds), 3600.0) * 1000)


def receive(socket: zmq.Socket[bytes]) -> Message | None:
    """The next message that has arrived on `socket`, or None.

    Raises `zmq.ZMQError` only for what is wrong with the socket itself.
    """
    message: Message = []
    recv = socket.recv
    try:
        while True:
            # A frame knows whether more follow; a copy would have to ask the socket.
            frame = recv(_NOBLOCK, False)
            message.append(frame.bytes)
            if not frame.more:
                return message
    except zmq.Again:
        return None


def send(socket: zmq.Socket[bytes], message: Message) -> int:
    """Send `message`, or nothing of it.  0, EAGAIN (the peer does not keep up) or EHOSTUNREACH (it is not there).

    Raises `zmq.ZMQError` only for what is wrong with the socket itself.
    """
    try:
        last = len(message) - 1
        for at, frame in enumerate(message):
            _send(socket, frame, _MORE if at < last else _NOBLOCK, len(frame) < LARGE)
    except zmq.ZMQError as error:
        if error.errno in {EAGAIN, EHOSTUNREACH}:
            return int(error.errno)
        raise
    return 0

"""Sockets for lasting connections, and what to do before a ROUTER listens, which libzmq leaves undone."""

import ctypes
import os
import secrets
import socket as sockets
from errno import EADDRINUSE
from pathlib import Path
from typing import Final

import zmq

from ..errors import BindError
from .sockets import Context, new_socket

LASTING: Final[dict[int, int]] = {
    zmq.HANDSHAKE_IVL: 5_000,  # milliseconds that a new connection may take for its handshake
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""Options of sockets at which connections are made by peers that may vanish, or never finish their handshake."""


def check_free(endpoint: str) -> None:
    """Raise if there is something at an ipc:// endpoint that libzmq would silently replace.

    Raises `ZMQError` (EADDRINUSE) if a program listens there, and `BindError` if it is not a socket or cannot be tried.
    """
    path = Path(endpoint.removeprefix("ipc://"))
    if str(path) == "*" or str(path).startswith("@"):
        return
    try:
        if not path.exists():
            return
    except OSError as error:  # such as a folder that this user may not enter
        raise BindError(f"cannot listen on {endpoint}: {error.strerror}") from None
    if not path.is_socket():
        raise BindError(f"cannot listen on {endpoint}: {path} exists and is not a socket")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left behind by a process that is gone
        except OSError as error:  # such as another user's, or a socket for datagrams
            raise BindError(f"cannot listen on {endpoint}: {error.strerror or error}") from None
        raise zmq.ZMQError(EADDRINUSE)


def listener(context: Context, *, linger_ms: int, max_message: int) -> zmq.Socket[bytes]:
    """Return a ROUTER for `bind`, which reports when a peer is gone or does not read.

    The kernel finds out for it that a host has vanished silently: its connection is freed then, and with it the routing
    id that a peer may have chosen.

    Args:
        context: The ZeroMQ context.
        linger_ms: How long the last messages may take to be sent after closing.
        max_message: Size in bytes of a frame from which on libzmq disconnects its sender.

    Raises `SettingError` as `new_socket` does.
    """
    # libzmq numbers peers from what libc's `rand` says, which it never seeds, and aborts if a peer has claimed the next
    # number (C39).  So the start must be one that peers cannot guess.
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))
    options = {zmq.LINGER: linger_ms, zmq.MAXMSGSIZE: max_message, zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: 1024}
    return new_socket(context, zmq.ROUTER, options | LASTING)

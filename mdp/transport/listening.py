"""What to do before a ROUTER listens, which libzmq leaves undone."""

import ctypes
import os
import secrets
import socket as sockets
from errno import EADDRINUSE
from pathlib import Path

import zmq

from ..errors import BindError


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


def randomise_routing_ids() -> None:
    """Have the next ROUTER number its peers from a random start, which peers cannot guess.

    libzmq takes the start from libc's `rand`, which it never seeds, and aborts if a peer has claimed the next number
    (C39).
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Let the kernel find out that a host has vanished silently.

    Its connection is freed then, and with it the identity that a peer may have chosen.
    """
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)

"""Sockets that listen: ROUTERs, and TCP ports for HTTP; and whether other machines can reach them."""

import ctypes
import ipaddress
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


BACKLOG: Final = 1024


def listen(host: str, port: int) -> sockets.socket:
    """Return a socket that listens at an address.  Raises `BindError`."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, address = sockets.getaddrinfo(
            host, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
        )[0]
        listener = sockets.socket(family, kind, protocol)
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = (
            ": another program listens there; use another port, or 0 for a free one"
            if error.errno == EADDRINUSE
            else ""
        )
        raise BindError(f"cannot listen on {shown}: {error.strerror}{hint}") from None
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback  # mapped: an IPv4 peer of a socket that listens for both


def shown_address(listener: sockets.socket) -> str:
    """Return HOST:PORT of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_local(endpoint: str) -> None:
    """Raise `BindError` if other machines could connect to a socket that is bound to `endpoint`."""
    protocol, found, address = endpoint.partition("://")
    host = address.rpartition(":")[0]
    if found and protocol not in {"ipc", "inproc"} and host != "lo" and not is_loopback(host):  # lo is an interface
        raise BindError(
            f"refused to listen on {endpoint}, where other machines may connect, without access control: use --access "
            f"FILE to admit known keys only, or --insecure to admit everybody (in Python, access= or insecure=True)"
        )

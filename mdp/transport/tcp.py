"""Listens on a TCP port, for programs that speak HTTP."""

import ipaddress
import socket
from errno import EADDRINUSE
from typing import Final

from ..errors import BindError

BACKLOG: Final = 1024


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.  Raises `BindError`."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def shown_address(listener: socket.socket) -> str:
    """Return HOST:PORT of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

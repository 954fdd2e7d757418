"""ZeroMQ contexts that are terminated cleanly, and the DEALER sockets of clients and workers."""

import errno
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

import zmq

from ..errors import BindError, SettingError
from ..security.keys import ClientKeys
from .descriptors import check_descriptors
from .tcp import is_loopback

Context = zmq.Context[zmq.Socket[bytes]]

Socket = zmq.Socket[bytes]

ONE_CONNECTION_MS: Final = 3_600_000
"""The reconnection interval of a socket for one connection only, so long that the socket is replaced first.

Not -1: with that, libzmq 4.3.5 leaks a session whose handshake fails, and the context never terminates."""

_INVALID: Final = frozenset({errno.EINVAL, errno.ENAMETOOLONG, errno.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO})
"""What ZeroMQ says of an endpoint that is not valid."""
_TCP_ADDRESS: Final = re.compile(r"[0-9A-Za-z\[:][-.:%;\[\]_*0-9A-Za-z]*:[0-9]+")
"""The addresses that libzmq accepts; whether there is such a host, it finds out later."""
_MAX_PORT: Final = 65535

_open: set[Context] = set()


def own_context() -> Context:
    """Return a context for one client or worker, to be terminated with `end`.

    Raises `SettingError` if too few file descriptors are free.

    This module keeps a reference until then.  Otherwise the garbage collector could terminate the context of a client
    that was never closed, and wait forever for sockets that are collected together with it.
    """
    check_descriptors()
    context: Context = zmq.Context()
    _open.add(context)
    return context


def end(context: Context) -> None:
    """Terminate `context`, whose sockets have been closed, once the last messages are sent.

    A socket that is still open, because something failed while it was made, is closed: otherwise this would never end.
    """
    context.destroy(linger=0)
    _open.discard(context)


def new_socket(  # mypyc may not know what `Socket` is
    context: Context, kind: int, options: Mapping[int, int] | None = None
) -> zmq.Socket[bytes]:
    """Return a new socket of `context` with these options.

    Raises `SettingError` if too few file descriptors are free, or the context has as many sockets as it may.
    """
    check_descriptors()
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise _cannot_open(error) from None
    for option, value in (options or {}).items():
        socket.set(option, value)
    return socket


def _cannot_open(error: zmq.ZMQError) -> Exception:
    """Return the error for a socket that cannot be opened.  libzmq reports a context without room as EMFILE too."""
    if error.errno != errno.EMFILE:
        return error
    try:
        check_descriptors()
    except SettingError as found:
        return found
    return SettingError(
        "this ZeroMQ context has as many sockets as it may: set zmq.MAX_SOCKETS before its first socket, or use "
        "several contexts"
    )


def checked_endpoint(endpoint: object) -> str:
    """Return `endpoint`.  Raises `SettingError` if it is not a string, or has no valid port."""
    if not isinstance(endpoint, str):
        raise SettingError(f"broker is {endpoint!r}: it must be one endpoint such as 'tcp://127.0.0.1:5555'")
    problem = port_problem(endpoint)
    if problem is not None:
        raise SettingError(f"{endpoint!r} is not a valid endpoint: {problem}")
    return endpoint


def checked_endpoints(broker: str | Sequence[str]) -> list[str]:
    """Return the endpoints in `broker`, at least one.

    Raises `SettingError` if ZeroMQ cannot connect to one of them.  Nothing is connected to find out: a broker would log
    that as a failed handshake.
    """
    given = list(broker) if isinstance(broker, list | tuple) else [broker]
    if not given:
        raise SettingError("broker is empty: it must be an endpoint such as tcp://127.0.0.1:5555, or several")
    endpoints = [checked_endpoint(each) for each in given]
    for endpoint in endpoints:
        problem = _connect_problem(endpoint)
        if problem is not None:
            raise SettingError(f"{endpoint!r} is not a valid endpoint: {problem}")
    return endpoints


def _connect_problem(endpoint: str) -> str | None:
    """Return why ZeroMQ would not connect to an endpoint that has no `port_problem`, or None."""
    transport, _, address = endpoint.partition("://")
    if transport not in {"tcp", "inproc"} and not zmq.has(transport):
        return "endpoints begin with tcp://, ipc:// or inproc://, as in tcp://127.0.0.1:5555"
    if not address or address == "@":
        return "it has no address, as in tcp://127.0.0.1:5555"
    if transport == "tcp" and not _TCP_ADDRESS.fullmatch(address):
        return "write tcp://HOST:PORT, as in tcp://127.0.0.1:5555"
    if transport == "ipc" and len(os.fsencode(address)) > zmq.IPC_PATH_MAX_LEN > 0:
        return f"its path is longer than {zmq.IPC_PATH_MAX_LEN} bytes"
    return None


def port_problem(endpoint: str) -> str | None:
    """Return what is wrong with the port of a tcp:// endpoint, or with how its IPv6 address is written, or None."""
    if not endpoint.startswith("tcp://"):
        return None
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not colon or port.endswith("]"):  # of an IPv6 address
        return "it has no port, such as :5555 at its end"
    if port != "*" and not (port.isdecimal() and int(port) <= _MAX_PORT):
        return f"its port is {port!r}, but a port is a number up to {_MAX_PORT}"
    host = host.rpartition(";")[2]  # after a source address
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address is written in brackets, as in tcp://[::1]:5555"
    return None


def check_local(endpoint: str) -> None:
    """Raise `BindError` if other machines could connect to a socket that is bound to `endpoint`."""
    protocol, found, address = endpoint.partition("://")
    host = address.rpartition(":")[0]
    if found and protocol not in {"ipc", "inproc"} and host != "lo" and not is_loopback(host):  # lo is an interface
        raise BindError(
            f"refused to listen on {endpoint}, where other machines may connect, without access control: use --access "
            f"FILE to admit known keys only, or --insecure to admit everybody (in Python, access= or insecure=True)"
        )


def use_family(socket: Socket, endpoint: str) -> None:
    """Let `socket` use IPv6 for `endpoint`, the next that it binds or connects to, if that has an IPv6 address.

    With the option, libzmq would look up names for IPv6 first, and not find a broker that listens on 127.0.0.1.
    """
    socket.set(zmq.IPV6, int("://[" in endpoint))


def dealer(
    context: Context,
    endpoint: str,
    options: Mapping[int, int],
    *,
    keys: ClientKeys | None = None,
    monitored: int = 0,
) -> Socket:
    """Return a DEALER with these options that is connected to `endpoint`.

    With `keys`, the connection is encrypted.  With `monitored` events, `get_monitor_socket` returns a socket that has
    reported them from the beginning.

    Raises `SettingError` if the endpoint is invalid, or as `new_socket` does.
    """
    socket = new_socket(context, zmq.DEALER, options)
    monitor: Socket | None = None
    try:
        if keys is not None:
            keys.at(endpoint).apply(socket)
        if monitored:
            monitor = socket.get_monitor_socket(monitored)
        use_family(socket, endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        if monitor is not None:
            monitor.close(0)
        socket.close(0)
        raise invalid_endpoint(endpoint, error) from None
    return socket


def invalid_endpoint(endpoint: str, error: zmq.ZMQError) -> Exception:
    """Return the error for an endpoint that ZeroMQ does not accept, or for a socket that cannot be opened."""
    if error.errno in _INVALID:
        return SettingError(f"{endpoint!r} is not a valid endpoint ({error}): try tcp://127.0.0.1:5555")
    return _cannot_open(error)

"""ZeroMQ contexts that are terminated cleanly, and the DEALER sockets of clients and workers.

Before ZeroMQ opens file descriptors, it is made sure that enough are free: without one, libzmq ends the process.
"""

import errno
import os
from collections.abc import Mapping
from typing import Final

import zmq

from ..errors import SettingError
from ..security.keys import ClientKeys

Context = zmq.Context[zmq.Socket[bytes]]

Socket = zmq.Socket[bytes]

ONE_CONNECTION_MS: Final = 3_600_000
"""The reconnection interval of a socket for one connection only, so long that the socket is replaced first.

Not -1: with that, libzmq 4.3.5 leaks a session whose handshake fails, and the context never terminates."""

_INVALID: Final = frozenset({errno.EINVAL, errno.ENAMETOOLONG, errno.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO})
"""What ZeroMQ says of an endpoint that is not valid."""

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


FREE_FILES: Final = 16
"""Descriptors that must be free before a context or a socket is made.

A context takes 5, a socket with its monitor 3, its connection 1, and the thread or event loop that waits for them 3."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})


def check_descriptors(more: int = 0) -> None:
    """Raise `SettingError` unless this process can open `FREE_FILES` descriptors, and `more`."""
    needed = FREE_FILES + more
    opened: list[int] = []
    reason = None
    try:
        while len(opened) < needed:
            opened += os.pipe()
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        reason = error.errno
    finally:
        for each in opened:
            os.close(each)
    if reason is not None:  # not earlier: the text needs a module, and so a descriptor
        raise SettingError(_problem(needed, reason))


def _problem(needed: int, reason: int) -> str:
    text = f"too few file descriptors are free: ZeroMQ needs {needed} of them to begin"
    if reason == errno.ENFILE:
        return f"{text}, and this machine has as many open as it may (sysctl fs.file-max)"
    return f"{text}, and this process may have {_limit()} open: raise the limit (ulimit -n), or close files"


def _limit() -> int:
    import resource  # noqa: PLC0415 - Windows has none, and no such limit

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

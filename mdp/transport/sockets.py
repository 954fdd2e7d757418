"""ZeroMQ contexts that end in order, and the DEALERs of clients and workers."""

from collections.abc import Mapping

import zmq

from ..errors import SettingError

Context = zmq.Context[zmq.Socket[bytes]]

Socket = zmq.Socket[bytes]

_open: set[Context] = set()


def own_context() -> Context:
    """A context for one client or worker, to be ended with `end`.

    Kept here until then: one that the garbage collector finds, with a client that nobody has closed, would wait for
    ever for sockets that are found with it.
    """
    context: Context = zmq.Context()
    _open.add(context)
    return context


def end(context: Context) -> None:
    """Wait until the last messages are out, and end `context`.  Its sockets have been closed."""
    context.term()
    _open.discard(context)


def checked_endpoint(endpoint: object) -> str:
    """`endpoint`, if it is text.  Raises `SettingError`."""
    if not isinstance(endpoint, str):
        raise SettingError(f"broker is {endpoint!r}: it takes an endpoint such as 'tcp://127.0.0.1:5555'")
    return endpoint


def dealer(context: Context, endpoint: str, options: Mapping[int, int]) -> Socket:
    """A DEALER with these options that connects to `endpoint`.  Raises `SettingError` if that is none."""
    socket = context.socket(zmq.DEALER)
    try:
        for option, value in options.items():
            socket.set(option, value)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise SettingError(f"{endpoint!r} is no endpoint ({error}): try tcp://127.0.0.1:5555") from None
    return socket

"""One whole message in, one whole message out, never blocking.

The two functions everything here receives and sends with.  They go past pyzmq's conveniences for each frame: a broker
handles four messages of some five frames for every request.  There are two makes of them, the same to their callers:
`multipart_cython`, compiled where the build could, calls pyzmq's libzmq itself; `multipart_python` does without.

    receive(socket)              the next message that has arrived, a list of bytes; None if there is none
    receive(socket, share=True)  the same, but a frame of `SHARED` bytes or more is a read-only memoryview of libzmq's
                                 own buffer: for who passes it on, and looks at nothing but its length
    receive(socket, share, sources)    the same from a ROUTER: a peer that is not in `sources.known` is told of with
                                 `sources.add(identity, descriptor)`
    send(socket, message)        send all of `message`, or nothing of it: 0, EAGAIN (the peer does not keep up) or
                                 EHOSTUNREACH (it is not there).  Shared frames, and large ones, are not
                                 copied

Both raise `zmq.ZMQError` only for what is wrong with the socket itself.
"""

import math
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from ...pure import PURE
from ..wire import SHARED
from . import multipart_python
from .multipart_python import LARGE

__all__ = ["COMPILED", "LARGE", "SHARED", "milliseconds", "receive", "send"]

_compiled: Any = None
if not PURE:
    with suppress(ImportError):  # not built, or a pyzmq that is not made of Cython (PyPy's)
        _compiled = import_module(".multipart_cython", __package__)

COMPILED: Final = _compiled is not None
"""Whether these are the compiled two."""

receive = multipart_python.receive
send = multipart_python.send
if COMPILED:
    receive = _compiled.receive
    send = _compiled.send


def milliseconds(seconds: float) -> int:
    """A poll's timeout: not negative, rounded up, and at most an hour, which a C int holds and every loop survives."""
    return math.ceil(min(max(0.0, seconds), 3600.0) * 1000)

"""Receive or send one whole message, never blocking.

Everything in zmdp receives and sends with these two functions.  They bypass pyzmq's overhead per frame: for every
request, a broker handles four messages of about five frames.  There are two implementations: `multipart_cython` calls
pyzmq's libzmq directly, and is used if it was compiled; `multipart_python` is pure Python.

    receive(socket)                  Return the next message that has arrived, a list of bytes, or None.
    receive(socket, share=True)      The same, but frames of `SHARED` bytes or more are read-only memoryviews of
                                     libzmq's buffers, for callers that only pass them on.
    receive(socket, share, sources)  The same from a ROUTER:
                                     - if `sources.secured`, set `sources.user` to the user id (bytes) that ZAP gave the
                                       message's connection, or to b"";
                                     - call `sources.add(identity, descriptor)` if the peer is not in `sources.known`;
                                     - if there are more than `sources.max_frames` frames, call
                                       `sources.offender(descriptor)`, and discard the rest without creating objects.
    send(socket, message)            Send all frames of `message`, or none of them.  Return 0, EAGAIN (the peer does not
                                     keep up) or EHOSTUNREACH (the peer is gone).  Shared and large frames are not
                                     copied.
    send(socket, message, unsent)    The same from a ROUTER: count in `unsent`, an `Unsent`, what libzmq holds.
    cost_of(message)                 Return the memory in bytes that a message takes while it waits to be sent.

Both raise `zmq.ZMQError` only for errors of the socket itself.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from ...version import PURE
from ..wire import SHARED
from . import multipart_python
from .multipart_python import COUNTED_BYTES, ZERO_COPY_BYTES

__all__ = ["COMPILED", "COUNTED_BYTES", "SHARED", "ZERO_COPY_BYTES", "Unsent", "cost_of", "receive", "send"]

_compiled: Any = None
if not PURE:
    with suppress(ImportError):  # not built, or a pyzmq without Cython (on PyPy)
        _compiled = import_module(".multipart_cython", __package__)

COMPILED: Final = _compiled is not None
"""Whether the compiled implementation is in use."""

receive = multipart_python.receive
send: Any = multipart_python.send
cost_of = multipart_python.cost_of
Unsent: Any = multipart_python.Unsent
if COMPILED:
    receive = _compiled.receive
    send = _compiled.send
    cost_of = _compiled.cost_of
    Unsent = _compiled.Unsent

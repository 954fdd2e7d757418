"""Interrupts a thread that polls descriptors, from another thread or from a signal handler."""

import socket as sockets
from contextlib import suppress


class Wake:
    """A pair of connected sockets: the thread polls `descriptor`, which is readable from `wake` until `clear`."""

    def __init__(self) -> None:
        self._sender, self._receiver = sockets.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._asked = False
        self.descriptor = self._receiver.fileno()

    def wake(self) -> None:
        """Interrupt the poll that is under way, or else the next one."""
        with suppress(OSError):  # it is full, so the thread is about to be woken; or it was closed
            self._sender.send(b"!")

    def clear(self) -> None:
        """Forget all calls of `wake` so far, after a poll."""
        self._asked = False
        with suppress(OSError):
            self._receiver.recv(4096)

    def answered(self) -> bool:
        """Wake the thread, to see whether it is alive.  Return whether it has polled since the last call."""
        answered = not self._asked
        self._asked = True
        self.wake()
        return answered

    def run_handlers(self) -> None:
        """Let the handlers of signals run that have arrived, as Python does in interpreted code like this only."""

    def close(self) -> None:
        """Close both sockets."""
        self._sender.close()
        self._receiver.close()

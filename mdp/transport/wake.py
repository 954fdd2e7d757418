"""Interrupts a thread that polls descriptors, from another thread or from a signal handler."""

import os
import socket as sockets
import sys
from contextlib import suppress
from typing import Any, Final

WOKEN: Final = (1).to_bytes(8, sys.byteorder)
"""Adds 1 to the counter of an eventfd."""


class Wake:
    """The thread polls `descriptor`, which is readable from `wake` until `clear`.

    It is an eventfd where there are such (Linux), which takes a fifth of the time of a pair of connected sockets.
    """

    def __init__(self) -> None:
        sender: Any
        receiver: Any
        if hasattr(os, "eventfd"):
            sender = receiver = open(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", buffering=0)  # noqa: SIM115
            self._write, self._read, self._bytes = sender.write, receiver.read, len(WOKEN)
        else:
            sender, receiver = sockets.socketpair()
            sender.setblocking(False)
            receiver.setblocking(False)
            self._write, self._read, self._bytes = sender.send, receiver.recv, 4096
        self._ends = (sender, receiver)
        self._asked = False
        self.descriptor: int = receiver.fileno()

    def wake(self) -> None:
        """Interrupt the poll that is under way, or else the next one."""
        with suppress(OSError, ValueError):  # it is full, so the thread is about to be woken; or it was closed
            self._write(WOKEN)

    def clear(self) -> None:
        """Forget all calls of `wake` so far, after a poll."""
        self._asked = False
        with suppress(OSError, ValueError):
            self._read(self._bytes)

    def answered(self) -> bool:
        """Wake the thread, to see whether it is alive.  Return whether it has polled since the last call."""
        answered = not self._asked
        self._asked = True
        self.wake()
        return answered

    def run_handlers(self) -> None:
        """Let the handlers of signals run that have arrived, as Python does in interpreted code like this only."""

    def close(self) -> None:
        """Close it.  Waking it does nothing from then on."""
        for end in self._ends:
            end.close()

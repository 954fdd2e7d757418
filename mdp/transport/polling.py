"""Waits for descriptors to become readable, in threads and in event loops, and interrupts a thread that waits.

It works on Windows too, which has neither `select.poll` nor `add_reader`.
"""

import math
import os
import select
import socket as sockets
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

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


# ── in threads ───────────────────────────────────────────────────────────────────────────────────────────────────────

READABLE: Final[int] = getattr(select, "POLLIN", 1)


class Poller(Protocol):
    """The methods of `select.poll` that are used here."""

    def register(self, descriptor: int, events: int, /) -> None:
        """Watch a descriptor for `READABLE`."""

    def unregister(self, descriptor: int, /) -> None:
        """Stop watching it."""

    def poll(self, milliseconds: int | None = None, /) -> list[tuple[int, int]]:
        """Wait, and return the descriptors that are readable, each with `READABLE`."""


def new_poller() -> Poller:
    """Return `select.poll()`, or on Windows its substitute."""
    return select.poll() if hasattr(select, "poll") else SelectPoller()


class SelectPoller:
    """A `Poller` of `select.select`."""

    def __init__(self) -> None:
        self._descriptors: set[int] = set()

    def register(self, descriptor: int, events: int, /) -> None:
        """Watch a descriptor."""
        del events
        self._descriptors.add(descriptor)

    def unregister(self, descriptor: int, /) -> None:
        """Stop watching it."""
        self._descriptors.remove(descriptor)

    def poll(self, milliseconds: int | None = None, /) -> list[tuple[int, int]]:
        """Wait, and return what is readable."""
        seconds = None if milliseconds is None or milliseconds < 0 else milliseconds / 1000
        return [(each, READABLE) for each in _readable(list(self._descriptors), seconds)]


def _readable(descriptors: list[int], seconds: float | None) -> list[int]:
    """Return the descriptors that are readable, as soon as there are some, or when the time is over."""
    try:
        readable, _, _ = select.select(descriptors, [], [], seconds)
    except OSError:  # another thread has closed one: it is about to say so
        return []
    return readable


def milliseconds(seconds: float) -> int:
    """Return `seconds` as a timeout for polling: not negative, rounded up, and at most an hour, to fit into a C int."""
    if 0.0 < seconds < 3600.0:
        return math.ceil(seconds * 1000)
    return 0 if seconds <= 0.0 else 3_600_000


# ── in event loops ───────────────────────────────────────────────────────────────────────────────────────────────────


def add_reader(loop: "AbstractEventLoop", descriptor: int, callback: Callable[[], Any]) -> None:
    """Have the loop call `callback` when the descriptor is readable, as its own `add_reader` does if it has one."""
    try:
        loop.add_reader(descriptor, callback)
    except NotImplementedError:  # Windows' default
        if loop not in _watchers:
            _watchers[loop] = _Watcher(loop)
        _watchers[loop].add(descriptor, callback)


def remove_reader(loop: "AbstractEventLoop", descriptor: int) -> None:
    """Undo `add_reader`, before the descriptor is closed."""
    watcher = _watchers.get(loop)
    if watcher is None:
        loop.remove_reader(descriptor)
    elif watcher.remove(descriptor):
        del _watchers[loop]


class _Watcher:
    """A thread that watches descriptors for an event loop.  It waits while the loop's callbacks run."""

    def __init__(self, loop: "AbstractEventLoop") -> None:
        self._callbacks: dict[int, Callable[[], Any]] = {}
        self._wake = Wake()
        self._handled = threading.Event()
        self._call: Callable[..., Any] | None = loop.call_soon_threadsafe
        threading.Thread(target=self._run, name="zmdp-readers", daemon=True).start()

    def add(self, descriptor: int, callback: Callable[[], Any]) -> None:
        self._callbacks[descriptor] = partial(copy_context().run, callback)
        self._wake.wake()

    def remove(self, descriptor: int) -> bool:
        """Stop watching a descriptor.  Return whether it was the last one: then the thread ends."""
        self._callbacks.pop(descriptor, None)
        if not self._callbacks:
            self._call = None
        self._wake.wake()
        return not self._callbacks

    def _run(self) -> None:
        while (call := self._call) is not None:
            ready = _readable([*self._callbacks, self._wake.descriptor], None)
            self._wake.clear()
            try:
                call(self._handle, ready)
            except RuntimeError:  # the loop is closed
                break
            self._handled.wait()
            self._handled.clear()
        self._wake.close()

    def _handle(self, ready: list[int]) -> None:
        try:
            for descriptor in ready:
                callback = self._callbacks.get(descriptor)
                if callback is not None:
                    callback()
        finally:
            self._handled.set()


_watchers: "Final[dict[AbstractEventLoop, _Watcher]]" = {}
"""The watcher of each loop that needs one and has something to watch."""

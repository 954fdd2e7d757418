"""Ends a command on SIGTERM or Ctrl-C: in its own way if it can, and within a limit whatever its handlers do.

Has it read its files again on SIGHUP.
"""

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, Self

import click

from .console import EXIT_FAILED, Decorator, Number
from .notify import notify

STOPPING: Final = "stopping once the requests in progress are finished"
RESTART: Final = "restart it to change its settings"
GRACE_SECONDS: Final = 1.0
"""How long a command may take after its limit: to give up by itself, and to close what it has open."""
LAST_RESORT_SECONDS: Final = 1.9
"""When, after the limit, the process ends even if no Python code can run."""
REPORT_SECONDS: Final = 0.5
"""How long it may take to log what was given up: the reader of the log may have stopped."""
LONGEST_WAIT_SECONDS: Final = 3600.0

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_HANGUP: Final = getattr(signal, "SIGHUP", None)
"""None on Windows."""
_BEGIN: Final = 0
_HANDLED: Final = 0x80
"""Added to the number of a signal that Python has handled."""

log = logging.getLogger("zmdp.shutdown")


class Shutdown:
    """Ends a command on SIGTERM or Ctrl-C, and at the latest a little after `limit` seconds.

        with Shutdown(server.stop, limit=10.0, unfinished=server.describe):
            server.run()

    Each signal calls the next of `steps`; a further one exits immediately.  If the process still runs `limit` seconds
    after the first signal, `at_limit` is called.  If it still runs `grace` seconds later, what `unfinished` returns is
    logged, and the process exits.  Both exit with code 1.

    All of this happens in threads of its own, because a handler may block the main thread: there Python would run what
    is to happen on a signal.  Nothing waits for what it calls.

    SIGHUP calls `reload`, or is logged as having no effect; if the terminal was closed, it is a signal like the others.
    A handler of SIGHUP that the program has installed itself stays.

    A child that is forked, as `multiprocessing` does, is not concerned: signals end it as they would without this.

    After a signal, it stays in force when the block has ended, until the process has: Python waits for all threads of
    executors before it exits.  Without a signal, it ends with the block.  Main thread only.

    Args:
        limit: Seconds for the requests in progress.
        unfinished: Returns what is given up, as in "gave up 2 requests of echo".
        announcement: What the first signal logs, with the limit; empty to log nothing.
        at_limit: Gives up what is in progress, if the command does not do so by itself.
        exits: Whether a signal after the last step exits immediately; otherwise it is ignored.
        grace: Seconds after `limit` that the command may take to end.
        reload: Reads again what can be read again while the command runs; None if nothing can.
        restart: What to do instead, as in "restart it to change its settings".
        logger: The command's.
    """

    def __init__(
        self,
        *steps: Callable[[], object],
        limit: float,
        unfinished: Callable[[], str],
        announcement: str = STOPPING,
        at_limit: Callable[[], object] | None = None,
        exits: bool = True,
        grace: float = GRACE_SECONDS,
        reload: Callable[[], object] | None = None,
        restart: str = RESTART,
        logger: logging.Logger = log,
    ) -> None:
        self._steps = steps
        self._limit = limit
        self._unfinished = unfinished
        self._announcement = announcement and f"{announcement}, within {limit:g} s; interrupt again to exit immediately"
        self._at_limit = at_limit
        self._exits = exits
        self._grace = grace
        self._reload = reload
        self._restart = restart
        self._log = logger
        self._began: float | None = None
        """When the limit began to count."""
        self._signals = 0
        self._first_step: threading.Thread | None = None
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="shutdown", daemon=True)

    def begin(self) -> None:
        """Let the limit count from now on, if it does not yet: the command is stopping for another reason.

        Any thread may call it.
        """
        self._send(_BEGIN)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._handle) for number in self._to_handle()}
        # `nohup` ignores it, so that the command outlives its terminal.
        self._has_terminal = _HANGUP is not None and self._handlers.get(_HANGUP) == signal.SIG_DFL and _has_terminal()
        # What handles a signal in Python runs only in the main thread.  The numbers of signals are written here at
        # once, even if the main thread does not return from C code.
        self._wakeup = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        if self._wakeup != -1:  # an event loop of C code, which has to learn of signals itself
            signal.set_wakeup_fd(self._wakeup)
        _active.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._first_step is not None:
            self._first_step.join(REPORT_SECONDS)  # it may be about to log
        if self._began is None:
            self.restore()
            self._write_end.close()  # ends the thread
            self._thread.join()
            self._read_end.close()

    def _to_handle(self) -> tuple[signal.Signals, ...]:
        if _HANGUP is None or (self._reload is None and callable(signal.getsignal(_HANGUP))):
            return _SIGNALS
        return (*_SIGNALS, _HANGUP)

    def restore(self) -> None:
        """Handle signals as before."""
        _active.remove(self)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor != self._write_end.fileno():
            signal.set_wakeup_fd(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child, handle signals as a program does that handles none."""
        for number, handler in self._handlers.items():
            inherited = handler in (signal.SIG_IGN, signal.default_int_handler)
            signal.signal(number, handler if inherited else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._send(number | _HANDLED)

    def _send(self, number: int) -> None:
        with suppress(OSError):  # so much has been sent that one more makes no difference
            self._write_end.send(bytes([number]))

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        ends, hangups = _Arrivals(), _Arrivals()
        for sent in iter(self._next, None):
            number, handled = sent & ~_HANDLED, sent >= _HANDLED
            if sent == _BEGIN:
                self._count()
            elif number == _HANGUP and hangups.is_new(handled):
                self._hang_up()
            elif number in _SIGNALS and ends.is_new(handled):
                self._signal()

    def _next(self) -> int | None:
        """Return what was sent, or None at the end.  Meanwhile enforces the limit."""
        while True:
            self._read_end.settimeout(self._enforce())
            try:
                return next(iter(self._read_end.recv(1)), None)
            except TimeoutError:
                continue

    def _signal(self) -> None:
        self._count()
        self._signals += 1
        if self._signals <= len(self._steps):
            step = _start(self._take_step, self._signals)
            self._first_step = self._first_step or step
        elif self._exits:
            os._exit(EXIT_FAILED)

    def _hang_up(self) -> None:
        if _HANGUP is None or signal.getsignal(_HANGUP) != self._handle:
            return  # the program has installed a handler of its own in the meantime
        if self._has_terminal and not _has_terminal():
            self._signal()
        else:
            _start(self._reload or self._nothing_to_reload)

    def _nothing_to_reload(self) -> None:
        self._log.warning("SIGHUP: there is nothing to reload: %s", self._restart)

    def _take_step(self, number: int) -> None:
        self._steps[number - 1]()
        if number == 1 and self._announcement:  # afterwards, so that nothing begins after it
            self._log.info(self._announcement)

    def _count(self) -> None:
        if self._began is None:
            self._began = time.monotonic()
            notify("STOPPING=1")
            # This thread needs the interpreter too, which C code may never let go.
            with suppress(Exception):  # the limit is too long, or stderr has no descriptor
                faulthandler.dump_traceback_later(self._limit + LAST_RESORT_SECONDS, exit=True)

    def _enforce(self) -> float | None:
        """Do what is due.  Return the seconds until something else is, or None."""
        if self._began is None:
            return None
        left = self._began + self._limit - time.monotonic()
        if left <= 0 and self._at_limit is not None:
            _start(self._at_limit)
            self._at_limit = None
        if self._at_limit is None:
            left += self._grace
        if left <= 0:
            self._give_up()
        return min(left, LONGEST_WAIT_SECONDS)

    def _give_up(self) -> None:
        reporter = _start(self._report)
        if reporter is None:
            self._report()  # the last resort ends the process if nobody reads the log
        else:
            reporter.join(REPORT_SECONDS)
        os._exit(EXIT_FAILED)

    def _report(self) -> None:
        self._log.error("not finished within %g s: gave up %s", self._limit, self._unfinished())


_active: Final[list[Shutdown]] = []


class _Arrivals:
    """Tells signals of a kind apart: each is written twice, unless an event loop has its own descriptor, or Python is
    held up."""

    def __init__(self) -> None:
        self._counts = [0, 0]
        self._new = 0

    def is_new(self, handled: bool) -> bool:
        self._counts[handled] += 1
        new = max(self._counts) > self._new
        self._new += new
        return new


class _Fork(threading.local):
    """Holds signals back while a thread forks: until the child handles them itself, it would report them to its parent,
    which would take them for its own."""

    _before: set[int]

    def begin(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_SIGNALS, signal.SIGHUP))

    def end(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def end_in_child(self) -> None:
        for shutdown in reversed(_active):
            shutdown.leave_to_parent()
        _active.clear()
        self.end()


_fork = _Fork()

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_fork.begin, after_in_parent=_fork.end, after_in_child=_fork.end_in_child)


def _has_terminal() -> bool:
    """Return whether the process has a terminal, which it loses when that is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _start(function: Callable[..., object], *arguments: object) -> threading.Thread | None:
    """Call a function in a thread of its own.  Return None if there can be none any more."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end
        return None
    return thread


def in_loop(function: Callable[[], object]) -> Callable[[], object]:
    """Return a function that has the running event loop call `function`, from any thread, unless it is closed."""
    from asyncio import get_running_loop  # noqa: PLC0415 - not every command uses it

    loop = get_running_loop()

    def call() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return call


def drain_timeout_option(default: float, text: str) -> Decorator:
    """Return the decorator for `--drain-timeout`."""
    return click.option(
        "--drain-timeout",
        type=Number("seconds", zero=True),
        default=default,
        help=text,
    )

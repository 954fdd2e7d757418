"""Tells systemd how a command is doing, as `Type=notify` and `WatchdogSec=` want it (sd_notify(3)).

Nothing is done where no service manager has said, with `NOTIFY_SOCKET`, where it listens.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

ADDRESS: Final = "NOTIFY_SOCKET"
BEATS: Final = 4
"""Signs of life in the time that the watchdog allows."""
POLL_SECONDS: Final = 0.1
"""Interval at which a command that is starting is asked whether it serves."""


def notify(state: str, address: str | None = None) -> None:
    """Send a state such as READY=1 to the service manager, at `address` or else where the environment says."""
    path = os.environ.get(ADDRESS, "") if address is None else address
    if not path:
        return
    if path.startswith("@"):  # an abstract socket
        path = f"\0{path[1:]}"
    # A service manager that does not listen, or is slow, must not stop a command that works.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), path)


def ready(turning: Callable[[], bool], serving: Callable[[], bool] = lambda: True) -> None:
    """Say READY once the command serves, and WATCHDOG while its loop turns.  Returns immediately.

    Args:
        turning: Asks the loop for a sign of life, and returns whether it has given the last one that it was asked for.
        serving: Whether the command serves.
    """
    ready_when(serving, os.environ.get(ADDRESS, ""))
    watchdog(turning)


def ready_when(serving: Callable[[], bool], address: str) -> None:
    """Say READY to `address` as soon as `serving` is true.  Returns immediately."""

    def report() -> None:
        while not serving():
            time.sleep(POLL_SECONDS)
        notify("READY=1", address)

    if address:
        threading.Thread(target=report, name="ready", daemon=True).start()


def watchdog(
    turning: Callable[[], bool],
    alive: Callable[[], object] | None = None,
    process: int | None = None,
) -> None:
    """Say WATCHDOG while a loop turns, if the service manager wants that.  Returns immediately.

    Args:
        turning: As for `ready`.
        alive: Called instead of saying WATCHDOG.
        process: The one of which the service manager wants it, if not this one.
    """
    allowed = watchdog_seconds(process)
    tell = alive or partial(notify, "WATCHDOG=1")

    def report(seconds: float) -> None:
        while True:
            if turning():
                tell()
            time.sleep(seconds)

    if allowed:
        threading.Thread(target=report, args=(allowed / BEATS,), name="watchdog", daemon=True).start()


def watchdog_seconds(process: int | None = None) -> float:
    """Return how long the service manager waits for a sign of life of a process, or of this; 0 if it waits for none."""
    pid = str(os.getpid() if process is None else process)
    if os.environ.get("WATCHDOG_PID", pid) != pid:
        return 0.0
    allowed = os.environ.get("WATCHDOG_USEC", "")
    return int(allowed) / 1e6 if allowed.isdigit() else 0.0


def event_loop() -> Callable[[], bool]:
    """Return the `turning` of the event loop that runs."""
    from asyncio import get_running_loop  # noqa: PLC0415 - not every command uses it

    loop, seen = get_running_loop(), threading.Event()
    seen.set()

    def turning() -> bool:
        answered = seen.is_set()
        if answered:
            seen.clear()
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(seen.set)
        return answered

    return turning


@contextmanager
def reloading() -> Generator[None]:
    """Say RELOADING, and READY at the end of the block."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        yield
    finally:
        notify("READY=1")

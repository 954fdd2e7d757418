"""Makes sure that enough file descriptors are free before ZeroMQ opens some: without one, libzmq ends the process."""

import errno
import os
from typing import Final

from ..errors import SettingError

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

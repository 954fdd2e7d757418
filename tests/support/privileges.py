"""File permissions that bind root, too."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522
"""`_LINUX_CAPABILITY_VERSION_3`: the sets effective, permitted and inheritable, of 32 capabilities, and of 32 more."""
IGNORING_PERMISSIONS = 1 << 1 | 1 << 2
"""The capabilities `CAP_DAC_OVERRIDE` and `CAP_DAC_READ_SEARCH`."""


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Let file permissions restrict this thread in the block, also if it is root's.

    It stays root: another user could not import modules from a checkout that only root can read.
    """
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(VERSION), (ctypes.c_uint32 * 6)()
    _checked(libc.capget(header, sets))
    effective = sets[0]
    sets[0] &= ~IGNORING_PERMISSIONS
    _checked(libc.capset(header, sets))
    try:
        yield
    finally:
        sets[0] = effective
        _checked(libc.capset(header, sets))


def _checked(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

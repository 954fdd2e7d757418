"""How much memory this process has allocated, libzmq included."""

import ctypes
from typing import Any, Final


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _find() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None  # not glibc, or one before 2.33
    function.argtypes, function.restype = (), _Mallinfo2
    return function


_mallinfo2: Final = _find()


def allocated_bytes() -> int:
    """Return the bytes that are allocated with C's `malloc`; 0 if it does not tell.

    This takes some milliseconds if the memory is fragmented.
    """
    if _mallinfo2 is None:
        return 0
    found = _mallinfo2()
    return int(found.uordblks + found.hblkhd)

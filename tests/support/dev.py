"""Several `zmdp dev` on a machine."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn() -> Iterator[None]:
    """Only one `zmdp dev` looks for free ports at a time: two might find the same ones."""
    with Path(tempfile.gettempdir(), "zmdp-test-dev.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

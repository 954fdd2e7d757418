"""Tests that something is freed with its last reference."""

import gc
from contextlib import contextmanager


@contextmanager
def no_collector():
    """Collect garbage, and then no more within the block, which may call `gc.collect` itself.

    The collector knows only what is made within the block: all other objects would take it long.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()

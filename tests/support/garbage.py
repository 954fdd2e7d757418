"""Tests that something is freed with its last reference."""

import gc
from contextlib import contextmanager


@contextmanager
def no_collector():
    """Collect garbage, and then no more within the block, which may call `gc.collect` itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

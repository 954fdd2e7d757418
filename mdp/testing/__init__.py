"""Brokers for tests: in a thread (`running_broker`), on a fake network (`network`), as pytest fixtures.

`running_broker` is imported when it is first used: every pytest imports this package, for the sake of its plugin.
"""

from importlib import import_module
from typing import Any

__all__ = ["running_broker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.broker"), name)

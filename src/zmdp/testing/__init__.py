"""For tests: real brokers, requests for handlers, a fake network (`network`), and pytest fixtures (`pytest_plugin`).

The functions are imported when they are first used: every pytest run imports this package, because of its plugin.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..mdp.tracing import handling
    from .broker import free_endpoint, running_broker
    from .requests import request
    from .titanic import running_titanic

__all__ = ["free_endpoint", "handling", "request", "running_broker", "running_titanic"]
_MODULES = {
    "free_endpoint": ".broker", "handling": "..mdp.tracing", "request": ".requests", "running_broker": ".broker",
    "running_titanic": ".titanic",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)

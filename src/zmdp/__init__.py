"""zmdp: a service broker for Python teams, speaking ZeroMQ's Majordomo protocol.

Call services, offer them, and leave requests with Titanic:

- `Client`, `AsyncClient`: call services
- `Worker`, `AsyncWorker`: offer services
- `Titanic`, `AsyncTitanic`: submit requests that outlive their callers (Titanic keeps them in SQL)

`zmdp.clients`, `zmdp.workers` and `zmdp.titanic` have what else belongs to them, `zmdp.mdp.errors` all errors,
`zmdp.mdp.testing` a broker for tests, and `zmdp.spark` what needs PySpark.  The commands are `mdp-broker`, `mdclient`,
`mdworker`, `titanic` and `mdp-spark`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .pure import PURE, prefer_sources

if TYPE_CHECKING:
    from .clients import AsyncClient, Client
    from .titanic import AsyncTitanic, Titanic
    from .workers import AsyncWorker, Worker

__all__ = ["AsyncClient", "AsyncTitanic", "AsyncWorker", "Client", "Titanic", "Worker", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "clients",
    "AsyncTitanic": "titanic",
    "AsyncWorker": "workers",
    "Client": "clients",
    "Titanic": "titanic",
    "Worker": "workers",
}
"""The packages of the public names, imported when a name is first used."""

if PURE:
    prefer_sources()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

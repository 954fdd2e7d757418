"""zmdp: a service broker for Python teams, speaking ZeroMQ's Majordomo protocol.

- `Client`, `AsyncClient`: call services; `Retry`: after which errors they try again
- `Services`: declare functions with types as services; `Service` and `Streaming`: call them from elsewhere
- `Tool`: what agents are told of a service that they may call
- `Limit`: how many requests of a service may run at once, and how many may start in a time
- `Worker`, `AsyncWorker`: offer a service of frames
- `ServiceError`: what a handler raises to fail with a code of its own, and what its callers then get
- `Titanic`, `AsyncTitanic`: submit requests that outlive their callers (Titanic keeps them in SQL)

A service and its caller:

    services = Services()

    @services.service("shout")
    def shout(text: str) -> str:
        return text.upper()

    services.run()

    with Client() as client:
        print(client.call(shout, "hello"))

Replies, requests, tickets and the like are in `zmdp.clients`, `zmdp.workers` and `zmdp.titanic`, all exceptions in
`zmdp.mdp.errors`, a broker for tests in `zmdp.testing`, clients and servers without a broker in
`zmdp.interop.freelance.client` and `zmdp.interop.freelance.worker`, and everything that needs PySpark in
`zmdp.spark`.  The command `zmdp` has all the others: `mdp-broker`, `mdclient`, `mdworker`, `titanic`, `mdp-gateway`,
`mdp-spark`, `mdp-keys`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import PURE, __version__, prefer_sources

if TYPE_CHECKING:
    from .clients import AsyncClient, Client, Retry
    from .mdp.service_limits import Limit
    from .mdp.services import Service, Streaming, Tool
    from .titanic import AsyncTitanic, Titanic
    from .workers import AsyncWorker, ServiceError, Worker
    from .workers.services import Services

__all__ = [
    "AsyncClient",
    "AsyncTitanic",
    "AsyncWorker",
    "Client",
    "Limit",
    "Retry",
    "Service",
    "ServiceError",
    "Services",
    "Streaming",
    "Titanic",
    "Tool",
    "Worker",
    "__version__",
]
_HOMES = {
    "AsyncClient": "clients",
    "AsyncTitanic": "titanic",
    "AsyncWorker": "workers",
    "Client": "clients",
    "Limit": "mdp.service_limits",
    "Retry": "clients",
    "Service": "mdp.services",
    "ServiceError": "workers",
    "Services": "workers.services",
    "Streaming": "mdp.services",
    "Titanic": "titanic",
    "Tool": "mdp.services",
    "Worker": "workers",
}
"""The subpackage of each public name, imported when the name is first used."""

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

"""HTTP gateways that must leave nothing behind, and what tests of jobs need besides."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.gateways import Running, running_gateway
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import Client

TITANIC = ("titanic.request", "titanic.reply", "titanic.close")


@contextmanager
def http_gateway(broker: str, **settings: Any) -> Iterator[Running]:
    """Run a gateway.  Its event loop must report no errors; afterwards nothing may be outstanding."""
    complaints: list[dict[str, Any]] = []
    with running_gateway(broker, **settings) as running:
        running.call(lambda: running.loop.set_exception_handler(lambda loop, context: complaints.append(context)))
        yield running
    assert [repr(each) for each in complaints] == []
    assert (running.gateway.outstanding, running.gateway.memory) == (0, 0)


def await_services(broker: str, *services: str, **settings: Any) -> None:
    """Wait until each service has a worker.  `settings` are those of a `Client`."""
    with Client(broker, timeout=TIMEOUT_SECONDS, **settings) as client:
        for each in services:
            eventually(partial(client.available, each))
